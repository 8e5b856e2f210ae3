//! Reasons why a device does not carry out a request of the supervisor.

use super::Violation;
use crate::actor::CallError;
use crate::devices::error::DeviceError;

/// Reason why a device did not carry out a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    /// The thread did not answer in time.
    #[error("{0}: its backend is stuck; look at the storage or network behind it")]
    Stuck(CallError),
    /// The thread has ended.
    #[error("{0}")]
    Ended(CallError),
    /// Requests of the guest were not finished in time.
    #[error("{device} still has {count} requests in flight")]
    InFlight {
        /// Kind and name of the device.
        device: String,
        /// Number of these requests.
        count: usize,
    },
    /// Only a paused device can be saved.
    #[error("{device} is running, and only a paused device can be saved")]
    NotPaused {
        /// Kind and name of the device.
        device: String,
    },
    /// A state, or what arrived after it was saved, does not fit the devices here.
    #[error("{0}")]
    Misfit(String),
    /// The driver of a restored state broke the rules of virtio.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The device's own reason.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl RequestError {
    /// Returns whether the device itself has answered, so that it is not stuck.
    pub(crate) fn is_answer(&self) -> bool {
        !matches!(self, Self::Stuck(_) | Self::Ended(_))
    }
}

impl From<CallError> for RequestError {
    fn from(e: CallError) -> Self {
        match e {
            CallError::TimedOut { .. } => Self::Stuck(e),
            CallError::Ended { .. } => Self::Ended(e),
        }
    }
}
