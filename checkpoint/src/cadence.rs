//! Epochs at a steady pace, for `checkpoint --every`.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::checkpointer::Checkpointer;
use crate::histogram::{DurationHistogram, Percentiles};
use crate::report::{CheckpointError, EpochReport};

/// Longest time that the wait for the next epoch continues after its cancellation.
const CANCEL_LATENCY: Duration = Duration::from_millis(10);

/// Maximum number of epochs in flight to the disk. 4, chosen: with one, the disk would be idle
/// while the next epoch is taken. A crash of the host loses all that are in flight.
const MAX_IN_FLIGHT: usize = 4;

/// Minimum interval at which a wait polls how much has changed; it polls up to four times per
/// interval. Each poll write-protects again what was written, and so costs faults in a guest that
/// keeps writing to a few frames.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// When epochs are to be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cadence {
    /// Interval from the beginning of one epoch to the beginning of the next.
    pub every: Duration,
    /// Number of epochs; `None` continues until cancelled.
    pub count: Option<u64>,
    /// Longest pause. An epoch is taken early, as far as that can be predicted, if its pause would
    /// exceed this when it is due: see [`Checkpointer::run`].
    pub max_pause: Option<Duration>,
}

/// An epoch of a series.
#[derive(Debug)]
pub struct TakenEpoch {
    /// The epoch, or the reason why it failed; the series continues either way.
    pub outcome: Result<EpochReport, CheckpointError>,
    /// Time between the due time and the beginning of the epoch.
    pub late: Duration,
    /// Time since the beginning of the previous epoch.
    pub interval: Option<Duration>,
    /// Whether it began before it was due, because much had changed.
    pub early: bool,
    /// Epochs that were due before this one began and are never taken.
    pub skipped: u64,
}

/// Totals of a series of epochs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CadenceTotals {
    /// Epochs that are durable.
    #[serde(rename = "taken")]
    pub epochs: u64,
    /// Epochs that were not stored.
    pub failed: u64,
    /// Epochs that began before they were due.
    pub early: u64,
    /// Epochs that were skipped because an earlier one took too long.
    pub skipped: u64,
    /// Lengths of the pauses.
    pub pause: Percentiles,
    /// Intervals from the beginning of one epoch to the beginning of the next.
    pub interval: Percentiles,
    /// Times from the end of a pause until the epoch was durable.
    pub write: Percentiles,
}

/// Accumulates the totals of a series. It is serialized when the series moves to another process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    achieved: CadenceTotals,
    pause: DurationHistogram,
    interval: DurationHistogram,
    write: DurationHistogram,
}

impl Tally {
    /// Adds one epoch.
    pub fn add(&mut self, taken: &TakenEpoch) {
        let sum = &mut self.achieved;
        sum.early += u64::from(taken.early);
        sum.skipped += taken.skipped;
        if let Some(interval) = taken.interval {
            self.interval.add(interval);
        }
        match &taken.outcome {
            Ok(report) => {
                sum.epochs += 1;
                self.pause.add(Duration::from_micros(report.pause_us));
                self.write.add(Duration::from_secs_f64(report.write_ms.max(0.0) / 1e3));
            }
            Err(_) => sum.failed += 1,
        }
    }

    /// Adds an epoch that could not even begin.
    pub fn add_failed(&mut self) {
        self.achieved.failed += 1;
    }

    /// Returns the totals so far.
    pub fn achieved(&self) -> CadenceTotals {
        let (pause, interval) = (self.pause.percentiles(), self.interval.percentiles());
        CadenceTotals { pause, interval, write: self.write.percentiles(), ..self.achieved }
    }
}

/// How an epoch began; kept until its outcome is known.
#[derive(Debug)]
struct StartedEpoch {
    late: Duration,
    interval: Option<Duration>,
    early: bool,
    skipped: u64,
}

/// A series under way: epochs that have begun, and the callback that receives their outcomes in
/// order.
struct EpochSeries<F> {
    begun: VecDeque<StartedEpoch>,
    on_taken: F,
    /// Whether the callback has ended the series.
    over: bool,
}

impl<F: FnMut(TakenEpoch) -> ControlFlow<()>> EpochSeries<F> {
    fn landed(&mut self, outcome: Result<EpochReport, CheckpointError>) {
        // As many epochs land as have begun.
        let Some(StartedEpoch { late, interval, early, skipped }) = self.begun.pop_front() else {
            return;
        };
        self.over |=
            (self.on_taken)(TakenEpoch { outcome, late, interval, early, skipped }).is_break();
    }
}

