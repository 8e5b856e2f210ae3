//! Building a machine from the configuration that came with a checkpoint or over a wire.

use std::sync::Arc;

use checkpoint::{GuestError, GuestFactory, VmId};

use super::Machine;
use crate::config::{Backend, HostConfig, MAX_MEM_BYTES, MAX_VCPUS, MIN_MEM_BYTES, MachineConfig};

/// Builds KVM machines that wait for their memory and state.
#[derive(Clone, Debug, Default)]
pub struct MachineFactory {
    /// What belongs to this host.
    pub host: HostConfig,
}

impl GuestFactory for MachineFactory {
    type Guest = Machine;

    fn create(&self, vm_id: VmId, config: &[u8]) -> Result<Arc<Machine>, GuestError> {
        let config = decode(config)?;
        Ok(Machine::empty(vm_id, config, &self.host)?)
    }
}

pub(super) fn encode(config: &MachineConfig) -> Vec<u8> {
    // Only a writer can fail here, and a Vec does not.
    postcard::to_stdvec(config).unwrap_or_default()
}

fn decode(bytes: &[u8]) -> Result<MachineConfig, GuestError> {
    let malformed =
        |why: String| GuestError::Malformed { what: "the guest's configuration".to_owned(), why };
    let config: MachineConfig =
        postcard::from_bytes(bytes).map_err(|e| malformed(e.to_string()))?;
    check(&config).map_err(malformed)?;
    Ok(config)
}

/// Whether `config` is within the bounds of any KVM machine.
pub(super) fn check(config: &MachineConfig) -> Result<(), String> {
    if config.backend != Backend::Kvm {
        return Err(format!("its backend is {}, not kvm", config.backend));
    }
    if !(1..=MAX_VCPUS).contains(&config.vcpus) {
        return Err(format!("it has {} vCPUs, not 1 to {MAX_VCPUS}", config.vcpus));
    }
    if !(MIN_MEM_BYTES..=MAX_MEM_BYTES).contains(&config.mem_bytes) {
        return Err(format!(
            "it has {} bytes of memory, not {MIN_MEM_BYTES} to {MAX_MEM_BYTES}",
            config.mem_bytes
        ));
    }
    if !config.ring_entries.is_power_of_two() {
        return Err(format!("its rings have {} entries, not a power of two", config.ring_entries));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Boot, DEFAULT_RING_ENTRIES};
    use dirty_tracker::TrackingMode;
    use proptest::prelude::*;

    fn config() -> MachineConfig {
        MachineConfig {
            mem_bytes: 64 << 20,
            vcpus: 2,
            tracking: TrackingMode::DirtyRing,
            ring_entries: DEFAULT_RING_ENTRIES,
            backend: Backend::Kvm,
            boot: Boot::Payload("payload".to_owned()),
        }
    }

    #[test]
    fn bounds_are_checked_by_name() {
        assert_eq!(decode(&encode(&config())).unwrap(), config());
        let refused = |config: MachineConfig| decode(&encode(&config)).unwrap_err().to_string();
        assert!(refused(MachineConfig { vcpus: 0, ..config() }).contains("0 vCPUs"));
        assert!(refused(MachineConfig { vcpus: 33, ..config() }).contains("33 vCPUs"));
        assert!(refused(MachineConfig { mem_bytes: 1 << 60, ..config() }).contains("bytes of"));
        assert!(refused(MachineConfig { ring_entries: 1000, ..config() }).contains("power of two"));
        assert!(refused(MachineConfig { backend: Backend::Threads, ..config() }).contains("kvm"));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }
}
