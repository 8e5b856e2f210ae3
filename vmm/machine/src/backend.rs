//! Chooses what runs a guest, by its configuration: the KVM machine or the threads backend.

use driftline_guest::{DriveHead, GuestError, GuestFactory, Origin, VmId, WithCopies};
use parking_lot::Mutex;

use crate::config::{Backend, HostConfig, MachineConfig, guest_span};
use crate::devices::{Parent, make_copies, open_drives};
use crate::machine::{EarlyVm, Machine, MachineError};
use crate::threads::ThreadMachine;
use crate::vm::{SharedVm, Vm};

/// The reason for which a guest was not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// An error of the KVM machine.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// An error of the threads backend.
    #[error("{}", in_its_words(.0))]
    Threads(#[from] GuestError),
}

/// Formats the error as the KVM machine formats the same one: the reason alone.
fn in_its_words(e: &GuestError) -> String {
    match e {
        GuestError::Unsupported { why, .. } => why.clone(),
        GuestError::Malformed { what, why } if what == "the configuration" => why.clone(),
        e => e.to_string(),
    }
}

impl LaunchError {
    /// Returns whether another host might be able to start the guest: exit code 3.
    pub fn host_lacks(&self) -> bool {
        match self {
            Self::Machine(e) => e.host_lacks(),
            Self::Threads(e) => matches!(e, GuestError::Unsupported { .. }),
        }
    }
}

/// Builds a new guest: paused, with its boot image loaded.
///
/// # Errors
///
/// See [`LaunchError`].
pub fn launch(config: MachineConfig, host: &HostConfig) -> Result<SharedVm, LaunchError> {
    launch_as(VmId::random(), config, host)
}

/// Does as [`launch`], with this id.
///
/// # Errors
///
/// As [`launch`].
pub fn launch_as(
    vm_id: VmId,
    config: MachineConfig,
    host: &HostConfig,
) -> Result<SharedVm, LaunchError> {
    let _logged = guest_span(vm_id, &config.identity).entered();
    Ok(match config.backend {
        Backend::Kvm => Machine::launch_as(vm_id, config, host)?,
        Backend::Threads => ThreadMachine::new(vm_id, config, host)?,
    })
}

/// Builds guests of either backend from their stored or received configuration.
pub struct Factory {
    host: HostConfig,
    /// The VM for the first guest.
    early: Mutex<Option<EarlyVm>>,
}

impl Factory {
    /// Returns a factory for this host.
    pub fn new(host: HostConfig) -> Self {
        Self { host, early: Mutex::default() }
    }

    /// Makes the factory build its first guest in `early`, a VM whose creation began before the
    /// guest was known. A guest of the threads backend does not use it.
    pub fn with_early(mut self, early: EarlyVm) -> Self {
        self.early = Mutex::new(Some(early));
        self
    }

    /// Builds a guest into which memory and state are then restored.
    fn empty(
        &self,
        vm_id: VmId,
        config: MachineConfig,
        host: &HostConfig,
    ) -> Result<SharedVm, GuestError> {
        let _logged = guest_span(vm_id, &config.identity).entered();
        let early = self.early.lock().take();
        Ok(match (config.backend, early) {
            (Backend::Kvm, Some(early)) => Machine::empty_in(early, vm_id, config, host)?,
            (Backend::Kvm, None) => Machine::empty(vm_id, config, host)?,
            (Backend::Threads, _) => ThreadMachine::new(vm_id, config, host)?,
        })
    }
}

impl GuestFactory for Factory {
    type Guest = dyn Vm;

    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<WithCopies<dyn Vm>, GuestError> {
        let host = self.host.with_copies_of(drives);
        let config = MachineConfig::decode(config)?.on_host(&host)?;
        let copies = make_copies(vm_id, &config, drives)?;
        Ok((self.empty(vm_id, config, &host)?, copies))
    }

    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<WithCopies<dyn Vm>, GuestError> {
        let host = self.host.writing_over(drives);
        let stored = MachineConfig::decode(config)?;
        let (vm_id, config) = stored.clone().on_host(&host)?.restored(from, &host);
        let parent = Parent { guest: from.vm_id, devices: &stored.devices };
        let drives = open_drives(vm_id, &parent, &config, drives, &host)?;
        Ok((self.empty(vm_id, config, &host)?, drives))
    }
}
