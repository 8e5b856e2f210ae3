//! Owns the choice of what runs a guest: the KVM machine or the threads backend, by its configuration.

use std::sync::Arc;

use checkpoint::{GuestError, GuestFactory, VmId};

use crate::config::{Backend, HostConfig, MAX_VCPUS, MachineConfig};
use crate::machine::{Machine, MachineError, MachineFactory};
use crate::threads::ThreadMachine;
use crate::vm::{SharedVm, Vm};

/// Why a guest was not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// By the KVM machine.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// By the threads backend.
    #[error(transparent)]
    Threads(#[from] GuestError),
}

impl LaunchError {
    /// Whether another host might do it: exit code 3.
    pub fn host_lacks(&self) -> bool {
        matches!(self, Self::Machine(e) if e.host_lacks())
    }
}

/// Starts a new guest: paused, its boot image loaded.
pub fn launch(config: MachineConfig, host: &HostConfig) -> Result<SharedVm, LaunchError> {
    Ok(match config.backend {
        Backend::Kvm => Machine::launch(config, host)?,
        Backend::Threads => ThreadMachine::new(VmId::random(), config, host)?,
    })
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
        let decoded = decode_config(config)?;
        Ok(match decoded.backend {
            Backend::Kvm => MachineFactory { host: self.host.clone() }.create(vm_id, config)?,
            Backend::Threads => {
                check(&decoded)?;
                ThreadMachine::new(vm_id, decoded, &self.host)?
            }
        })
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

/// The bounds of what threads are made for; memory has its own.
fn check(config: &MachineConfig) -> Result<(), GuestError> {
    if (1..=MAX_VCPUS).contains(&config.vcpus) {
        return Ok(());
    }
    Err(GuestError::Malformed {
        what: "the machine's configuration".into(),
        why: format!("it has {} vCPUs, not 1 to {MAX_VCPUS}", config.vcpus),
    })
}
