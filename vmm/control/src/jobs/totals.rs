//! Totals of all jobs of one kind since this process has had the guest, for metrics. A job's own
//! totals are those of one run.

use std::time::{Duration, SystemTime};

use driftline_checkpoint::TakenEpoch;
use driftline_machine::histogram::{Distribution, Histogram};
use parking_lot::Mutex;

use crate::model::{MigrationPage, MigrationState};

/// Buckets of the pause, in µs. Half a millisecond is usual, so the buckets are narrow there; a
/// guest whose pages must be copied in the pause is paused for up to a second.
const PAUSE_US: &[u64] = &[
    100, 200, 300, 400, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000, 20_000, 50_000,
    100_000, 200_000, 500_000, 1_000_000,
];
/// Buckets of the time until a checkpoint is durable, in µs: a sync takes some ms, a full
/// checkpoint of a large guest up to minutes.
const DURABLE_US: &[u64] = &[
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    30_000_000,
    60_000_000,
    300_000_000,
];

/// Counts of checkpoints of all runs.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct CheckpointCounts {
    /// Checkpoints that are durable.
    pub taken: u64,
    /// Checkpoints that were not stored.
    pub failed: u64,
    /// Checkpoints that began before they were due.
    pub early: u64,
    /// Checkpoints that were due and not taken.
    pub skipped: u64,
    /// Pages of memory in them.
    pub pages: u64,
    /// Pages of those that were copied after the guest resumed.
    pub background_pages: u64,
    /// Disk blocks in them, 4 KiB each.
    pub disk_blocks: u64,
    /// Bytes written to the store.
    pub written_bytes: u64,
    /// Writes that waited for a page to be copied.
    pub write_waits: u64,
    /// Time for which they waited.
    pub write_waited: Duration,
    /// Time between the beginnings of the last two checkpoints of a run.
    pub last_interval: Option<Duration>,
    /// Time at which the last checkpoint became durable.
    pub last_success: Option<SystemTime>,
}

/// A snapshot of the totals of checkpoints.
#[derive(Clone, Debug)]
pub(crate) struct CheckpointFigures {
    /// The counts.
    pub counts: CheckpointCounts,
    /// Lengths of pauses.
    pub pause: Distribution,
    /// Times from the beginning of a pause until its checkpoint was durable.
    pub durable: Distribution,
}

/// Totals of all checkpoint runs.
#[derive(Debug)]
pub(super) struct CheckpointTotals {
    /// Locked for a few additions.
    counts: Mutex<CheckpointCounts>,
    pause: Histogram,
    durable: Histogram,
}

impl Default for CheckpointTotals {
    fn default() -> Self {
        let (pause, durable) = (Histogram::new(PAUSE_US), Histogram::new(DURABLE_US));
        Self { counts: Mutex::default(), pause, durable }
    }
}

impl CheckpointTotals {
    /// Adds a checkpoint.
    pub(super) fn add(&self, taken: &TakenEpoch) {
        let mut sum = self.counts.lock();
        sum.early += u64::from(taken.early);
        sum.skipped += taken.skipped;
        sum.last_interval = taken.interval.or(sum.last_interval);
        let Ok(report) = &taken.outcome else {
            sum.failed += 1;
            return;
        };
        sum.taken += 1;
        sum.pages += report.frames;
        sum.background_pages += report.copied_after_frames;
        sum.disk_blocks += report.disk_blocks;
        sum.written_bytes += report.written_bytes;
        sum.write_waits += report.waits;
        sum.write_waited += Duration::from_micros(report.waited_us);
        sum.last_success = Some(SystemTime::now());
        let pause = Duration::from_micros(report.pause_us);
        self.pause.observe(pause);
        self.durable.observe(pause + Duration::from_secs_f64(report.write_ms.max(0.0) / 1e3));
    }

    /// Adds a checkpoint that could not even begin.
    pub(super) fn add_failed(&self) {
        self.counts.lock().failed += 1;
    }

    pub(super) fn read(&self) -> CheckpointFigures {
        let counts = *self.counts.lock();
        CheckpointFigures { counts, pause: self.pause.read(), durable: self.durable.read() }
    }
}

/// Counts of migrations from this process.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct MigrationCounts {
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Migrations that have moved the guest.
    pub completed: u64,
    /// Migrations that have failed and that no operator cancelled.
    pub failed: u64,
    /// Migrations that an operator cancelled.
    pub cancelled: u64,
}

impl MigrationCounts {
    /// Adds a migration.
    pub(super) fn add(&mut self, page: &MigrationPage) {
        self.sent_bytes += page.progress.sent_bytes;
        let cancelled = page.failure.as_ref().is_some_and(|failure| failure.cancelled);
        match page.state {
            MigrationState::Sending | MigrationState::InDoubt => {}
            MigrationState::Completed => self.completed += 1,
            MigrationState::Failed if cancelled => self.cancelled += 1,
            MigrationState::Failed => self.failed += 1,
        }
    }
}

/// All migrations from this process, and the latest one.
#[derive(Clone, PartialEq, Default, Debug)]
pub(crate) struct MigrationFigures {
    /// Counts of all, the latest included.
    pub counts: MigrationCounts,
    /// The latest one, under way or over.
    pub latest: Option<MigrationPage>,
}
