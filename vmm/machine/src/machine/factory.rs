//! Builds a machine from the configuration that came with a checkpoint or a migration.

use driftline_guest::{DriveHead, GuestError, GuestFactory, Origin, VmId, WithCopies};

use super::Machine;
use crate::config::{HostConfig, MachineConfig};
use crate::devices::{Parent, make_copies, open_drives};

/// Builds KVM machines into which memory and state are then restored.
#[derive(Clone, Debug, Default)]
pub struct MachineFactory {
    /// The part of the configuration that belongs to this host.
    pub host: HostConfig,
}

impl GuestFactory for MachineFactory {
    type Guest = Machine;

    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<WithCopies<Machine>, GuestError> {
        let host = self.host.with_copies_of(drives);
        let config = MachineConfig::decode(config)?.on_host(&host)?;
        let copies = make_copies(vm_id, &config, drives)?;
        Ok((Machine::empty(vm_id, config, &host)?, copies))
    }

    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<WithCopies<Machine>, GuestError> {
        let host = self.host.writing_over(drives);
        let stored = MachineConfig::decode(config)?;
        let (vm_id, config) = stored.clone().on_host(&host)?.restored(from, &host);
        let parent = Parent { guest: from.vm_id, devices: &stored.devices };
        let drives = open_drives(vm_id, &parent, &config, drives, &host)?;
        Ok((Machine::empty(vm_id, config, &host)?, drives))
    }
}
