//! Counts the time for which a throttled vCPU did not enter the guest.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A vCPU's completed stalls. Any thread may read it.
#[derive(Debug, Default)]
pub(crate) struct StallMeter {
    stalls: AtomicU64,
    stalled_ns: AtomicU64,
}

impl StallMeter {
    /// Returns the number of completed stalls.
    pub(crate) fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
    }

    /// Returns the total duration of the completed stalls.
    pub(crate) fn stalled(&self) -> Duration {
        Duration::from_nanos(self.stalled_ns.load(Ordering::Relaxed))
    }

    /// Counts a completed stall.
    pub(crate) fn count(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.stalled_ns.fetch_add(ns, Ordering::Relaxed);
        self.stalls.fetch_add(1, Ordering::Relaxed);
    }
}
