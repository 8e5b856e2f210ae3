//! Builds a machine from the configuration in a checkpoint or a migration.

use std::sync::Arc;

use driftline_guest::{
    DriveHead, GuestError, GuestFactory, GuestWithCopies, Origin, SharedGuest, VmId,
};
use parking_lot::Mutex;

use super::{BuildOptions, EarlyVm, FirstContents, KvmMachine};
use crate::config::{HostConfig, MachineConfig, guest_span};
use crate::devices::{ParentGuest, make_copies, open_drives, opened_files};

/// Builds KVM machines into which memory and state are then restored.
pub struct MachineFactory {
    host: HostConfig,
    /// The VM for the first guest.
    early: Mutex<Option<EarlyVm>>,
}

impl MachineFactory {
    /// Returns a factory for this host.
    pub fn new(host: HostConfig) -> Self {
        Self { host, early: Mutex::default() }
    }

    /// Makes the factory build its first guest in `early`, a VM whose creation began before the
    /// guest was known.
    pub fn with_early(mut self, early: EarlyVm) -> Self {
        self.early = Mutex::new(Some(early));
        self
    }

    fn build(
        &self,
        vm_id: VmId,
        config: MachineConfig,
        host: &HostConfig,
        contents: FirstContents,
    ) -> Result<Arc<KvmMachine>, GuestError> {
        let _logged = guest_span(vm_id, &config.identity).entered();
        let early = self.early.lock().take();
        let options = BuildOptions { contents, early, ..BuildOptions::default() };
        Ok(KvmMachine::build(vm_id, config, host, options)?)
    }
}

impl GuestFactory for MachineFactory {
    type Guest = KvmMachine;

    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<KvmMachine>, GuestError> {
        let host = self.host.with_copies_of(drives);
        let config = MachineConfig::decode(config)?.on_host(&host)?;
        let copies = make_copies(vm_id, &config, drives)?;
        Ok((self.build(vm_id, config, &host, FirstContents::Zeros)?, copies))
    }

    fn create_on(
        &self,
        vm_id: VmId,
        config: &[u8],
        shared: &SharedGuest,
    ) -> Result<Arc<KvmMachine>, GuestError> {
        let host = self.host.with_copies_of(&[]);
        let stored = MachineConfig::decode(config)?;
        let config = stored.clone().on_host(&host)?;
        let opened = opened_files(&stored.devices, shared.device_files(), &host)?;
        let host = HostConfig { opened, ..host };
        self.build(vm_id, config, &host, FirstContents::Shared(shared.clone()))
    }

    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<KvmMachine>, GuestError> {
        let host = self.host.writing_over(drives);
        let stored = MachineConfig::decode(config)?;
        let (vm_id, config) = stored.clone().on_host(&host)?.restored(from, &host);
        let parent = ParentGuest { guest: from.vm_id, devices: &stored.devices };
        let drives = open_drives(vm_id, &parent, &config, drives, &host)?;
        Ok((self.build(vm_id, config, &host, FirstContents::Zeros)?, drives))
    }
}
