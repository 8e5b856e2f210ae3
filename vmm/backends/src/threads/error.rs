//! Why a guest on threads cannot be built, or refuses a request.

use std::io;
use std::num::TryFromIntError;

use driftline_guest::GuestError;
use driftline_images::PayloadSpecError;
use driftline_machine::actor::CallError;
use driftline_machine::config::Boot;
use driftline_machine::devices::SerialOutputError;
use vm_memory::GuestMemoryError;

use crate::payload::Misfit;

/// Why a request to the system, or to a worker, failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ThreadMachineError {
    /// The serial port's sink cannot be opened.
    #[error(transparent)]
    Serial(#[from] SerialOutputError),
    /// A worker's thread cannot be started.
    #[error(transparent)]
    Thread(#[from] io::Error),
    /// A worker does not answer.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A segment of the working set is longer than an address space.
    #[error(transparent)]
    Length(#[from] TryFromIntError),
    /// A segment of the working set lies outside guest memory.
    #[error(transparent)]
    Outside(#[from] GuestMemoryError),
    /// The worker's index does not fit a section's instance number.
    #[error(transparent)]
    Index(TryFromIntError),
    /// The worker's state cannot be encoded.
    #[error(transparent)]
    Encode(postcard::Error),
}

impl From<ThreadMachineError> for GuestError {
    fn from(e: ThreadMachineError) -> Self {
        let what = match &e {
            ThreadMachineError::Serial(_) => "opening the serial port",
            ThreadMachineError::Thread(_) => "starting a worker",
            ThreadMachineError::Call(_) => "asking a worker",
            ThreadMachineError::Length(_) | ThreadMachineError::Outside(_) => {
                "mapping the working set"
            }
            ThreadMachineError::Index(_) | ThreadMachineError::Encode(_) => {
                "encoding a worker's state"
            }
        };
        Self::System { what, cause: e.into() }
    }
}

/// Why the workers cannot run a guest.
#[derive(Debug, thiserror::Error)]
pub(super) enum WorkloadError {
    /// The guest has machine code.
    #[error("the threads backend runs only the payload's workload, no machine code")]
    Kernel,
    /// The payload uses devices.
    #[error("io= needs a disk or an interface, and the threads backend has none")]
    Devices,
    /// The specification of the payload is invalid.
    #[error(transparent)]
    Spec(#[from] PayloadSpecError),
    /// The payload does not fit the guest.
    #[error(transparent)]
    Misfit(#[from] Misfit),
}

impl WorkloadError {
    /// Returns the error of a guest that boots from `boot`.
    pub(super) fn of(self, boot: &Boot) -> GuestError {
        let what = match boot {
            Boot::Payload(spec) => format!("the guest \"{spec}\""),
            Boot::Kernel { kernel, .. } => format!("the guest {}", kernel.display()),
        };
        GuestError::malformed(what, self)
    }
}

/// Why the saved state of a worker is malformed.
#[derive(Debug, thiserror::Error)]
pub(super) enum WorkerStateError {
    /// The guest has fewer vCPUs.
    #[error("the guest has only {vcpus} vCPUs")]
    NoVcpu {
        /// vCPUs of the guest.
        vcpus: u32,
    },
    /// More than one section has this state.
    #[error("it occurs twice")]
    Twice,
    /// No section has this state.
    #[error("it is missing")]
    Missing,
    /// The guest's clock is about to overflow.
    #[error("its time is {guest_ns} ns, more than the {limit} ns allowed")]
    Time {
        /// The guest's time at the save, in nanoseconds.
        guest_ns: u64,
        /// Latest time that is allowed, in nanoseconds.
        limit: u64,
    },
    /// The state is that of another workload.
    #[error("its workload is not this guest's")]
    OtherWorkload,
}

/// The guest has run already, so no state can be restored.
#[derive(Debug, thiserror::Error)]
#[error("it can only be restored into a guest that has never run")]
pub(super) struct HasRun;

/// What a guest on threads lacks.
#[derive(Debug, thiserror::Error)]
pub(super) enum Lack {
    /// There are no interrupts.
    #[error("the threads backend has no interrupts; --backend kvm has")]
    Interrupts,
    /// There is no keyboard.
    #[error("the threads backend has no keyboard")]
    Keyboard,
    /// The section is a part of another backend's state.
    #[error("the threads backend does not support it")]
    Section,
}
