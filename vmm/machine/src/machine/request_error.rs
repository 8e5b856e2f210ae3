//! Why a machine does not carry out a request.

use std::io;

use driftline_guest::{GuestError, RunState};

use crate::actor::CallError;
use crate::devices::{KeyboardFull, RequestError, StateError};
use crate::memory::MemoryError;
use crate::vcpu::VcpuError;

/// Why the supervisor does not carry out a request. A variant displays the reason alone; the
/// conversion to [`GuestError`] adds what failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum SupervisorError {
    /// The request does not fit the guest's state.
    #[error("cannot {request} a guest that is {state}")]
    State { request: &'static str, state: RunState },
    /// This machine has not acquired the guest, or has released it.
    #[error("it was released, or not acquired yet: another host may run it")]
    NotAcquired,
    /// An earlier restore has failed.
    #[error("restoring it failed half-way, so it cannot run")]
    HalfRestored,
    /// The guest has run already, so no state can be restored.
    #[error("it can only be restored into a guest that has never run")]
    HasRun,
    /// The guest has no keyboard controller.
    #[error("the guest has no keyboard controller")]
    NoKeyboard,
    /// The guest has not taken earlier keys yet.
    #[error(transparent)]
    Keyboard(#[from] KeyboardFull),
    /// A page of a guest that is being restored is lost.
    #[error("{0}")]
    Lost(String),
    /// A vCPU or the supervisor did not answer.
    #[error("{cause}")]
    Call {
        what: &'static str,
        #[source]
        cause: CallError,
    },
    /// A vCPU refused.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// A device did not answer, or refused.
    #[error("{cause}")]
    Device {
        what: &'static str,
        #[source]
        cause: Box<RequestError>,
    },
    /// The state of the serial port is malformed.
    #[error(transparent)]
    Serial(StateError),
    /// The state of a virtio device is malformed.
    #[error("{cause}")]
    Virtio {
        index: usize,
        #[source]
        cause: Box<RequestError>,
    },
    /// A virtio device cannot interrupt the guest.
    #[error(transparent)]
    Interrupt(io::Error),
    /// KVM refused an operation.
    #[error("{cause}")]
    Kvm {
        what: &'static str,
        #[source]
        cause: kvm_ioctls::Error,
    },
    /// This host does not take a part of the VM's state.
    #[error("{cause}")]
    Part {
        part: &'static str,
        #[source]
        cause: kvm_ioctls::Error,
    },
    /// The page of the generation ID has not arrived.
    #[error(transparent)]
    GenerationPage(MemoryError),
    /// The generation ID cannot be written.
    #[error(transparent)]
    GenerationId(vm_memory::GuestMemoryError),
    /// The state cannot be encoded.
    #[error(transparent)]
    Encode(#[from] postcard::Error),
}

impl From<SupervisorError> for GuestError {
    fn from(e: SupervisorError) -> Self {
        const GENERATION_ID: &str = "writing the generation ID";
        match e {
            SupervisorError::State { request, state } => Self::State { request, state },
            SupervisorError::NotAcquired => Self::unsupported("the guest", e),
            SupervisorError::HalfRestored => Self::unsupported("the guest's state", e),
            SupervisorError::HasRun => Self::unsupported("a state", e),
            SupervisorError::NoKeyboard => Self::unsupported("Ctrl-Alt-Del", e),
            SupervisorError::Part { part, cause } => {
                Self::unsupported(format_args!("the guest's {part}"), cause)
            }
            SupervisorError::Serial(cause) => Self::malformed("the serial port's state", cause),
            SupervisorError::Virtio { index, cause } => {
                Self::malformed(format_args!("the state of virtio device {index}"), *cause)
            }
            SupervisorError::Vcpu(e) => e.into(),
            SupervisorError::Keyboard(e) => system("pressing Ctrl-Alt-Del", e),
            SupervisorError::Lost(_) => system("restoring the guest", e),
            SupervisorError::Call { what, cause } => system(what, cause),
            SupervisorError::Device { what, cause } => system(what, *cause),
            SupervisorError::Interrupt(e) => system("interrupting for a virtio device", e),
            SupervisorError::Kvm { what, cause } => system(what, cause),
            SupervisorError::GenerationPage(e) => system(GENERATION_ID, e),
            SupervisorError::GenerationId(e) => system(GENERATION_ID, e),
            SupervisorError::Encode(e) => system("encoding state", e),
        }
    }
}

fn system(what: &'static str, cause: impl std::error::Error + Send + Sync + 'static) -> GuestError {
    GuestError::System { what, cause: Box::new(cause) }
}
