//! Messages between a device's registers and its thread.

use super::Violation;
use super::ring::{RingPosition, RingSetup};
use crate::devices::rate_limit::SavedLimiter;

/// The number and the place of a queue that a driver has made ready.
pub(super) type ReadyRing = (usize, RingSetup);

/// The effect of a driver's writes to registers on the thread.
pub(super) enum DriverCommand {
    /// The driver is ready, with these features and queues.
    Activate(u64, Vec<ReadyRing>),
    StartQueue(ReadyRing),
    StopQueue(usize),
    Reset,
    /// The driver broke a rule.
    Stop(Violation),
    /// Bytes written at this offset of the configuration space.
    Config(usize, Vec<u8>),
}

/// The thread's part of a saved state.
pub(super) struct SavedWorkerState {
    pub(super) positions: Vec<RingPosition>,
    pub(super) device: Vec<u8>,
    pub(super) limiters: Vec<SavedLimiter>,
}

/// The part of a saved state that the thread needs.
pub(super) struct RestoredWorkerState {
    /// Features and ready queues, if a driver is active and did not break the rules.
    pub(super) active: Option<(u64, Vec<ReadyRing>)>,
    pub(super) positions: Vec<RingPosition>,
    pub(super) device: Vec<u8>,
    pub(super) limiters: Vec<SavedLimiter>,
}
