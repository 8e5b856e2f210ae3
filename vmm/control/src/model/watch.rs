//! The JSON of `/dirty/watch`.

use std::path::PathBuf;

use driftline_checkpoint::Achieved;
use driftline_machine::vm::EndReason;
use serde::{Deserialize, Serialize};

use super::checkpoint::EpochOutcome;
use super::guest::Info;
use super::migration::MigrationPage;

/// The most ranges that memory is divided into.
pub const MAX_BINS: u32 = 4096;

/// `POST /dirty/watch`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchRequest {
    /// Ranges that memory is divided into, at most; from 1 to [`MAX_BINS`], 1024 if nothing is
    /// said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bins: Option<u32>,
}

/// The answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WatchBegun {
    /// The watch's number.
    pub watch: u64,
}

/// `GET /dirty/watch?watch=N&wait_ms=N`: as soon as `wait_ms` have passed since the answer before,
/// or the guest has ended.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WatchPage {
    /// The watch's number.
    pub watch: u64,
    /// The guest's figures.
    pub info: Info,
    /// How the guest has ended, if it has: no more answers come.
    pub end: Option<EndReason>,
    /// Where it runs now, if it ended here because it moved there.
    pub moved_to: Option<String>,
    /// How long the window was, ms.
    pub window_ms: f64,
    /// Distinct frames that were written in it, by the guest or for it.
    pub frames: u64,
    /// Whole frames, bytes/s.
    pub dirty_rate_bytes_per_s: u64,
    /// Where memory is, by ascending address: what the bins divide, as if it had no holes.
    pub memory: Vec<MemoryRange>,
    /// Bytes of memory in a bin; the last one may have fewer.
    pub bin_bytes: u64,
    /// Distinct frames that were written in the window, in each bin.
    pub bin_frames: Vec<u64>,
    /// Every vCPU in the window.
    pub vcpu: Vec<VcpuWindow>,
    /// Entries of each vCPU's dirty ring, where there are rings.
    pub ring_entries: Option<u32>,
    /// The latest migration from here.
    pub migration: Option<MigrationPage>,
    /// The latest run of checkpoints.
    pub checkpoints: Option<CheckpointGlance>,
}

/// A piece of guest memory without holes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryRange {
    /// The guest physical address at which it begins.
    pub gpa: u64,
    /// Its size.
    pub bytes: u64,
}

/// What a vCPU did in a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VcpuWindow {
    /// Frames that it made dirty, where that is known. A frame counts again for each of those who
    /// follow the guest's writes (checkpoints, a migration) whenever they begin anew, so that these
    /// can be more than the window's frames.
    pub dirtied_frames: Option<u64>,
    /// Exits to the VMM.
    pub exits: u64,
    /// Of these, exits because the dirty ring was full.
    pub ring_full_exits: u64,
    /// The most entries that its ring had when it was emptied, in the last second, where it has
    /// one.
    pub ring_peak_entries: Option<u64>,
    /// How long it was held back, ms.
    pub held_ms: u64,
}

/// A run of checkpoints as somebody sees it who only looks on.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CheckpointGlance {
    /// The run's number.
    pub job: u64,
    /// It is under way.
    pub running: bool,
    /// Where the epochs go.
    pub store: PathBuf,
    /// What the run has come to so far.
    pub achieved: Achieved,
    /// What became of the last epoch.
    pub last: Option<EpochOutcome>,
}