impl Checkpointer {
    /// Takes epochs as `cadence` says, the first immediately. Ends when the count is reached,
    /// `cancel` becomes true, or `on_taken` breaks. Returns the number of epochs tried.
    ///
    /// Up to four epochs are in flight to the disk at a time. They become durable in order.
    /// `on_taken` receives the outcome of each, in the same order, when it is durable or has
    /// failed; this continues after `on_taken` has broken off. If an epoch fails, so do the later
    /// ones that were built on it; the next one has all that they had. Nothing else queues: an
    /// epoch that is due while four are in flight is taken as soon as the first of them is durable,
    /// and reports how late it was. Other epochs that were due by then are skipped, and the next is
    /// due one interval later. `on_taken` receives a failed epoch like a stored one.
    ///
    /// With a longest pause, the loop polls what has changed. It takes an epoch early when the
    /// changed frames approach what fits into the staging area or, if frames cannot be copied while
    /// the guest runs, into that pause, judging by the previous pauses. The estimate includes what
    /// will change while drives are copied before the pause.
    pub fn run(
        &mut self,
        cadence: &Cadence,
        cancel: &AtomicBool,
        on_taken: impl FnMut(TakenEpoch) -> ControlFlow<()>,
    ) -> u64 {
        let (mut pace, mut before) = (DueTime { every: cadence.every, due: Instant::now() }, None);
        let mut series = EpochSeries { begun: VecDeque::new(), on_taken, over: false };
        let mut tried = 0;
        while cadence.count.is_none_or(|count| tried < count) {
            let Some(early) = self.wait(pace.due, cadence, cancel, &mut series) else { break };
            while self.in_flight() >= MAX_IN_FLIGHT || self.must_land() {
                let Some(landed) = self.land(None) else { break };
                series.landed(landed);
            }
            if series.over || cancel.load(Ordering::Relaxed) {
                break;
            }
            let now = Instant::now();
            let (late, skipped) = if early {
                pace.due = now + cadence.every;
                (Duration::ZERO, 0)
            } else {
                pace.begin(now)
            };
            let interval = before.replace(now).map(|before| now - before);
            series.begun.push_back(StartedEpoch { late, interval, early, skipped });
            self.launch();
            tried += 1;
        }
        while let Some(landed) = self.land(None) {
            series.landed(landed);
        }
        tried
    }

    /// Waits until `due`, or until much has changed. Returns whether the epoch is early, or `None`
    /// if the wait was cancelled.
    fn wait<F: FnMut(TakenEpoch) -> ControlFlow<()>>(
        &mut self,
        due: Instant,
        cadence: &Cadence,
        cancel: &AtomicBool,
        series: &mut EpochSeries<F>,
    ) -> Option<bool> {
        let Some(most) = cadence.max_pause.and_then(|most| self.most_changed(most)) else {
            return self.wait_until(due, cancel, series).then_some(false);
        };
        loop {
            let look = Instant::now() + MIN_POLL_INTERVAL.max(cadence.every / 4);
            if !self.wait_until(look.min(due), cancel, series) {
                return None;
            }
            if look >= due {
                return Some(false);
            }
            if self.expected().is_some_and(|frames| frames >= most) {
                return Some(true);
            }
        }
    }

    /// Waits until `due`, and passes on what lands meanwhile. Returns `false` if the wait was
    /// cancelled or the callback has ended the series.
    fn wait_until<F: FnMut(TakenEpoch) -> ControlFlow<()>>(
        &mut self,
        due: Instant,
        cancel: &AtomicBool,
        series: &mut EpochSeries<F>,
    ) -> bool {
        while !series.over && !cancel.load(Ordering::Relaxed) {
            let left = due.saturating_duration_since(Instant::now());
            let slice = left.min(CANCEL_LATENCY);
            if self.in_flight() > 0 {
                match self.land(Some(slice)) {
                    Some(landed) => series.landed(landed),
                    None if left.is_zero() => return true,
                    None => {}
                }
            } else if left.is_zero() {
                return true;
            } else {
                std::thread::sleep(slice);
            }
        }
        false
    }
}

/// When the next epoch is due.
#[derive(Debug)]
struct DueTime {
    every: Duration,
    due: Instant,
}

impl DueTime {
    /// Begins the due epoch at `now`, and sets when the next one is due. Returns how late it is and
    /// how many further epochs were due.
    fn begin(&mut self, now: Instant) -> (Duration, u64) {
        let late = now.saturating_duration_since(self.due);
        if late < self.every {
            // On time or nearly: the grid does not move, so that small delays do not add up.
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
    fn only_a_very_late_epoch_shifts_the_grid() {
        let start = Instant::now();
        let mut pace = DueTime { every: 10 * MS, due: start };
        assert_eq!(pace.begin(start), (Duration::ZERO, 0));
        assert_eq!(pace.begin(start + 13 * MS), (3 * MS, 0));
        assert_eq!(pace.due, start + 20 * MS);
        assert_eq!(pace.begin(start + 57 * MS), (37 * MS, 3));
        assert_eq!(pace.due, start + 67 * MS);
    }

    #[test]
    fn zero_interval_takes_epochs_back_to_back() {
        let start = Instant::now();
        let mut pace = DueTime { every: Duration::ZERO, due: start };
        assert_eq!(pace.begin(start + 5 * MS), (5 * MS, 0));
        assert_eq!(pace.due, start + 5 * MS);
    }
}
