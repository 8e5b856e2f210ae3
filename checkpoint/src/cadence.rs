//! Epochs at a steady pace, for `checkpoint --every`.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::histogram::Times;
use crate::{CheckpointError, Checkpointer, EpochReport, Spread};

/// How long a wait goes on after it has been cancelled, at most.
const CANCEL_LATENCY: Duration = Duration::from_millis(10);

/// Epochs that are on their way to the disk at most.
const MOST_IN_FLIGHT: usize = 4;

/// A wait looks four times whether much has changed already, but not more often than this: each
/// look protects anew what was written, and so costs a guest that writes to few frames again and
/// again.
const LOOK: Duration = Duration::from_millis(2);

/// When epochs are to be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cadence {
    /// From the beginning of one to the beginning of the next.
    pub every: Duration,
    /// How many; without it, until told to stop.
    pub count: Option<u64>,
    /// How long the guest may stand still for one. One that would take longer if it were taken when
    /// it is due is taken earlier, as far as that can be known: see [`Checkpointer::run`].
    pub max_pause: Option<Duration>,
}

/// An epoch of a series.
#[derive(Debug)]
pub struct Taken {
    /// The epoch, or why there is none; the series goes on either way.
    pub outcome: Result<EpochReport, CheckpointError>,
    /// How long after it was due it was begun.
    pub late: Duration,
    /// Since the one before was begun.
    pub interval: Option<Duration>,
    /// It was begun before it was due, because much had changed.
    pub early: bool,
    /// Epochs that were due before this one was begun and are not made up for.
    pub skipped: u64,
}

/// What a series of epochs has come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Achieved {
    /// Epochs that are durable.
    pub epochs: u64,
    /// Epochs that were not stored.
    pub failed: u64,
    /// Those that came before they were due.
    pub early: u64,
    /// Those that were left out because one before them took too long.
    pub skipped: u64,
    /// How long the guest stood still.
    pub pause: Spread,
    /// From the beginning of one to the beginning of the next.
    pub interval: Spread,
    /// From the end of a pause until the epoch was durable.
    pub write: Spread,
}

/// Keeps count of a series.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    achieved: Achieved,
    pause: Times,
    interval: Times,
    write: Times,
}

impl Tally {
    /// One more.
    pub fn add(&mut self, taken: &Taken) {
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

    /// What it has come to so far.
    pub fn achieved(&self) -> Achieved {
        let (pause, interval) = (self.pause.spread(), self.interval.spread());
        Achieved { pause, interval, write: self.write.spread(), ..self.achieved }
    }
}

/// How an epoch was begun, until it is known what became of it.
#[derive(Debug)]
struct Begun {
    late: Duration,
    interval: Option<Duration>,
    early: bool,
    skipped: u64,
}

/// A series under way: epochs that were begun, and who hears what becomes of them, in order.
struct Series<F> {
    begun: VecDeque<Begun>,
    on_taken: F,
    /// He wants no more.
    over: bool,
}

impl<F: FnMut(Taken) -> ControlFlow<()>> Series<F> {
    fn landed(&mut self, outcome: Result<EpochReport, CheckpointError>) {
        // As many land as were begun.
        let Some(Begun { late, interval, early, skipped }) = self.begun.pop_front() else { return };
        self.over |= (self.on_taken)(Taken { outcome, late, interval, early, skipped }).is_break();
    }
}

impl Checkpointer {
    /// Takes epochs as `cadence` says, the first at once, until so many were tried, `cancel`
    /// becomes true, or `on_taken` breaks off. Returns how many were tried.
    ///
    /// Up to four are on their way to the disk at once. They become durable in order, and
    /// `on_taken` hears of each, also after it has broken off, when it is durable or has failed, in
    /// order, too. If one fails, so do those behind it that were built on it; the next has all that
    /// they had. Nothing queues beyond that: an epoch that is due while four are being written is
    /// taken as soon as the first of them is durable, and says how late it was; others that were
    /// due by then are skipped, and the next is due one interval later. A failed epoch is handed
    /// over like a stored one.
    ///
    /// With a longest pause it looks now and then at what has changed, and takes an epoch early
    /// when that nears what fits into the staging area or, where none can be copied behind the
    /// guest's back, into that pause, judged by those before. What will change while drives are
    /// copied ahead of the pause counts.
    pub fn run(
        &mut self,
        cadence: &Cadence,
        cancel: &AtomicBool,
        on_taken: impl FnMut(Taken) -> ControlFlow<()>,
    ) -> u64 {
        let (mut pace, mut before) = (Pace { every: cadence.every, due: Instant::now() }, None);
        let mut series = Series { begun: VecDeque::new(), on_taken, over: false };
        let mut tried = 0;
        while cadence.count.is_none_or(|count| tried < count) {
            let Some(early) = self.wait(pace.due, cadence, cancel, &mut series) else { break };
            while self.in_flight() >= MOST_IN_FLIGHT || self.must_land() {
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
            series.begun.push_back(Begun { late, interval, early, skipped });
            self.launch();
            tried += 1;
        }
        while let Some(landed) = self.land(None) {
            series.landed(landed);
        }
        tried
    }

    /// Waits until `due`, or until much has changed: then it is early. `None` if that was
    /// cancelled.
    fn wait<F: FnMut(Taken) -> ControlFlow<()>>(
        &mut self,
        due: Instant,
        cadence: &Cadence,
        cancel: &AtomicBool,
        series: &mut Series<F>,
    ) -> Option<bool> {
        let Some(most) = cadence.max_pause.and_then(|most| self.most_changed(most)) else {
            return self.wait_until(due, cancel, series).then_some(false);
        };
        loop {
            let look = Instant::now() + LOOK.max(cadence.every / 4);
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

    /// Waits until `due`, and hears of what lands meanwhile; `false` if that was cancelled, or
    /// nobody wants more.
    fn wait_until<F: FnMut(Taken) -> ControlFlow<()>>(
        &mut self,
        due: Instant,
        cancel: &AtomicBool,
        series: &mut Series<F>,
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
}
