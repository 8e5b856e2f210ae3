//! The reasons for which a machine cannot be built.

use std::io;

use driftline_guest::GuestError;

use super::host_lack::HostLack;
use crate::boot::BootError;
use crate::config::{BackendKind, ConfigError};
use crate::devices::{DeviceError, SerialOutputError, TapError};
use crate::fail_point;
use crate::kvm::Unusable;
use crate::memory::MemoryError;
use crate::sources::SourceError;

/// The reason for which a machine was not built.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The host lacks KVM, or a capability that every machine needs.
    #[error(transparent)]
    Kvm(#[from] Unusable),
    /// The host lacks something that this configuration needs.
    #[error("this host lacks {0}")]
    HostLacks(#[from] HostLack),
    /// The configuration is invalid on every host.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The configuration is for another backend.
    #[error("its backend is {0}, not kvm")]
    Backend(BackendKind),
    /// The guest cannot be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The guest's memory cannot be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The serial output cannot be opened.
    #[error(transparent)]
    Serial(#[from] SerialOutputError),
    /// A device cannot be opened or created.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The guest's writes cannot be tracked.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// KVM or the system refused an operation.
    #[error("{what} failed: {cause}")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
}

impl MachineError {
    /// Returns whether another host might be able to build the machine: exit code 3.
    pub fn host_lacks(&self) -> bool {
        match self {
            Self::Kvm(_)
            | Self::HostLacks(_)
            | Self::Device(DeviceError::Tap(TapError::Missing { .. })) => true,
            Self::Memory(e) => e.host_lacks(),
            _ => false,
        }
    }

    pub(super) fn system<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> Self {
        move |e| Self::System { what, cause: e.into() }
    }
}

/// Passes the fail point that precedes the named step.
#[inline]
pub(super) fn step(name: &'static str) -> Result<(), MachineError> {
    fail_point::pass(name).map_err(MachineError::system(name))
}

impl From<MachineError> for GuestError {
    fn from(e: MachineError) -> Self {
        match e {
            e if e.host_lacks() => GuestError::unsupported("the guest's configuration", e),
            e @ (MachineError::Config(_) | MachineError::Backend(_)) => {
                GuestError::malformed("the guest's configuration", e)
            }
            e => GuestError::System { what: "building the machine", cause: Box::new(e) },
        }
    }
}
