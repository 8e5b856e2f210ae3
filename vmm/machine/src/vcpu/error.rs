//! Why the state of a vCPU cannot be saved or restored.

use std::io;

use driftline_guest::{GuestError, RunState};
use vmm_sys_util::fam;

use super::control::ForeignBit;
use super::lack::{ProcessorLack, RefusedMsr};
use super::tsc::TscLack;

/// Why a vCPU does not carry out a request.
#[derive(Debug, thiserror::Error)]
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
        cause: VcpuMisfit,
    },
}

/// The reason why a part of a vCPU's state cannot be used on this host.
#[derive(Debug, thiserror::Error)]
pub enum VcpuMisfit {
    /// The host's processor lacks a feature, or is of another vendor.
    #[error("{0} is missing here")]
    Processor(#[source] ProcessorLack),
    /// The host cannot provide the rate of the time stamp counter.
    #[error("this host lacks {0}")]
    TscRate(#[source] TscLack),
    /// A control register has a bit that the guest's processor does not have.
    #[error(transparent)]
    ForeignBit(#[from] ForeignBit),
    /// KVM refuses the special registers, which have a bit that the guest's processor does not
    /// have.
    #[error("{cause}; perhaps because {bit}")]
    SpecialRegisters {
        /// KVM's error.
        #[source]
        cause: io::Error,
        /// The bit.
        bit: ForeignBit,
    },
    /// KVM refuses the value of a register.
    #[error(transparent)]
    Msr(#[from] RefusedMsr),
    /// KVM takes no CPUID table of this size.
    #[error(transparent)]
    Table(#[from] fam::Error),
    /// KVM refuses the part.
    #[error(transparent)]
    Kvm(#[from] io::Error),
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
