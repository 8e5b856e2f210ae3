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
    /// Start of the stall in progress.
    since: Option<Instant>,
}

impl StallMeter {
    /// Returns the number of completed stalls.
    pub(crate) fn stalls(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }

    /// Returns the total duration of all stalls, including the one in progress.
    pub(crate) fn stalled(&self) -> Duration {
        let time = self.time.lock();
        time.completed + time.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Begins a stall, or continues the one in progress.
    pub(super) fn begin(&self) {
        self.time.lock().since.get_or_insert_with(Instant::now);
    }

    /// Ends the stall in progress.
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
