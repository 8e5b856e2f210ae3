//! The JSON that crosses the API socket, for the server and for the command line that is its client.
//!
//! Numbers have their unit in their name. Requests refuse fields that they do not know, so that a
//! misspelt option is not silently a default.

use std::num::NonZeroU64;
use std::path::PathBuf;

use driftline_checkpoint::{Achieved, EpochReport, Taken};
use driftline_dirty_tracker::{TrackerStats, TrackingMode};
use driftline_guest::{RunState, VmId};
use driftline_migrate::{
    Compression, CopyDrives, MAX_CONNECTIONS, MIN_BANDWIDTH, Phase, Progress, Resolution,
    SendReport, TimeoutStrategy,
};
use serde::{Deserialize, Serialize};

use crate::config::{Backend, GuestName, Lineage};
use crate::devices::DeviceFigures;
use crate::vm::{VcpuInfo, VmInfo};

/// What the guest is doing, jobs included.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestState {
    /// Its vCPUs execute.
    Running,
    /// They stand still.
    Paused,
    /// It is being sent to another host, and still is here.
    Migrating,
    /// It has been handed over to a host that does not answer: it may or may not run there.
    InDoubt,
    /// It has ended here.
    Stopped,
}

impl From<RunState> for GuestState {
    fn from(state: RunState) -> Self {
        match state {
            RunState::Running => Self::Running,
            RunState::Paused => Self::Paused,
            RunState::Stopped => Self::Stopped,
        }
    }
}

impl GuestState {
    /// The state in the words of the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Migrating => "migrating",
            Self::InDoubt => "in-doubt",
            Self::Stopped => "stopped",
        }
    }
}

/// `GET /info`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Info {
    /// What the guest is doing.
    pub state: GuestState,
    /// Its id.
    pub vm_id: VmId,
    /// The name that its operator gave it.
    #[serde(default)]
    pub name: Option<GuestName>,
    /// Which guest's checkpoint it began as; none of a guest that was booted.
    #[serde(default)]
    pub lineage: Option<Lineage>,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Guest memory.
    pub mem_bytes: u64,
    /// How writes are tracked.
    pub tracking: TrackingMode,
    /// What runs the vCPUs.
    pub backend: Backend,
    /// How long this process has had the guest.
    pub uptime_ms: u64,
    /// Whether checkpoints are being taken.
    pub checkpointing: bool,
    /// How the migration goes that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<Progress>,
    /// Dirty ring overruns so far.
    pub ring_overruns: u64,
    /// Per vCPU.
    pub vcpu: Vec<VcpuInfo>,
    /// The dirty tracker's counters.
    pub dirty: TrackerStats,
    /// What disks and network interfaces have done.
    #[serde(default)]
    pub devices: Vec<DeviceFigures>,
    /// Where the checkpoints go that are being taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<PathBuf>,
    /// The process that has the guest.
    #[serde(default)]
    pub pid: u32,
    /// The version of its program.
    #[serde(default)]
    pub version: String,
}

/// `GET /info` of a process that has no guest yet, but waits for one or is receiving it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ArrivingInfo {
    /// Always so.
    pub state: ArrivingState,
    /// How far that is.
    pub migration: Progress,
}

impl ArrivingInfo {
    /// Of a guest that is so far.
    pub fn new(migration: Progress) -> Self {
        Self { state: ArrivingState::Receiving, migration }
    }
}

/// What a process does that has no guest yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ArrivingState {
    /// It waits for one, or is receiving it.
    Receiving,
}

/// What `GET /info` answers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum InfoPage {
    /// There is a guest.
    Guest(Box<Info>),
    /// There is none yet.
    Arriving(ArrivingInfo),
}

impl Info {
    /// A machine's figures, and what the jobs on it make of its state.
    pub fn new(vm: VmInfo, state: GuestState, checkpointing: bool) -> Self {
        Self {
            state,
            vm_id: vm.vm_id,
            name: vm.name,
            lineage: vm.lineage,
            vcpus: vm.vcpus,
            mem_bytes: vm.mem_bytes,
            tracking: vm.tracking,
            backend: vm.backend,
            uptime_ms: vm.uptime_ms,
            checkpointing,
            migration: None,
            ring_overruns: vm.ring_overruns,
            vcpu: vm.vcpu,
            dirty: vm.dirty,
            devices: vm.devices,
            store: None,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// `GET /`, as Firecracker has it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InstanceInfo {
    /// The guest's identity; empty while there is none.
    pub id: String,
    /// `Not started`, `Running` or `Paused`.
    pub state: String,
    /// This program's version.
    pub vmm_version: String,
    /// This program's name.
    pub app_name: String,
}

/// `PATCH /vm`, as Firecracker has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmRequest {
    /// What to do.
    pub state: VmTarget,
}

/// The states that `PATCH /vm` can ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum VmTarget {
    /// Stop the vCPUs.
    Paused,
    /// Let them run.
    Resumed,
}

/// `PUT /actions`, as Firecracker has it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActionRequest {
    /// `InstanceStart` and so on.
    pub action_type: String,
}

/// `GET /balloon`, as Firecracker has it, and our own beside it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BalloonView {
    /// What shall be in it, in MiB, rounded down.
    pub amount_mib: u64,
    /// The guest may take memory back from it rather than kill a program.
    pub deflate_on_oom: bool,
    /// Statistics are not polled: 0.
    pub stats_polling_interval_s: u16,
    /// The guest says which frames are free when all memory is to be copied.
    pub free_page_hinting: bool,
    /// The guest reports what it has freed.
    pub free_page_reporting: bool,
    /// What shall be in it.
    pub target_bytes: u64,
    /// What the guest says is in it.
    pub actual_bytes: u64,
    /// What has been given back to this host so far, memory given back again counted again.
    pub discarded_bytes: u64,
}

