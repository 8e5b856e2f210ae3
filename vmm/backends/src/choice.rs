//! Chooses a guest's backend by its configuration: the KVM machine or host threads.

use std::sync::Arc;

use driftline_guest::{
    DriveHead, GuestError, GuestFactory, GuestWithCopies, Origin, SharedGuest, VmId,
};
use driftline_machine::config::{BackendKind, HostConfig, MachineConfig, guest_span};
use driftline_machine::machine::{BuildOptions, EarlyVm, KvmMachine, MachineError, MachineFactory};
use driftline_machine::vm::{SharedVm, Vm};

use crate::payload::{PayloadError, image};
use crate::threads::ThreadMachine;

/// The reason why a guest was not started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// An error of the KVM machine.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The payload cannot be this guest.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// An error of the threads backend.
    #[error("{}", reason_of(.0))]
    Threads(#[from] GuestError),
}

/// Formats the error as the KVM machine formats the same one: the reason alone.
fn reason_of(e: &GuestError) -> String {
    match e {
        GuestError::Unsupported { cause, .. } => cause.to_string(),
        GuestError::Malformed { what, cause } if what == "the configuration" => cause.to_string(),
        e => e.to_string(),
    }
}

impl LaunchError {
    /// Returns whether another host might be able to start the guest: exit code 3.
    pub fn host_lacks(&self) -> bool {
        match self {
            Self::Machine(e) => e.host_lacks(),
            Self::Payload(_) => false,
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

/// Builds a new guest as [`launch`] does, with the id `vm_id`.
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
    match config.backend {
        BackendKind::Kvm => {
            config.check().map_err(MachineError::from)?;
            let host = HostConfig { image: image(&config)?, ..host.clone() };
            Ok(KvmMachine::build(vm_id, config, &host, BuildOptions::default())?)
        }
        BackendKind::Threads => Ok(ThreadMachine::new(vm_id, config, host)?),
    }
}

/// The list of disks of a guest that has none is not empty.
#[derive(Debug, thiserror::Error)]
#[error("a guest of the threads backend has no disks")]
struct NoDisks;

/// Builds guests of either backend from their stored or received configuration.
pub struct Factory {
    kvm: MachineFactory,
    host: HostConfig,
}

impl Factory {
    /// Returns a factory for this host.
    pub fn new(host: HostConfig) -> Self {
        Self { kvm: MachineFactory::new(host.clone()), host }
    }

    /// Makes the factory build its first guest in `early`, a VM whose creation began before the
    /// guest was known. A guest of the threads backend does not use it.
    pub fn with_early(self, early: EarlyVm) -> Self {
        Self { kvm: self.kvm.with_early(early), ..self }
    }

    /// Builds a guest of the threads backend, which has no drives.
    fn on_threads(
        &self,
        vm_id: VmId,
        config: MachineConfig,
        drives: &[DriveHead],
        memory: Option<&SharedGuest>,
    ) -> Result<GuestWithCopies<dyn Vm>, GuestError> {
        if let Some(drive) = drives.first() {
            return Err(GuestError::malformed(format_args!("disk \"{}\"", drive.id), NoDisks));
        }
        let _logged = guest_span(vm_id, &config.identity).entered();
        let machine = match memory {
            None => ThreadMachine::new(vm_id, config, &self.host)?,
            Some(memory) => ThreadMachine::on(vm_id, config, &self.host, memory)?,
        };
        Ok((machine, Vec::new()))
    }
}

impl GuestFactory for Factory {
    type Guest = dyn Vm;

    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<dyn Vm>, GuestError> {
        let decoded = MachineConfig::decode(config)?;
        if decoded.backend == BackendKind::Threads {
            return self.on_threads(vm_id, decoded.on_host(&self.host)?, drives, None);
        }
        let (machine, copies) = self.kvm.create_with_copies(vm_id, config, drives)?;
        Ok((machine, copies))
    }

    fn create_on(
        &self,
        vm_id: VmId,
        config: &[u8],
        shared: &SharedGuest,
    ) -> Result<Arc<dyn Vm>, GuestError> {
        let decoded = MachineConfig::decode(config)?;
        if decoded.backend == BackendKind::Threads {
            let config = decoded.on_host(&self.host)?;
            return Ok(self.on_threads(vm_id, config, &[], Some(shared))?.0);
        }
        Ok(self.kvm.create_on(vm_id, config, shared)?)
    }

    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<dyn Vm>, GuestError> {
        let stored = MachineConfig::decode(config)?;
        if stored.backend == BackendKind::Threads {
            let (vm_id, config) = stored.on_host(&self.host)?.restored(from, &self.host);
            return self.on_threads(vm_id, config, drives, None);
        }
        let (machine, drives) = self.kvm.create_with_drives(from, config, drives)?;
        Ok((machine, drives))
    }
}
