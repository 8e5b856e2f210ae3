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
    #[error("queue {queue}: the descriptor chain from {head} is broken: {cause}")]
    Chain {
        /// The queue's number.
        queue: u16,
        /// The chain's first descriptor.
        head: u16,
        /// The reason.
        #[source]
        cause: ChainDefect,
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
    #[error("queue {queue}: {cause}")]
    Malformed {
        /// The queue's number.
        queue: u16,
        /// The reason.
        #[source]
        cause: RequestDefect,
    },
    /// A write to a register breaks the rules.
    #[error(transparent)]
    Registers(#[from] RegisterDefect),
    /// Guest memory cannot be accessed. Earlier checks should make this impossible.
    #[error("guest memory cannot be reached: {0}")]
    Memory(#[from] GuestMemoryError),
}

/// What is wrong with a chain of descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum ChainDefect {
    /// The chain is longer than its queue.
    #[error("it has more descriptors than its queue")]
    TooManyDescriptors,
    /// A buffer for the device to read follows one for it to write.
    #[error("a buffer to read follows one to write")]
    Order,
    /// The lengths of the buffers do not fit 32 bits.
    #[error("it is longer than 4 GiB")]
    TooLong,
    /// The chain cannot be followed to its end.
    #[error("it loops, leaves its table, or its table cannot be read")]
    NoEnd,
}

/// What is wrong with a request, or with a buffer for the device to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum RequestDefect {
    /// There is no room for randomness.
    #[error("the chain from {head} has no room for randomness")]
    NoRandomness {
        /// The chain's first descriptor.
        head: u16,
    },
    /// A request to a disk is too short.
    #[error("the request from {head} has no whole header")]
    DiskHeader {
        /// The chain's first descriptor.
        head: u16,
    },
    /// A request to a disk cannot be answered.
    #[error("the request from {head} has no room for a status")]
    DiskStatus {
        /// The chain's first descriptor.
        head: u16,
    },
    /// A request of a network interface's control queue is too short, or cannot be answered.
    #[error(
        "the request from {head} has {bytes} bytes and room for an answer of {room}: it needs 2 \
         and 1"
    )]
    Control {
        /// The chain's first descriptor.
        head: u16,
        /// Length of the request in bytes.
        bytes: u32,
        /// Room for the answer in bytes.
        room: u32,
    },
    /// A buffer takes no frame.
    #[error("the buffer from {head} has room for {room} bytes, less than a frame's header")]
    FrameBuffer {
        /// The chain's first descriptor.
        head: u16,
        /// Room in bytes.
        room: u32,
    },
    /// A frame is too short.
    #[error("the frame from {head} has {bytes} bytes, less than its header")]
    Frame {
        /// The chain's first descriptor.
        head: u16,
        /// Length of the frame in bytes.
        bytes: usize,
    },
    /// A list of frame numbers has no possible length.
    #[error(
        "a request of {bytes} bytes: it must have at most {most} frame numbers of 4 bytes each"
    )]
    FrameNumbers {
        /// Length of the list in bytes.
        bytes: u32,
        /// The largest number of frame numbers.
        most: u32,
    },
    /// A frame is not in guest memory.
    #[error("frame {number:#x} is not guest memory")]
    NoFrame {
        /// The frame's number.
        number: u32,
    },
    /// A command of the hinting queue has another length.
    #[error("a hinting command of {bytes} bytes, not of 4")]
    HintingCommand {
        /// Length of the command in bytes.
        bytes: usize,
    },
    /// A packet of the vsock device is too short.
    #[error("the packet from {head} has {bytes} bytes, less than its header")]
    PacketHeader {
        /// The chain's first descriptor.
        head: u16,
        /// Length of the packet in bytes.
        bytes: u32,
    },
    /// A packet of the vsock device lacks data.
    #[error("the packet from {head} has {bytes} bytes after its header, which announces {len}")]
    PacketData {
        /// The chain's first descriptor.
        head: u16,
        /// Length of the data in bytes.
        bytes: u32,
        /// Length according to the header in bytes.
        len: u32,
    },
    /// A buffer takes no packet with data.
    #[error("the buffer from {head} has room for {room} bytes, no more than a packet's header")]
    PacketBuffer {
        /// The chain's first descriptor.
        head: u16,
        /// Room in bytes.
        room: u32,
    },
    /// A buffer takes no event of the vsock device.
    #[error("the buffer from {head} has room for {room} bytes, less than an event")]
    EventBuffer {
        /// The chain's first descriptor.
        head: u16,
        /// Room in bytes.
        room: u32,
    },
}

/// What is wrong with a write to a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum RegisterDefect {
    /// The driver starts the device too early.
    #[error("its driver starts it before features are agreed")]
    TooEarly,
    /// The driver sets up a queue that the device does not have.
    #[error("its driver sets up queue {index}, which does not exist")]
    NoQueue {
        /// The queue's number.
        index: usize,
    },
    /// The driver notifies a queue that the device does not have.
    #[error("its driver notifies queue {queue}, which does not exist")]
    NotifiesNoQueue {
        /// The queue's number.
        queue: u32,
    },
    /// The driver changes a queue that the device uses.
    #[error("its driver changes queue {index} (register {register:#x}) while it is in use")]
    QueueInUse {
        /// The queue's number.
        index: usize,
        /// The register.
        register: u32,
    },
    /// The driver gives a queue a size that it cannot have.
    #[error("its driver gives queue {index} {value} entries, not a power of two up to {most}")]
    QueueSize {
        /// The queue's number.
        index: usize,
        /// The size in entries.
        value: u32,
        /// The largest size in entries.
        most: u16,
    },
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
