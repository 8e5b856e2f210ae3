//! Reasons why a device does not carry out a request of the supervisor.

use std::io;

use super::Violation;
use crate::actor::CallError;
use crate::codec::DecodeError;
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
    /// The state is that of another kind of device.
    #[error("it is the state of a virtio device {id}, and the device here is {device}")]
    OtherDevice {
        /// Virtio's number of the kind.
        id: u32,
        /// Kind and name of the device here.
        device: String,
    },
    /// The state is that of a device with another number of queues.
    #[error("it has positions of {0} queues, and the device here has another number")]
    QueueCount(usize),
    /// A file of the device cannot be duplicated.
    #[error("{device}: its files cannot be shared with another process: {cause}")]
    Share {
        /// Kind and name of the device.
        device: String,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The packets that were queued for the guest cannot be sent along, or are malformed.
    #[error(transparent)]
    QueuedPackets(#[from] QueuedPacketsError),
    /// The driver of a restored state broke the rules of virtio.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The device's own reason.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Why the packets that were queued for a guest cannot be encoded, or are malformed. They come from
/// the previous host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueuedPacketsError {
    /// They cannot be encoded.
    #[error("the packets that are queued for the guest cannot be encoded: {0}")]
    Encode(postcard::Error),
    /// The bytes are not a list of packets by device.
    #[error("the packets that are queued for the guest are malformed: {0}")]
    Decode(#[from] DecodeError),
    /// The list names a device that the guest does not have.
    #[error(
        "the packets that are queued for the guest are malformed: one is for device {0}, which \
         does not exist"
    )]
    NoDevice(u16),
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
