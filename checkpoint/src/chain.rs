//! The chain that the next epoch continues: the subscriptions that track the guest's writes, and
//! the epoch that the next one builds on.

use std::time::Instant;

use driftline_dirty_tracker::Subscription;

use crate::epoch_drives::EpochDrives;

/// A chain being written by one checkpointer.
pub(crate) struct EpochChain {
    pub(crate) subscription: Subscription,
    /// Drives that are part of its epochs.
    pub(crate) drives: EpochDrives,
    /// Approximate time at which the guest resumed with nothing changed.
    pub(crate) since: Instant,
    /// The last epoch handed over, or the last durable one after a failure; `None` until the full
    /// one is.
    pub(crate) last: Option<u64>,
}

impl EpochChain {
    /// Creates a chain that begins with a full epoch.
    pub(crate) fn new(subscription: Subscription, drives: EpochDrives) -> Self {
        Self { subscription, drives, since: Instant::now(), last: None }
    }
}
