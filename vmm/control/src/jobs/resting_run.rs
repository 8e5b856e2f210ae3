//! An upgrade under way, and the checkpoint run that rests meanwhile.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;

use super::checkpoints::CheckpointJob;
use super::error::JobError;
use super::moved_run::{MovedRun, OfferedRun};
use super::pause_control::PauseControl;
use super::run_hold::RunRest;

/// Limit on the checkpoint in progress at the begin of an upgrade.
const REST_LIMIT: Duration = Duration::from_secs(10);
/// Limit on closing the store after that, which requests wait for.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// An upgrade of a guest's process under way. Dropping it ends the upgrade.
pub(crate) struct Upgrade<'j> {
    /// The run that rests meanwhile.
    pub(crate) run: Option<RestingRun>,
    pub(super) _only: MutexGuard<'j, ()>,
}

/// A checkpoint run that rests during an upgrade. Dropping it lets the run go on here, unless it
/// has moved.
pub(crate) struct RestingRun {
    job: Arc<CheckpointJob>,
    pauses: Arc<PauseControl>,
}

impl RestingRun {
    /// Lets `job` rest. Returns `None` if it is over.
    pub(super) fn of(
        job: Arc<CheckpointJob>,
        pauses: &Arc<PauseControl>,
    ) -> Result<Option<Self>, JobError> {
        match job.rest(REST_LIMIT) {
            RunRest::Rests => {
                pauses.complete_writes(true);
                Ok(Some(Self { job, pauses: pauses.clone() }))
            }
            RunRest::Over => Ok(None),
            RunRest::Busy => {
                Err(JobError::CheckpointTakesLong { job: job.number(), limit: REST_LIMIT })
            }
        }
    }

    /// Returns what the next process has to know before it has the guest.
    pub(crate) fn offered(&self) -> OfferedRun {
        OfferedRun { number: self.job.number(), request: self.job.request().clone() }
    }

    /// Ends the run here, because the guest has moved. Returns what the next process continues
    /// with: `None` if the run is over.
    ///
    /// # Errors
    ///
    /// The store does not close in time.
    pub(crate) fn move_away(&self) -> Result<Option<MovedRun>, JobError> {
        let (job, limit) = (self.job.number(), CLOSE_LIMIT);
        self.job.move_away(limit).ok_or(JobError::CheckpointTakesLong { job, limit })
    }

    /// Returns whether `job` is the run that rests.
    pub(super) fn is(&self, job: &Arc<CheckpointJob>) -> bool {
        Arc::ptr_eq(&self.job, job)
    }
}

impl Drop for RestingRun {
    fn drop(&mut self) {
        self.pauses.complete_writes(false);
        self.job.release();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let job = self.job.clone();
            runtime.spawn(async move { job.expect_client().await });
        }
    }
}
