//! The jobs of a guest whose process is replaced: which of them exclude an upgrade, the hand-over,
//! and what continues in the next process.

use std::sync::atomic::Ordering;
use std::time::Duration;

use driftline_checkpoint::FollowedWrites;
use driftline_guest::RunState;
use driftline_migrate::SendReport;

use super::checkpoints::CheckpointJob;
use super::error::JobError;
use super::moved_run::{JobNumbers, MovedRun, OfferedRun};
use super::suspended_run::Upgrade;
use super::{Jobs, find_job};
use crate::model::{MigrationFailure, MigrationRequest};

/// Limit for an upgrade to wait until another job has been started.
const START_LIMIT: Duration = Duration::from_secs(1);
/// Interval at which an upgrade checks whether its hand-over is in doubt.
const DOUBT_INTERVAL: Duration = Duration::from_millis(100);

/// Upper bound on the jobs that begin in this process after the next one has got their numbers, the
/// hand-over included. They begin within some seconds, and a checkpoint run among them ends the
/// upgrade.
const LATER_JOBS: u64 = 16;
/// The same for watches, of which a client can begin many. Users do not see their numbers.
const LATER_WATCHES: u64 = 1 << 20;
/// Upper bound on numbers that another process sends, so that later numbers cannot overflow.
const MAX_NUMBER: u64 = 1 << 63;

impl Jobs {
    /// Begins an upgrade, if another process of this host can continue with the guest. Other
    /// upgrades are refused until the result is dropped.
    ///
    /// # Errors
    ///
    /// Another upgrade, or a job that cannot continue in another process, is under way, or the
    /// guest has ended.
    pub(crate) fn begin_upgrade(&self) -> Result<Upgrade<'_>, JobError> {
        let only = self.upgrading.try_lock().ok_or(JobError::UpgradeUnderWay)?;
        let run = self.checkpoint_job().filter(|job| !job.is_over());
        let upgrade = Upgrade { run, pauses: &self.pauses, _only: only };
        self.check_upgrade(&upgrade)?;
        Ok(upgrade)
    }

    fn check_upgrade(&self, upgrade: &Upgrade<'_>) -> Result<(), JobError> {
        if self.vm.run_state() == RunState::Stopped {
            return Err(JobError::Ended);
        }
        let run = self.checkpoint_job().filter(|job| !job.is_over());
        if let Some(job) = run.filter(|job| !upgrade.continues(job)) {
            return Err(job.under_way());
        }
        if self.sampling.is_locked() {
            return Err(JobError::PlanUnderWay);
        }
        match *self.shadow.lock() {
            None => Ok(()),
            Some(_) => Err(JobError::Shadowed),
        }
    }

    /// Hands the guest over to the process of this host that listens at `to`, and waits for the
    /// end. Calls `moved` once that process has the guest; when that returns, this process may
    /// end. Calls `in_doubt` if the operator has to decide.
    ///
    /// # Errors
    ///
    /// As [`begin_upgrade`](Self::begin_upgrade) and [`start_migration`](Self::start_migration), or
    /// another job is being started and takes too long. Otherwise the hand-over's own result.
    pub(crate) async fn hand_over_here(
        &self,
        upgrade: &Upgrade<'_>,
        to: &str,
        in_doubt: impl FnOnce(),
        moved: impl FnOnce(),
    ) -> Result<Result<SendReport, MigrationFailure>, JobError> {
        let number = {
            // Requests wait, so this must not wait for a store that hangs.
            let starting = self.starting.try_lock_for(START_LIMIT);
            let _starting = starting.ok_or(JobError::StartUnderWay)?;
            self.check_upgrade(upgrade)?;
            // Set now, because the guest ends here before its outcome is known.
            self.is_upgraded.store(true, Ordering::Relaxed);
            let started = self.begin_migration(&MigrationRequest::on_this_host(to));
            started.inspect_err(|_| self.is_upgraded.store(false, Ordering::Relaxed))?
        };
        let job = find_job(&self.migration, Some(number))?.ok_or(JobError::NoJob(number))?;
        let mut in_doubt = Some(in_doubt);
        while tokio::time::timeout(DOUBT_INTERVAL, job.end()).await.is_err() {
            if let Some(in_doubt) = in_doubt.take_if(|_| job.is_in_doubt()) {
                in_doubt();
            }
        }
        let handed_over = job.outcome();
        self.is_upgraded.store(handed_over.is_ok(), Ordering::Relaxed);
        if handed_over.is_ok() {
            moved();
        }
        // Only now may the process end.
        job.page();
        Ok(handed_over)
    }

    /// Returns the numbers of the jobs so far, and of those that may begin until requests are held.
    pub(crate) fn numbers(&self) -> JobNumbers {
        let jobs = self.last_number.load(Ordering::Relaxed).saturating_add(LATER_JOBS);
        let watches = self.watches.open.lock().last_number.saturating_add(LATER_WATCHES);
        JobNumbers { jobs, watches }
    }

    /// Numbers jobs after those of the process that had the guest before.
    pub fn number_after(&self, numbers: JobNumbers) {
        self.last_number.fetch_max(numbers.jobs.min(MAX_NUMBER), Ordering::Relaxed);
        let mut open = self.watches.open.lock();
        open.last_number = open.last_number.max(numbers.watches.min(MAX_NUMBER));
    }

    /// Continues the run that was `offered`. `writes` are those of the guest since it has run here.
    ///
    /// # Errors
    ///
    /// A thread cannot be started.
    pub fn continue_run(
        &self,
        offered: &OfferedRun,
        moved: MovedRun,
        writes: Option<FollowedWrites>,
    ) -> Result<(), JobError> {
        let totals = self.checkpoint_totals.clone();
        let job = CheckpointJob::continue_moved(offered, &self.pauses, totals, moved, writes)?;
        self.checkpoint.add(offered.number, job);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn end_waits_for_the_upgrade() {
        let (_vm, jobs) = super::super::paused_guest();
        let upgrade = jobs.begin_upgrade().unwrap();
        jobs.is_upgraded.store(true, Ordering::Relaxed);
        thread::scope(|scope| {
            let end = scope.spawn(|| jobs.await_last_readers());
            thread::sleep(Duration::from_millis(200));
            assert!(!end.is_finished());
            drop(upgrade);
        });
    }

    #[test]
    fn numbers_of_another_process_cannot_overflow() {
        let (_vm, jobs) = super::super::paused_guest();
        jobs.number_after(JobNumbers { jobs: u64::MAX, watches: u64::MAX });
        assert_eq!(jobs.next_number(), MAX_NUMBER + 1);
        assert_eq!(jobs.begin_watch(1).unwrap(), MAX_NUMBER + 1);
    }
}
