//! JSON of `/v1/checkpoint`.

use std::num::NonZeroU64;
use std::path::PathBuf;

use driftline_checkpoint::{CadenceTotals, EpochReport, TakenEpoch};
use serde::{Deserialize, Serialize};

use super::limit::UnknownName;

/// Body of `POST /v1/checkpoint`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointRequest {
    /// Absolute path of the store's directory; the server has its own working directory.
    pub store: PathBuf,
    /// Time from the start of one checkpoint to the start of the next, in ms, at least 1; without
    /// it, one checkpoint is taken.
    pub every_ms: Option<NonZeroU64>,
    /// Number of checkpoints; without it, the run continues until it is stopped.
    pub count: Option<u64>,
    /// Pause limit for one checkpoint, in ms; a checkpoint that approaches the limit is taken
    /// early.
    #[serde(default)]
    pub max_pause_ms: Option<u64>,
    /// Number of checkpoints that the store keeps, at least 1; without it, all.
    #[serde(default)]
    pub keep: Option<NonZeroU64>,
    /// Whether memory is written past the host's page cache.
    #[serde(default)]
    pub direct_io: bool,
    /// Whether the run ends when its last client (`GET /v1/checkpoint/attach`) disconnects.
    #[serde(default)]
    pub attached: bool,
    /// Whether there must be no store yet: the directory does not exist, or is empty.
    #[serde(default)]
    pub new_store: bool,
    /// Policy for disks that the guest can write to; without it, or with null, the epochs include
    /// them.
    #[serde(default)]
    pub disks: Option<DisksPolicy>,
}

impl CheckpointRequest {
    /// Returns whether the epochs include the disks that the guest can write to.
    pub fn includes_drives(&self) -> bool {
        self.disks != Some(DisksPolicy::External)
    }
}

/// What a checkpoint does with a guest's disks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DisksPolicy {
    /// The checkpoint includes the changed blocks, and `restore` restores them.
    #[default]
    Include,
    /// The checkpoint does not include them: the operator preserves them as they were at the pause.
    External,
}

impl std::str::FromStr for DisksPolicy {
    type Err = UnknownName;

    fn from_str(s: &str) -> Result<Self, UnknownName> {
        match s {
            "include" => Ok(Self::Include),
            "external" => Ok(Self::External),
            _ => Err(UnknownName {
                what: "policy for disks",
                name: s.to_owned(),
                known: "include or external",
            }),
        }
    }
}

/// Answer to `GET /v1/checkpoint?job=N&since=N&wait_ms=N`: the reports from number `since` on;
/// without `job`, those of the latest run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CheckpointPage {
    /// The run's number.
    pub job: u64,
    /// Whether there are, or will be, more reports.
    pub running: bool,
    /// Whether the run is over because the guest has ended.
    pub guest_ended: bool,
    /// The store's directory.
    pub store: PathBuf,
    /// The value of `since` for the next request.
    pub next: u64,
    /// The outcome of each attempted epoch.
    #[serde(rename = "checkpoints")]
    pub epochs: Vec<EpochOutcome>,
    /// Totals of the run so far.
    pub achieved: CadenceTotals,
    /// The requested interval, in ms; none for a single checkpoint.
    pub every_ms: Option<NonZeroU64>,
    /// Number of checkpoints that the store keeps; none if it keeps all.
    pub keep: Option<NonZeroU64>,
    /// Whether the run ends when its client disconnects.
    pub attached: bool,
    /// The outcome of the last attempted epoch.
    pub last: Option<EpochOutcome>,
}

/// The outcome of an epoch.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EpochOutcome {
    /// The epoch is stored.
    Stored(EpochLine),
    /// The epoch is not stored; the next one includes its changes. The string is the reason.
    Failed(String),
}

/// One stored epoch, which is a line of `checkpoint --json`.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct EpochLine {
    /// What the epoch has and what it cost.
    #[serde(flatten)]
    pub report: EpochReport,
    /// Delay of the epoch's start after it was due, in ms.
    pub late_ms: u64,
    /// Whether the epoch was started before it was due because much had changed.
    pub early: bool,
    /// Number of epochs before this one that were due and skipped.
    pub skipped: u64,
}

impl EpochLine {
    /// Combines a report of the checkpointer with the figures of the run's pace.
    pub fn new(report: &EpochReport, taken: &TakenEpoch) -> Self {
        Self {
            report: *report,
            late_ms: u64::try_from(taken.late.as_millis()).unwrap_or(u64::MAX),
            early: taken.early,
            skipped: taken.skipped,
        }
    }
}
