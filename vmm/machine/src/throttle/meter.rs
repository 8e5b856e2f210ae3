//! Counts the time for which a vCPU was kept out of the guest.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A vCPU's completed holds. Any thread may read it.
#[derive(Debug, Default)]
pub(crate) struct HoldMeter {
    holds: AtomicU64,
    held_ns: AtomicU64,
}

impl HoldMeter {
    /// Returns the number of completed holds.
    pub(crate) fn holds(&self) -> u64 {
        self.holds.load(Ordering::Relaxed)
    }

    /// Returns the total duration of the completed holds.
    pub(crate) fn held(&self) -> Duration {
        Duration::from_nanos(self.held_ns.load(Ordering::Relaxed))
    }

    /// Counts a completed hold.
    pub(crate) fn count(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.held_ns.fetch_add(ns, Ordering::Relaxed);
        self.holds.fetch_add(1, Ordering::Relaxed);
    }
}
