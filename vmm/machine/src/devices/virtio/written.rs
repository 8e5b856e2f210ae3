//! What passes between a device's registers and its thread.

use super::Violation;
use super::ring::{RingPosition, RingSetup};

/// A queue that a driver has made ready, by its number.
pub(super) type ReadyRing = (usize, RingSetup);

/// What a driver's writes to registers mean for the thread.
pub(super) enum Written {
    /// The driver is ready, with these features and queues.
    Activate(u64, Vec<ReadyRing>),
    StartQueue(ReadyRing),
    StopQueue(usize),
    Reset,
    /// The driver did what it must not.
    Stop(Violation),
    /// Bytes at this offset of the configuration space.
    Config(usize, Vec<u8>),
}

/// The thread's part of a state.
pub(super) struct SavedWorker {
    pub(super) positions: Vec<RingPosition>,
    pub(super) device: Vec<u8>,
}

/// What the thread needs of a saved state.
pub(super) struct RestoredWorker {
    /// Features and ready queues, if a driver is active and did not break the rules.
    pub(super) active: Option<(u64, Vec<ReadyRing>)>,
    pub(super) positions: Vec<RingPosition>,
    pub(super) device: Vec<u8>,
}
