//! An upgrade under way, and the checkpoint run that is suspended meanwhile.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;

use super::checkpoints::CheckpointJob;
use super::error::JobError;
use super::moved_run::{MovedRun, OfferedRun, RunPosition};
use super::pause_control::PauseControl;
use super::run_suspension::SuspendOutcome;

/// Limit on the checkpoint in progress at the beginning of an upgrade.
const SUSPEND_LIMIT: Duration = Duration::from_secs(10);
/// Limit on closing the store after that, which requests wait for.
const STORE_CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// An upgrade of a guest's process under way. Dropping it ends the upgrade.
pub(crate) struct Upgrade<'j> {
    /// The checkpoint run that continues in the next process.
    pub(super) run: Option<Arc<CheckpointJob>>,
    pub(super) pauses: &'j Arc<PauseControl>,
    pub(super) _only: MutexGuard<'j, ()>,
}

impl Upgrade<'_> {
    /// Returns what the next process has to know before it has the guest, if there is a checkpoint
    /// run.
    pub(crate) fn offered_run(&self) -> Option<OfferedRun> {
        let run = self.run.as_ref()?;
        Some(OfferedRun { number: run.number(), request: run.request().clone() })
    }

    /// Suspends the checkpoint run, if there is one. Waits for the checkpoint in progress.
    ///
    /// # Errors
    ///
    /// The checkpoint in progress takes longer than 10 s. The run continues here.
    pub(crate) fn suspend_run(&self) -> Result<Option<SuspendedRun>, JobError> {
        let Some(job) = self.run.clone() else { return Ok(None) };
        self.pauses.collect_in_pause(true);
        // Created before the wait: a client that disconnects during the wait does not end the run,
        // so that the drop has to wait for a client again.
        let suspended = SuspendedRun { job, pauses: self.pauses.clone() };
        match suspended.job.suspend(SUSPEND_LIMIT) {
            SuspendOutcome::Suspended | SuspendOutcome::Over => Ok(Some(suspended)),
            SuspendOutcome::Busy => {
                let job = suspended.job.number();
                Err(JobError::CheckpointTakesLong { job, limit: SUSPEND_LIMIT })
            }
        }
    }

    /// Returns whether `job` is the run that continues.
    pub(super) fn continues(&self, job: &Arc<CheckpointJob>) -> bool {
        self.run.as_ref().is_some_and(|run| Arc::ptr_eq(run, job))
    }
}

/// A checkpoint run that is suspended, or has ended, during an upgrade. Dropping it continues the
/// run here, unless it has moved.
pub(crate) struct SuspendedRun {
    job: Arc<CheckpointJob>,
    pauses: Arc<PauseControl>,
}

impl SuspendedRun {
    /// Returns the run's position.
    pub(crate) fn position(&self) -> RunPosition {
        self.job.position()
    }

    /// Ends the run here, because the guest has moved. Returns what the next process continues
    /// with.
    ///
    /// # Errors
    ///
    /// The store does not close in time, or the run's thread has panicked.
    pub(crate) fn move_away(&self) -> Result<MovedRun, JobError> {
        let (job, limit) = (self.job.number(), STORE_CLOSE_LIMIT);
        self.job.move_away(limit).ok_or(JobError::StoreStaysOpen { job, limit })
    }
}

impl Drop for SuspendedRun {
    fn drop(&mut self) {
        self.pauses.collect_in_pause(false);
        self.job.resume();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let job = self.job.clone();
            runtime.spawn(async move { job.expect_client().await });
        }
    }
}
