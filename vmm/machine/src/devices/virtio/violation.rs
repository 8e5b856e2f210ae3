//! Violations of virtio's rules by a driver.

use vm_memory::GuestMemoryError;

/// A driver's violation of the rules of virtio. The device does no more work until the driver
/// resets it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Violation {
    /// A queue cannot be where the driver put it.
    #[error("queue {queue} cannot be used: {why}")]
    Queue {
        /// The queue's number.
        queue: u16,
        /// The reason.
        why: String,
    },
    /// The available ring contradicts itself.
    #[error("queue {queue} of {size} entries: {why}")]
    Available {
        /// The queue's number.
        queue: u16,
        /// Number of entries in the queue.
        size: u16,
        /// The reason.
        why: String,
    },
    /// A descriptor chain is malformed.
    #[error("queue {queue}: the descriptor chain from {head} is broken: {why}")]
    Chain {
        /// The queue's number.
        queue: u16,
        /// The chain's first descriptor.
        head: u16,
        /// The reason.
        why: &'static str,
    },
    /// A buffer does not lie in guest memory.
    #[error("queue {queue}: a buffer of {len} bytes at {addr:#x} does not lie in guest memory")]
    Outside {
        /// The queue's number.
        queue: u16,
        /// The buffer's guest address.
        addr: u64,
        /// The buffer's length in bytes.
        len: u32,
    },
    /// A request does not have the form that the device's requests have.
    #[error("queue {queue}: {why}")]
    Request {
        /// The queue's number.
        queue: u16,
        /// The reason.
        why: String,
    },
    /// Registers were written at a time when they must not be.
    #[error("{0}")]
    Registers(String),
    /// Guest memory cannot be accessed. Earlier checks should make this impossible.
    #[error("guest memory cannot be reached: {0}")]
    Memory(String),
}

impl From<GuestMemoryError> for Violation {
    fn from(e: GuestMemoryError) -> Self {
        Self::Memory(e.to_string())
    }
}
