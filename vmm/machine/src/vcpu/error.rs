//! Why the state of a vCPU cannot be saved or restored.

use std::error::Error;
use std::io;

use driftline_guest::{GuestError, RunState};

/// Why a vCPU does not carry out a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VcpuError {
    /// The vCPU runs.
    #[error("cannot {request} a vCPU that runs")]
    Running {
        /// The request.
        request: &'static str,
    },
    /// KVM refused an operation.
    #[error("{what} failed: {cause}")]
    Kvm {
        /// The operation.
        what: &'static str,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// A part of a state cannot be used on this host.
    #[error("the {part} of vCPU {vcpu} cannot be used on this host: {cause}")]
    Unsupported {
        /// The vCPU's number.
        vcpu: u8,
        /// The part.
        part: &'static str,
        /// The reason.
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
}

impl VcpuError {
    /// Returns the conversion of an error of the operation `what`.
    pub(super) fn kvm<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> Self {
        move |e| Self::Kvm { what, cause: e.into() }
    }
}

impl From<VcpuError> for GuestError {
    fn from(e: VcpuError) -> Self {
        match e {
            VcpuError::Running { request } => Self::State { request, state: RunState::Running },
            VcpuError::Kvm { what, cause } => Self::System { what, cause: cause.into() },
            VcpuError::Unsupported { vcpu, part, cause } => {
                Self::unsupported(format_args!("the {part} of vCPU {vcpu}"), cause)
            }
        }
    }
}