/// `PATCH /balloon`, as Firecracker has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonRequest {
    /// What shall be in it, in MiB: at most the guest's memory.
    pub amount_mib: u64,
}

/// `GET /machine-config`, as Firecracker has it, and our own beside it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MachineConfigView {
    /// Number of vCPUs.
    pub vcpu_count: u8,
    /// Guest memory in MiB, rounded down.
    pub mem_size_mib: u64,
    /// No two vCPUs are threads of one core.
    pub smt: bool,
    /// Whether writes are tracked.
    pub track_dirty_pages: bool,
    /// Guest memory exactly.
    pub mem_bytes: u64,
    /// How writes are tracked.
    pub tracking: TrackingMode,
    /// What runs the vCPUs.
    pub backend: Backend,
}

/// Any refusal.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FaultMessage {
    /// What is wrong, as a sentence.
    pub fault_message: String,
}

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
    /// What becomes of disks that the guest can write to; without it, or with null, they are in the epochs.
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

/// The answer to `POST /checkpoint` and `POST /migration`: what has been begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct JobBegun {
    /// The job's number: `GET` and `DELETE` with `job=N` mean this one and no later one.
    pub job: u64,
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
    /// How often the guest or one of its devices waited to write to a frame that was kept as it was.
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

/// `POST /migration`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationRequest {
    /// Where a driftline waits: `tcp:HOST:PORT`.
    pub to: String,
    /// The pause that the guest may notice.
    #[serde(default = "default_downtime_ms")]
    pub downtime_ms: u64,
    /// Time for copying while the guest runs.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: u64,
    /// What to do when that has passed.
    #[serde(default)]
    pub timeout_strategy: TimeoutStrategy,
    /// Bytes/s at most for copying while the guest runs; without it, as fast as it goes.
    #[serde(default)]
    pub max_bandwidth_bytes_per_s: Option<u64>,
    /// Connections that share in the sending of memory.
    #[serde(default = "one")]
    pub connections: u32,
    /// How contents are made smaller where that wins.
    #[serde(default)]
    pub compression: Compression,
    /// Whether both sides compare a digest of all memory in the pause.
    #[serde(default)]
    pub verify: bool,
    /// Disks that go along: "none", "all" or {"named": [..]}.
    #[serde(default)]
    pub copy_disks: CopyDrives,
    /// Whether vCPUs that outrun the link are held back; they are where nothing is said.
    #[serde(default = "default_throttle")]
    pub throttle: bool,
}

/// The longest downtime target that makes sense: an hour.
pub const MAX_DOWNTIME_MS: u64 = 3_600_000;
/// The longest time for copying: thirty days.
pub const MAX_TIMEOUT_S: u64 = 30 * 24 * 3600;

impl MigrationRequest {
    /// Refuses times that nobody means.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Self { downtime_ms, timeout_s, max_bandwidth_bytes_per_s: bandwidth, .. } = self;
        if *downtime_ms > MAX_DOWNTIME_MS {
            return Err(format!("downtime_ms is {downtime_ms}; it is at most {MAX_DOWNTIME_MS}"));
        }
        if *timeout_s > MAX_TIMEOUT_S {
            return Err(format!("timeout_s is {timeout_s}; it is at most {MAX_TIMEOUT_S}"));
        }
        if !(1..=MAX_CONNECTIONS).contains(&self.connections) {
            return Err(format!(
                "connections is {}; it is 1 to {MAX_CONNECTIONS}",
                self.connections
            ));
        }
        if let Some(bandwidth) = bandwidth.filter(|b| *b < MIN_BANDWIDTH) {
            return Err(format!(
                "max_bandwidth_bytes_per_s is {bandwidth}; it is at least {MIN_BANDWIDTH}"
            ));
        }
        Ok(())
    }
}

fn one() -> u32 {
    1
}

fn default_downtime_ms() -> u64 {
    300
}

fn default_throttle() -> bool {
    true
}

fn default_timeout_s() -> u64 {
    3600
}

/// `GET /migration?job=N&wait_ms=N`: at once if it is over, else then, or when the wait is; without
/// `job`, the latest.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MigrationPage {
    /// The migration's number.
    pub job: u64,
    /// How it stands.
    pub state: MigrationState,
    /// Where to.
    pub to: String,
    /// What has been done so far.
    pub progress: Progress,
    /// What was done, once it is completed.
    pub report: Option<SendReport>,
    /// Why it has failed, once it has.
    pub failure: Option<MigrationFailure>,
}

/// How a migration stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationState {
    /// Under way; the guest is here.
    Sending,
    /// Handed over to a host that does not answer.
    InDoubt,
    /// The guest is there, or the operator has resolved that it shall not run here.
    Completed,
    /// The guest is here.
    Failed,
}

/// Why a migration has failed, and where that leaves the guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MigrationFailure {
    /// As a sentence, with phase and place.
    pub message: String,
    /// Because someone cancelled it.
    pub cancelled: bool,
    /// In which phase.
    pub phase: Phase,
    /// Where the guest is.
    pub guest: GuestWhere,
}

/// Where the guest of a failed migration is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestWhere {
    /// Here, as before.
    Here,
    /// Here, but it could not be resumed.
    PausedHere,
    /// Nowhere: it has ended here.
    Ended,
}

/// `POST /migration/resolve`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolveRequest {
    /// Where the guest shall be.
    pub action: Resolution,
}
