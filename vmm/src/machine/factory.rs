//! Building a machine from the configuration that came with a checkpoint or over a wire.

use std::sync::Arc;

use checkpoint::{GuestError, GuestFactory, VmId};

use super::Machine;
use crate::config::{HostConfig, MachineConfig};

/// Builds KVM machines that wait for their memory and state.
#[derive(Clone, Debug, Default)]
pub struct MachineFactory {
    /// What belongs to this host.
    pub host: HostConfig,
}

impl GuestFactory for MachineFactory {
    type Guest = Machine;

    fn create(&self, vm_id: VmId, config: &[u8]) -> Result<Arc<Machine>, GuestError> {
        let config = MachineConfig::decode(config)?.on_host(&self.host)?;
        Ok(Machine::empty(vm_id, config, &self.host)?)
    }
}
