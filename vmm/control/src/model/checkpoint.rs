//! The JSON of `/checkpoint`.

use std::num::NonZeroU64;
use std::path::PathBuf;

use driftline_checkpoint::{Achieved, EpochReport, Taken};
use serde::{Deserialize, Serialize};

/// `POST /checkpoint`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointRequest {
    /// The store's directory, absolute: the server has its own working directory.
    pub store: PathBuf,
    /// Time from the beginning of one checkpoint to the next, at least 1; without it there is one.
    pub every_ms: Option<NonZeroU64>,
    /// How many; without it, until told to stop.
    pub count: Option<u64>,
    /// How long the guest may stand still for one; one that nears that comes early.
    #[serde(default)]
    pub max_pause_ms: Option<u64>,
    /// How many are kept in the store, at least 1; without it, all.
    #[serde(default)]
    pub keep: Option<NonZeroU64>,
    /// Memory is written past the host's page cache.
    #[serde(default)]
    pub direct_io: bool,
    /// The run ends when nobody holds it (`GET /checkpoint/hold`) any more.
    #[serde(default)]
    pub attached: bool,
    /// There must be no store yet: the directory does not exist, or is empty.
    #[serde(default)]
    pub new_store: bool,
    /// What becomes of disks that the guest can write to; without it, or with null, they are in the
    /// epochs.
    #[serde(default)]
    pub disks: Option<DisksPolicy>,
}

/// What becomes of a guest's disks when it is checkpointed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DisksPolicy {
    /// What changed of them is in the checkpoint, and `restore` brings it back.
    #[default]
    Epoch,
    /// They are not in the checkpoint: the operator keeps them as they were at its pause.
    External,
}

impl std::str::FromStr for DisksPolicy {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "epoch" => Ok(Self::Epoch),
            "external" => Ok(Self::External),
            _ => Err(format!("\"{s}\" is not a policy for disks; use epoch or external")),
        }
    }
}

/// `GET /checkpoint?job=N&since=N&wait_ms=N`: the reports from number `since` on; without `job`, of
/// the latest run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CheckpointPage {
    /// The run's number.
    pub job: u64,
    /// There is, or will be, more.
    pub running: bool,
    /// It is over because the guest has ended.
    pub guest_ended: bool,
    /// Where the epochs go.
    pub store: PathBuf,
    /// What to ask for next.
    pub next: u64,
    /// What became of each epoch tried.
    pub epochs: Vec<EpochOutcome>,
    /// What the run has come to so far.
    pub achieved: Achieved,
    /// The interval that was asked for; none of a single one.
    pub every_ms: Option<NonZeroU64>,
    /// How many are kept; none if all are.
    pub keep: Option<NonZeroU64>,
    /// It ends when its client does.
    pub attached: bool,
    /// What became of the last one tried.
    pub last: Option<EpochOutcome>,
}

/// What became of an epoch.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EpochOutcome {
    /// It is durable.
    Stored(EpochLine),
    /// It is not; what changed will be in the next one.
    Failed(String),
}

/// One stored epoch: a line of `checkpoint --json`.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct EpochLine {
    /// Its number.
    pub epoch: u64,
    /// Frames in it, of memory.
    pub frames: u64,
    /// Blocks in it, of disks: 4 KiB each.
    pub disk_blocks: u64,
    /// How long the guest stood still.
    pub pause_us: u64,
    /// Those of its frames that were copied while the guest ran on after the pause.
    pub behind_frames: u64,
    /// How often the guest or one of its devices waited to write to a frame that was kept as it
    /// was.
    pub waits: u64,
    /// For how long one of them did.
    pub waited_us: u64,
    /// From the end of the pause until it was durable.
    pub write_ms: f64,
    /// Its size.
    pub written_bytes: u64,
    /// Whether it survives a crash of the host.
    pub durable: bool,
    /// How long after it was due it was begun.
    pub late_ms: u64,
    /// It was begun before it was due, because much had changed.
    pub early: bool,
    /// Epochs that were due before it and were left out.
    pub skipped: u64,
}

impl EpochLine {
    /// A report of the checkpointer, with what its pace adds.
    pub fn new(report: &EpochReport, taken: &Taken) -> Self {
        Self {
            epoch: report.epoch,
            frames: report.frames,
            disk_blocks: report.disk_blocks,
            pause_us: report.pause_us,
            behind_frames: report.behind_frames,
            waits: report.waits,
            waited_us: report.waited_us,
            write_ms: report.write_ms,
            written_bytes: report.written_bytes,
            durable: report.durable,
            late_ms: u64::try_from(taken.late.as_millis()).unwrap_or(u64::MAX),
            early: taken.early,
            skipped: taken.skipped,
        }
    }
}
