//! Owns the choice of what runs a guest: the KVM machine or the threads backend, by its configuration.

use std::sync::Arc;

use checkpoint::{GuestError, GuestFactory, VmId};

use crate::config::{Backend, HostConfig, MAX_MEM_BYTES, MAX_VCPUS, MIN_MEM_BYTES, MachineConfig};
use crate::threads::ThreadMachine;
use crate::vm::{SharedVm, Vm};

/// Starts a new guest: paused, its boot image loaded.
pub fn launch(config: MachineConfig, host: &HostConfig) -> Result<SharedVm, GuestError> {
    create(VmId::random(), config, host)
}

fn create(vm_id: VmId, config: MachineConfig, host: &HostConfig) -> Result<SharedVm, GuestError> {
    check(&config)?;
    match config.backend {
        Backend::Threads => Ok(ThreadMachine::new(vm_id, config, host)?),
        Backend::Kvm => Err(GuestError::Unsupported {
            what: "the backend kvm".into(),
            why: "it is not built in".into(),
        }),
    }
}

/// Builds guests of either backend from their stored or sent configuration.
pub struct Factory {
    host: HostConfig,
}

impl Factory {
    /// A factory for this host.
    pub fn new(host: HostConfig) -> Self {
        Self { host }
    }
}

impl GuestFactory for Factory {
    type Guest = dyn Vm;

    fn create(&self, vm_id: VmId, config: &[u8]) -> Result<Arc<dyn Vm>, GuestError> {
        create(vm_id, decode_config(config)?, &self.host)
    }
}

/// A configuration as `Guest::config` hands it out.
pub(crate) fn encode_config(config: &MachineConfig) -> Vec<u8> {
    // Postcard into a growing vector fails only for types that it cannot encode at all.
    postcard::to_allocvec(config).unwrap_or_default()
}

fn decode_config(bytes: &[u8]) -> Result<MachineConfig, GuestError> {
    postcard::from_bytes(bytes).map_err(|e| GuestError::Malformed {
        what: format!("the machine's configuration of {} bytes", bytes.len()),
        why: e.to_string(),
    })
}

/// The bounds of everything that memory or threads are made for.
fn check(config: &MachineConfig) -> Result<(), GuestError> {
    let refuse = |what: String, why: String| Err(GuestError::Unsupported { what, why });
    let (mem, vcpus) = (config.mem_bytes, config.vcpus);
    if !(MIN_MEM_BYTES..=MAX_MEM_BYTES).contains(&mem) || mem % dirty_tracker::PAGE_SIZE != 0 {
        let why = format!("it must be whole frames of 4K, from {MIN_MEM_BYTES} to {MAX_MEM_BYTES}");
        return refuse(format!("guest memory of {mem} bytes"), why);
    }
    if !(1..=MAX_VCPUS).contains(&vcpus) {
        return refuse(format!("a guest of {vcpus} vCPUs"), format!("it has 1 to {MAX_VCPUS}"));
    }
    if !config.ring_entries.is_power_of_two() {
        let what = format!("a dirty ring of {} entries", config.ring_entries);
        return refuse(what, "it must be a power of two".into());
    }
    Ok(())
}
