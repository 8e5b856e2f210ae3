//! Epochs at a steady pace, for `checkpoint --every`.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::{CheckpointError, Checkpointer, EpochReport};

/// How long a wait goes on after it has been cancelled, at most.
const CANCEL_LATENCY: Duration = Duration::from_millis(10);

/// An epoch of a series.
#[derive(Debug)]
pub struct Taken {
    /// The epoch, or why there is none; the series goes on either way.
    pub outcome: Result<EpochReport, CheckpointError>,
    /// How long after it was due it was begun.
    pub late: Duration,
    /// Epochs that were due before this one was begun and are not made up for.
    pub skipped: u64,
}

impl Checkpointer {
    /// Takes an epoch every `every`, the first at once, until `count` were tried, `cancel` becomes
    /// true, or `on_taken` breaks off. Returns how many were tried.
    ///
    /// Nothing queues: an epoch that is due while the one before is still being written is taken as
    /// soon as that is durable, and says how late it was; others that were due by then are skipped,
    /// and the next is due one interval later. A failed epoch is handed over like a stored one.
    pub fn run(
        &mut self,
        every: Duration,
        count: Option<u64>,
        cancel: &AtomicBool,
        mut on_taken: impl FnMut(Taken) -> ControlFlow<()>,
    ) -> u64 {
        let mut pace = Pace { every, due: Instant::now() };
        let mut tried = 0;
        while count.is_none_or(|count| tried < count) && wait_until(pace.due, cancel) {
            let (late, skipped) = pace.begin(Instant::now());
            let outcome = self.take();
            tried += 1;
            if on_taken(Taken { outcome, late, skipped }).is_break() {
                break;
            }
        }
        tried
    }
}

/// Sleeps until `due`; `false` if that was cancelled.
fn wait_until(due: Instant, cancel: &AtomicBool) -> bool {
    while !cancel.load(Ordering::Relaxed) {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(CANCEL_LATENCY));
    }
    false
}

/// When the next epoch is due.
#[derive(Debug)]
struct Pace {
    every: Duration,
    due: Instant,
}

impl Pace {
    /// An epoch that was due begins `now`. Returns how late it is and how many more were due, and
    /// sets when the next one is.
    fn begin(&mut self, now: Instant) -> (Duration, u64) {
        let late = now.saturating_duration_since(self.due);
        if late < self.every {
            // On time or nearly: the grid stays, so that small delays do not add up.
            self.due += self.every;
            return (late, 0);
        }
        let skipped = late.as_nanos().checked_div(self.every.as_nanos()).unwrap_or(0);
        self.due = now + self.every;
        (late, u64::try_from(skipped).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_little_late_keeps_the_grid_and_very_late_starts_a_new_one() {
        let start = Instant::now();
        let mut pace = Pace { every: 10 * MS, due: start };
        assert_eq!(pace.begin(start), (Duration::ZERO, 0));
        assert_eq!(pace.begin(start + 13 * MS), (3 * MS, 0));
        assert_eq!(pace.due, start + 20 * MS);
        assert_eq!(pace.begin(start + 57 * MS), (37 * MS, 3));
        assert_eq!(pace.due, start + 67 * MS);
    }

    #[test]
    fn no_interval_means_one_after_the_other() {
        let start = Instant::now();
        let mut pace = Pace { every: Duration::ZERO, due: start };
        assert_eq!(pace.begin(start + 5 * MS), (5 * MS, 0));
        assert_eq!(pace.due, start + 5 * MS);
    }

    #[test]
    fn a_wait_ends_when_cancelled() {
        assert!(!wait_until(Instant::now() + 1000 * MS, &AtomicBool::new(true)));
        assert!(wait_until(Instant::now() + 15 * MS, &AtomicBool::new(false)));
    }
}
