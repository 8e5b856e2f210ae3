//! The chain that the next epoch continues: the subscriptions that track the guest's writes, and
//! the epoch that the next one builds on.

use std::time::Instant;

use driftline_dirty_tracker::Subscription;
use driftline_guest::DriveHead;

use crate::epoch_drives::EpochDrives;
use crate::guest::Checkpointable;
use crate::report::{EpochStep, FailedStep, step};

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
    /// Creates a chain that begins with a full epoch, and begins to track the guest's writes.
    pub(crate) fn begin(
        guest: &dyn Checkpointable,
        drives: &[DriveHead],
    ) -> Result<Self, FailedStep> {
        let subscription = step(EpochStep::Subscribe, || guest.subscribe("checkpoint"))?;
        let drives = step(EpochStep::Subscribe, || EpochDrives::track(guest, drives))?;
        Ok(Self { subscription, drives, since: Instant::now(), last: None })
    }
}
