//! Owns the jobs of one kind: the latest, and a few earlier ones that a client may still read.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

/// Maximum number of jobs kept of each kind.
const MAX_JOBS: usize = 4;

/// See the module documentation. Numbers ascend.
pub(super) struct JobHistory<J> {
    jobs: Mutex<VecDeque<(u64, Arc<J>)>>,
}

impl<J> Default for JobHistory<J> {
    fn default() -> Self {
        Self { jobs: Mutex::default() }
    }
}

impl<J> JobHistory<J> {
    /// Adds the latest job, and discards the oldest if there are more than [`MAX_JOBS`].
    pub(super) fn add(&self, number: u64, job: Arc<J>) {
        let mut jobs = self.jobs.lock();
        jobs.push_back((number, job));
        if jobs.len() > MAX_JOBS {
            jobs.pop_front();
        }
    }

    /// Returns the job with this number.
    pub(super) fn find(&self, number: u64) -> Option<Arc<J>> {
        self.jobs.lock().iter().find(|(n, _)| *n == number).map(|(_, job)| job.clone())
    }

    /// Returns the latest job.
    pub(super) fn latest(&self) -> Option<Arc<J>> {
        self.jobs.lock().back().map(|(_, job)| job.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_is_found_until_it_is_discarded() {
        let history = JobHistory::default();
        assert!(history.latest().is_none());
        for n in 1..=6u64 {
            history.add(n, Arc::new(n * 10));
        }
        assert_eq!(history.latest().as_deref(), Some(&60));
        assert_eq!(history.find(3).as_deref(), Some(&30));
        assert!(history.find(2).is_none() && history.find(7).is_none());
    }
}
