//! Owns the jobs of one kind: the latest, and a few earlier ones that a client may still read.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

/// Maximum number of jobs kept of each kind.
const KEPT: usize = 4;

/// See the module documentation. Numbers ascend.
pub(super) struct Kept<J> {
    jobs: Mutex<VecDeque<(u64, Arc<J>)>>,
}

impl<J> Default for Kept<J> {
    fn default() -> Self {
        Self { jobs: Mutex::default() }
    }
}

impl<J> Kept<J> {
    /// Adds the latest job, and discards the oldest if there are more than [`KEPT`].
    pub(super) fn add(&self, number: u64, job: Arc<J>) {
        let mut jobs = self.jobs.lock();
        jobs.push_back((number, job));
        if jobs.len() > KEPT {
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
        let kept = Kept::default();
        assert!(kept.latest().is_none());
        for n in 1..=6u64 {
            kept.add(n, Arc::new(n * 10));
        }
        assert_eq!(kept.latest().as_deref(), Some(&60));
        assert_eq!(kept.find(3).as_deref(), Some(&30));
        assert!(kept.find(2).is_none() && kept.find(7).is_none());
    }
}
