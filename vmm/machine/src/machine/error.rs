//! Why a machine cannot be built.

use std::io;

use driftline_dirty_tracker::SourceError;
use driftline_guest::GuestError;

use crate::boot::BootError;
use crate::devices::{DeviceError, SinkError, TapError};
use crate::fail_point;
use crate::kvm::Unusable;
use crate::memory::MemoryError;

/// Why there is no machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// The host cannot do it: no KVM, or a capability is missing.
    #[error("this host lacks {what}: {why}")]
    HostLacks {
        /// What is missing.
        what: String,
        /// The system's answer, or what follows.
        why: String,
    },
    /// The configuration is none that can be built anywhere.
    #[error("{0}")]
    Config(String),
    /// The guest cannot be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Its memory cannot be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Its serial output has nowhere to go.
    #[error(transparent)]
    Serial(#[from] SinkError),
    /// A device cannot be had.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Its writes cannot be followed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// KVM or the system refused.
    #[error("{what} failed: {cause}")]
    System {
        /// The operation.
        what: &'static str,
        /// The answer.
        cause: io::Error,
    },
}

impl MachineError {
    /// Whether another host might do it: exit code 3.
    pub fn host_lacks(&self) -> bool {
        match self {
            Self::HostLacks { .. } | Self::Device(DeviceError::Tap(TapError::Missing { .. })) => {
                true
            }
            Self::Memory(e) => e.host_lacks(),
            _ => false,
        }
    }

    pub(super) fn system<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> Self {
        move |e| Self::System { what, cause: e.into() }
    }
}

/// Passes the fail point before the step of this name.
#[inline]
pub(super) fn step(name: &'static str) -> Result<(), MachineError> {
    fail_point::pass(name).map_err(MachineError::system(name))
}

impl From<Unusable> for MachineError {
    fn from(Unusable { what, why }: Unusable) -> Self {
        Self::HostLacks { what, why }
    }
}

impl From<MachineError> for GuestError {
    fn from(e: MachineError) -> Self {
        match e {
            e if e.host_lacks() => GuestError::Unsupported {
                what: "the guest's configuration".to_owned(),
                why: e.to_string(),
            },
            MachineError::Config(why) => {
                GuestError::Malformed { what: "the guest's configuration".to_owned(), why }
            }
            e => GuestError::System { what: "building the machine", cause: Box::new(e) },
        }
    }
}
