//! The JSON of a guest's state, figures and devices, and of requests for them.

use std::num::NonZeroU64;
use std::path::PathBuf;

use driftline_dirty_tracker::{TrackerStats, TrackingMode};
use driftline_guest::{RunState, VmId};
use driftline_migrate::Progress;
use serde::{Deserialize, Serialize};

use driftline_machine::config::{Backend, GuestName, Lineage};
use driftline_machine::devices::DeviceFigures;
use driftline_machine::vm::{VcpuInfo, VmInfo};

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
    /// The store of the checkpoint run that is active, or of the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<PathBuf>,
    /// The interval of that run; none of a single checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_ms: Option<NonZeroU64>,
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
            every_ms: None,
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
