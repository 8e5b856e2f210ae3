//! Counts the time for which a throttled vCPU did not enter the guest.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A vCPU's stalls. Any thread may read it.
#[derive(Debug, Default)]
pub(crate) struct StallMeter {
    completed: AtomicU64,
    time: Mutex<StallTime>,
}

#[derive(Debug, Default)]
struct StallTime {
    /// Total duration of the completed stalls.
    completed: Duration,
    /// Start of the stall under way.
    since: Option<Instant>,
}

impl StallMeter {
    /// Returns the number of completed stalls.
    pub(crate) fn stalls(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }

    /// Returns the total duration of all stalls, up to now of the one under way, which may last for
    /// seconds.
    pub(crate) fn stalled(&self) -> Duration {
        let time = self.time.lock();
        time.completed + time.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Counts a stall from `since` until `end`. A stall under way continues.
    pub(super) fn begin(&self, since: Instant) {
        self.time.lock().since.get_or_insert(since);
    }

    /// Ends the stall under way.
    pub(super) fn end(&self) {
        let mut time = self.time.lock();
        if let Some(since) = time.since.take() {
            time.completed += since.elapsed();
        }
        self.completed.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a stall that takes no time.
    pub(crate) fn skip(&self) {
        self.completed.fetch_add(1, Ordering::Relaxed);
    }
}
