//! How the next epoch is copied: the policy, and what earlier epochs say about it.

use std::time::Duration;

use crate::availability::{ProtectionAvailability, WaitAvailability};
use crate::copy_policy::CopyPolicy;
use crate::copy_time::CopyTimes;
use crate::cost::{AheadCost, CopyCost};
use crate::epoch_copy::EpochCopy;
use crate::report::{EpochFailure, EpochStep};

/// Decides how each epoch of one checkpointer is copied.
#[derive(Default)]
pub(crate) struct CopyPlanner {
    pub(crate) policy: CopyPolicy,
    pub(crate) protection: ProtectionAvailability,
    pub(crate) write_waits: WaitAvailability,
    pub(crate) times: CopyTimes,
    /// Cost of frames that are copied in the pause.
    pub(crate) cost: CopyCost,
    /// Cost of blocks that are copied before the pause.
    pub(crate) ahead: AheadCost,
}

impl CopyPlanner {
    /// Replaces the number of changed frames from which an epoch is copied while the guest runs.
    #[cfg(feature = "testing")]
    pub(crate) fn background_from(&mut self, frames: u64) {
        (self.policy, self.times) = (CopyPolicy::background_from(frames), CopyTimes::default());
    }

    /// Returns how many frames may have changed for a pause of at most `max_pause`, with `room`
    /// frames in the staging area.
    pub(crate) fn most_changed(&self, max_pause: Duration, room: u64) -> u64 {
        let most = match self.protection.is_used() {
            // Frames that are copied after the guest has resumed do not lengthen the pause.
            true => room,
            // An epoch that takes more than half the room is not copied before the pause, so an
            // epoch begins early at half: at three quarters (`early_percent`) of these two thirds.
            false => self.cost.fit(max_pause).unwrap_or(u64::MAX).min(room / 3 * 2),
        };
        self.policy.early_at(most)
    }

    /// Records what an epoch has cost that was copied.
    pub(crate) fn copied(&mut self, taken: &EpochCopy) {
        if taken.staged > 0 {
            self.cost.note(&self.policy, taken.pause, taken.in_pause, taken.staged);
        }
    }

    /// Records that an epoch failed for `cause` before it was handed over. Returns whether the next
    /// epochs are copied in the pause because of that.
    pub(crate) fn failed(&mut self, step: EpochStep, cause: &EpochFailure) -> bool {
        self.write_waits.failed(&self.policy, step, cause);
        self.protection.failed(&self.policy, step, cause)
    }
}
