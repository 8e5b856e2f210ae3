//! JSON of `/v1/dirty/watch`.

use std::path::PathBuf;

use driftline_checkpoint::CadenceTotals;
use driftline_machine::vm::EndReason;
use serde::{Deserialize, Serialize};

use super::checkpoint::EpochOutcome;
use super::guest::Info;
use super::migration::MigrationPage;

/// Maximum number of ranges into which memory is divided.
pub const MAX_BINS: u32 = 4096;

/// Body of `POST /v1/dirty/watch`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchRequest {
    /// Maximum number of ranges into which memory is divided, from 1 to [`MAX_BINS`]; by default
    /// 1024.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bins: Option<u32>,
}

/// Answer to `POST /v1/dirty/watch`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WatchStarted {
    /// The watch's number.
    pub watch: u64,
}

/// Answer to `GET /v1/dirty/watch?watch=N&wait_ms=N`. It comes once `wait_ms` have passed since the
/// previous answer, or the guest has ended.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WatchPage {
    /// The watch's number.
    pub watch: u64,
    /// The guest's figures.
    pub info: Info,
    /// How the guest has ended. If this is set, no more answers follow.
    pub end: Option<EndReason>,
    /// Address of the host on which the guest now runs, if it ended here because it migrated.
    pub moved_to: Option<String>,
    /// Length of the window, in ms.
    pub window_ms: f64,
    /// Number of distinct frames written in the window, by the guest or on its behalf.
    pub frames: u64,
    /// Dirty rate in bytes/s, counting whole frames.
    pub dirty_rate_bytes_per_s: u64,
    /// Ranges of guest memory in ascending address order. The bins divide these ranges as if there
    /// were no holes between them.
    pub memory: Vec<MemoryRange>,
    /// Bytes of memory per bin; the last bin may have fewer.
    pub bin_bytes: u64,
    /// Number of distinct frames written in the window, for each bin.
    pub bin_frames: Vec<u64>,
    /// Figures of each vCPU in the window.
    pub vcpu: Vec<VcpuWindow>,
    /// Number of entries in each vCPU's dirty ring, if there are rings.
    pub ring_entries: Option<u32>,
    /// The latest migration from this host.
    pub migration: Option<MigrationPage>,
    /// The latest checkpoint run.
    pub checkpoints: Option<CheckpointSummary>,
}

/// A contiguous range of guest memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryRange {
    /// Guest physical address of the first byte.
    pub gpa: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// Figures of a vCPU in a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VcpuWindow {
    /// Number of frames that the vCPU dirtied, where that is known. A frame counts again for every
    /// subscriber (checkpoints, a migration) that starts a new epoch. This number can therefore
    /// exceed the window's frames.
    pub dirtied_frames: Option<u64>,
    /// Number of exits to the VMM.
    pub exits: u64,
    /// Number of those exits that were caused by a full dirty ring.
    pub ring_full_exits: u64,
    /// Maximum number of entries in the vCPU's dirty ring when it was drained, in the last second,
    /// if the vCPU has a ring.
    pub ring_peak_entries: Option<u64>,
    /// How long the vCPU was throttled, in ms.
    pub throttled_ms: u64,
}

/// Summary of a checkpoint run for an observer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CheckpointSummary {
    /// The run's number.
    pub job: u64,
    /// Whether the run is under way.
    pub running: bool,
    /// The store's directory.
    pub store: PathBuf,
    /// Totals of the run so far.
    pub achieved: CadenceTotals,
    /// The outcome of the last epoch.
    pub last: Option<EpochOutcome>,
}
