//! Violations of virtio's rules by a driver.

use vm_memory::GuestMemoryError;

/// A driver's violation of the rules of virtio. The device does no more work until the driver
/// resets it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Violation {
    /// A part of a queue is not in guest memory, or not in one memory slot.
    #[error(
        "queue {queue} cannot be used: its {what} of {len} bytes at {addr:#x} is not in guest \
         memory"
    )]
    QueueOutside {
        /// The queue's number.
        queue: u16,
        /// The part.
        what: &'static str,
        /// The part's guest address.
        addr: u64,
        /// The part's length in bytes.
        len: u64,
    },
    /// A queue cannot be used as the driver has set it up.
    #[error("queue {queue} cannot be used: {cause}")]
    Queue {
        /// The queue's number.
        queue: u16,
        /// The reason.
        #[source]
        cause: virtio_queue::Error,
    },
    /// The available ring contradicts itself.
    #[error("queue {queue} of {size} entries: {cause}")]
    Available {
        /// The queue's number.
        queue: u16,
        /// Number of entries in the queue.
        size: u16,
        /// The contradiction.
        #[source]
        cause: virtio_queue::Error,
    },
    /// More chains are in flight than the queue has entries.
    #[error("queue {queue} of {size} entries: more chains are in flight than it has entries")]
    TooManyChains {
        /// The queue's number.
        queue: u16,
        /// Number of entries in the queue.
        size: u16,
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
    /// A request is malformed.
    #[error("queue {queue}: {why}")]
    Request {
        /// The queue's number.
        queue: u16,
        /// The reason.
        why: String,
    },
    /// A write to a register breaks the rules.
    #[error("{0}")]
    Registers(String),
    /// Guest memory cannot be accessed. Earlier checks should make this impossible.
    #[error("guest memory cannot be reached: {0}")]
    Memory(#[from] GuestMemoryError),
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    #[test]
    fn memory_violation_keeps_its_source() {
        let violation = Violation::from(GuestMemoryError::HostAddressNotAvailable);
        assert!(violation.source().is_some_and(|e| e.is::<GuestMemoryError>()));
    }
}
