//! Gives a drive of the guest another file while no job depends on its first one.
//!
//! A migration's destination has the drives that the guest had when its state was saved, and a
//! checkpoint run copies the files that it has opened. No job can begin while a file is exchanged.

use std::path::Path;
use std::time::Duration;

use driftline_machine::devices::{DiskFileControl, ExchangeError};
use parking_lot::MutexGuard;

use super::snapshots::SnapshotBase;
use super::{JobError, Jobs};

/// Why a drive keeps its file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeptFile {
    /// A job depends on it.
    #[error("the drive keeps its file, because {0}; try again once that is over")]
    Job(#[source] JobError),
    /// A job is being started.
    #[error("the drive keeps its file, because a job on the guest is being started; try again")]
    Starting,
    /// A snapshot is being written.
    #[error(
        "the drive keeps its file, because a snapshot of the guest is being written; try again"
    )]
    Snapshot,
    /// The drive refuses.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
}

impl Jobs {
    /// Gives the drive of `file` the file at `path`. Waits at most `limit` for a job that is being
    /// started, and as long for the drive.
    ///
    /// # Errors
    ///
    /// A [`KeptFile`] if a job depends on the first file, or the drive refuses.
    pub(crate) fn exchange_file(
        &self,
        file: &DiskFileControl,
        path: &Path,
        limit: Duration,
    ) -> Result<(), KeptFile> {
        let _none = self.keep_jobs_out(limit)?;
        Ok(file.exchange(path, limit)?)
    }

    /// Keeps jobs from being started until the result is dropped.
    ///
    /// # Errors
    ///
    /// A job runs or is being started, or a snapshot is being written.
    fn keep_jobs_out(
        &self,
        limit: Duration,
    ) -> Result<(MutexGuard<'_, ()>, MutexGuard<'_, SnapshotBase>), KeptFile> {
        let starting = self.starting.try_lock_for(limit).ok_or(KeptFile::Starting)?;
        if let Some(job) = self.migration_job().filter(|job| !job.is_over()) {
            let to = job.to().to_owned();
            return Err(KeptFile::Job(JobError::MigrationUnderWay { to }));
        }
        if let Some(job) = self.checkpoint_job().filter(|job| !job.is_over()) {
            return Err(KeptFile::Job(job.under_way()));
        }
        let snapshots = self.snapshots.try_lock().ok_or(KeptFile::Snapshot)?;
        Ok((starting, snapshots))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::paused_guest;

    #[test]
    fn job_and_exchange_exclude_each_other() {
        let (_vm, jobs) = paused_guest();
        let refusal = || jobs.keep_jobs_out(Duration::ZERO).map(drop).unwrap_err().to_string();
        let kept = jobs.keep_jobs_out(Duration::ZERO).unwrap();
        assert!(jobs.starting.try_lock().is_none() && jobs.snapshots.try_lock().is_none());
        drop(kept);
        let taking = jobs.snapshots.lock();
        assert!(refusal().contains("a snapshot of the guest is being written"));
        drop(taking);
        let starting = jobs.starting.lock();
        assert!(refusal().contains("a job on the guest is being started"));
        drop(starting);
        assert!(jobs.keep_jobs_out(Duration::ZERO).is_ok());
    }
}
