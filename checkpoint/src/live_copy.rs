//! Copies memory while the guest runs: what a full epoch does before it pauses the guest.

use driftline_dirty_tracker::{DirtySet, FrameRun, Subscription};
use driftline_guest::{GuestError, RunState};

use crate::copy_policy::CopyPolicy;
use crate::epoch_output::EpochOutput;
use crate::guest::Checkpointable;
use crate::report::EpochFailure;
use crate::staging::{Staging, batches};

/// A copy of a running guest's memory into the file of an epoch.
pub(crate) struct LiveCopy<'c> {
    pub(crate) guest: &'c dyn Checkpointable,
    pub(crate) policy: &'c CopyPolicy,
    pub(crate) subscription: &'c mut Subscription,
    pub(crate) staging: &'c mut Staging,
    pub(crate) file: &'c mut dyn EpochOutput,
}

impl LiveCopy<'_> {
    /// Copies all populated memory, then what was written meanwhile, for as long as that becomes
    /// less. The rest is appended after the pause and so overrides these copies. Returns the dirty
    /// sets that went into the file: none of them is safe until the file is.
    pub(crate) fn copy_all(&mut self) -> Result<Vec<DirtySet>, EpochFailure> {
        let populated = self.guest.populated()?;
        self.copy(&populated, true)?;
        let frames = populated.iter().map(|run| run.count).sum::<u64>();
        tracing::debug!(frames, "copied while the guest ran");
        self.catch_up(frames)
    }

    /// Copies what was written since, for as long as each pass is smaller than the one before,
    /// which had `before` frames. Returns the dirty sets of all passes.
    pub(crate) fn catch_up(&mut self, mut before: u64) -> Result<Vec<DirtySet>, EpochFailure> {
        let mut passes = Vec::new();
        while passes.len() < self.policy.live_passes {
            self.guest.collect()?;
            let changed = self.subscription.drain();
            let frames = changed.frames();
            let runs: Vec<FrameRun> = changed.runs().collect();
            self.copy(&runs, false)?;
            tracing::debug!(frames, "copied again while the guest ran");
            passes.push(changed);
            if frames <= self.policy.live_frames || !self.policy.shrinks(frames, before) {
                break;
            }
            before = frames;
        }
        Ok(passes)
    }

    fn copy(&mut self, runs: &[FrameRun], forget_zeros: bool) -> Result<(), EpochFailure> {
        let batch_frames = self.policy.live_frames.min(self.staging.frames());
        for batch in batches(runs, batch_frames) {
            // A long copy must not delay the end of the guest.
            if self.guest.run_state() == RunState::Stopped {
                let (request, state) = ("copy memory of", RunState::Stopped);
                return Err(GuestError::State { request, state }.into());
            }
            let contents = self.staging.copy(self.guest.ram(), batch.iter().copied())?;
            self.file.frames(batch.iter().copied(), contents, forget_zeros)?;
        }
        Ok(())
    }
}
