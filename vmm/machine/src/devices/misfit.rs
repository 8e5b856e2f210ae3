//! What makes a device's saved state unusable.

use vm_superio::serial;

/// The reason why a saved state is not one of this device, or is one that the device cannot have.
/// Each text is a sentence about the state.
#[derive(Debug, thiserror::Error)]
pub enum DeviceMisfit {
    /// The entropy device has no state.
    #[error("it has {bytes} bytes of state, and a virtio-rng has none")]
    NotEmpty {
        /// Length of the state in bytes.
        bytes: usize,
    },
    /// The device has another number of queues.
    #[error("it has {queues} queues, and the device here has {here}")]
    Queues {
        /// Queues in the state.
        queues: usize,
        /// Queues of the device.
        here: usize,
    },
    /// A queue is longer than the device allows.
    #[error("it has a queue of {size} entries, and at most {most} are possible")]
    QueueSize {
        /// Entries of the queue.
        size: u16,
        /// The largest number of entries.
        most: u16,
    },
    /// The driver uses features that the device does not offer.
    #[error("its driver uses features {features:#x}, which are not offered here")]
    Features {
        /// The bits of these features.
        features: u64,
    },
    /// No driver can set the status.
    #[error("its driver's status is {status:#x}, with a bit that only the device sets")]
    Status {
        /// The status.
        status: u32,
    },
    /// The device has another number of rate limiters.
    #[error("it has {found} rate limiters, and {device} has {here}")]
    Limiters {
        /// Limiters in the state.
        found: usize,
        /// The device.
        device: String,
        /// Limiters of the device.
        here: usize,
    },
    /// A bucket of a rate limiter has a larger debt than a request can leave.
    #[error("a bucket of {size} tokens lacks {lacking}, more than {most}")]
    Bucket {
        /// The bucket's size.
        size: u64,
        /// The tokens that it lacks.
        lacking: u128,
        /// The largest number that it can lack.
        most: u128,
    },
    /// More of a burst is left than the limit allows.
    #[error("{left} tokens are left of a burst of {whole}")]
    Burst {
        /// Tokens that are left.
        left: u64,
        /// Tokens of the whole burst.
        whole: u64,
    },
    /// A network interface uses more pairs of queues than it has.
    #[error("it uses {pairs} pairs of queues, not 1 to {most}")]
    Pairs {
        /// Pairs in the state.
        pairs: u8,
        /// The largest number of pairs.
        most: u8,
    },
    /// A frame that waits for the driver has no pair of queues, or no possible length.
    #[error("a frame of {bytes} bytes waits for pair {pair} of {pairs}")]
    WaitingFrame {
        /// Length of the frame in bytes.
        bytes: usize,
        /// The frame's pair of queues.
        pair: u8,
        /// Number of pairs.
        pairs: u8,
    },
    /// More frames are queued for another process than an interface queues.
    #[error("{count} frames are queued, more than {most}")]
    QueuedFrames {
        /// Number of frames.
        count: usize,
        /// The largest number.
        most: usize,
    },
    /// A queued frame has no pair of queues, or no possible length.
    #[error("a frame of {bytes} bytes is queued for pair {pair} of {pairs}")]
    QueuedFrame {
        /// Length of the frame in bytes.
        bytes: usize,
        /// The frame's pair of queues.
        pair: u8,
        /// Number of pairs.
        pairs: u8,
    },
    /// A balloon's statistics are on, and off in the configuration, or the reverse.
    #[error("its statistics have an interval of {found_s} s, and {here_s} s in the configuration")]
    StatisticsInterval {
        /// The interval in the state, in seconds.
        found_s: u16,
        /// The interval in the configuration, in seconds.
        here_s: u16,
    },
    /// A disk's file is not the one that the guest's configuration names.
    #[error(
        "the file or size of disk \"{id}\" was exchanged since the guest's start, so the guest \
         cannot be moved"
    )]
    DiskExchanged {
        /// The disk's name.
        id: String,
    },
    /// The serial port cannot have the registers, or its interrupt cannot be raised.
    #[error(transparent)]
    Serial(#[from] serial::Error<kvm_ioctls::Error>),
}
