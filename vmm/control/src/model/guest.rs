//! JSON of a guest's state, figures and devices, and of the requests for them.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::PathBuf;

use driftline_dirty_tracker::{PAGE_SIZE, TrackerStats};
use driftline_guest::{RunState, VmId};
use driftline_machine::tracking::TrackingMode;
use driftline_migrate::Progress;
use serde::{Deserialize, Serialize};

use driftline_machine::config::{BackendKind, GuestName, Lineage};
use driftline_machine::devices::{BalloonControl, DeviceStats};
use driftline_machine::vm::{VcpuInfo, VmInfo};

/// The guest's state, taking its jobs into account.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestState {
    /// Its vCPUs execute.
    Running,
    /// Its vCPUs are paused.
    Paused,
    /// It is being sent to another host and still runs here.
    Migrating,
    /// It has been handed over to a host that does not answer; it may or may not run there.
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
    /// All states.
    pub(crate) const ALL: [Self; 5] =
        [Self::Running, Self::Paused, Self::Migrating, Self::InDoubt, Self::Stopped];

    /// Returns the state as the command line spells it.
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

/// Answer to `GET /v1/info` for a guest.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Info {
    /// The guest's state.
    pub state: GuestState,
    /// The guest's id.
    pub vm_id: VmId,
    /// The guest's name, chosen by its operator.
    #[serde(default)]
    pub name: Option<GuestName>,
    /// The guest and checkpoint from which this guest was restored; none if it was booted.
    #[serde(default)]
    pub lineage: Option<Lineage>,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Size of guest memory, in bytes.
    pub mem_bytes: u64,
    /// Method of tracking writes.
    pub tracking: TrackingMode,
    /// The backend that runs the vCPUs.
    pub backend: BackendKind,
    /// Time since this process has had the guest, in ms.
    pub uptime_ms: u64,
    /// Whether a checkpoint run is active.
    pub checkpointing: bool,
    /// Progress of the active migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<Progress>,
    /// Number of dirty ring overruns so far.
    pub ring_overruns: u64,
    /// Figures of each vCPU.
    pub vcpu: Vec<VcpuInfo>,
    /// The dirty tracker's counters.
    pub dirty: TrackerStats,
    /// Figures of disks and network interfaces.
    #[serde(default)]
    pub devices: Vec<DeviceStats>,
    /// Store of the active checkpoint run, or of the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<PathBuf>,
    /// Interval of that run, in ms; none for a single checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_ms: Option<NonZeroU64>,
    /// Id of the process that has the guest.
    #[serde(default)]
    pub pid: u32,
    /// Version of that process's program.
    #[serde(default)]
    pub version: String,
}

/// Answer to `GET /v1/info` for a process that has no guest yet but waits for one or receives it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ArrivingInfo {
    /// Always `receiving`.
    pub state: ArrivingState,
    /// Progress of the arrival.
    pub migration: Progress,
}

impl ArrivingInfo {
    /// Creates the answer for a guest that has made this progress.
    pub fn new(migration: Progress) -> Self {
        Self { state: ArrivingState::Receiving, migration }
    }
}

/// State of a process that has no guest yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ArrivingState {
    /// The process waits for a guest, or receives it.
    Receiving,
}

/// Answer to `GET /v1/info`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum InfoPage {
    /// The answer for a guest.
    Guest(Box<Info>),
    /// The answer while there is no guest yet.
    Arriving(ArrivingInfo),
}

impl Info {
    /// Combines a machine's figures with the state that results from its jobs.
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

/// Answer to `GET /`, in Firecracker's format.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct InstanceInfo {
    /// The guest's id; empty while there is no guest.
    pub id: String,
    /// `Not started`, `Running` or `Paused`.
    pub state: String,
    /// Version of this program.
    pub vmm_version: String,
    /// Name of this program.
    pub app_name: String,
}

/// Body of `PATCH /vm`, in Firecracker's format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmRequest {
    /// The requested state.
    pub state: VmTarget,
}

/// The states that `PATCH /vm` can request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum VmTarget {
    /// Pause the vCPUs.
    Paused,
    /// Resume the vCPUs.
    Resumed,
}

/// Body of `PUT /actions`, in Firecracker's format.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ActionRequest {
    /// Name of the action, such as `InstanceStart`.
    pub action_type: String,
}

/// Answer to `GET /balloon`: Firecracker's fields, and Driftline's own.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BalloonView {
    /// Target size of the balloon, in MiB, rounded down.
    pub amount_mib: u64,
    /// Whether the guest may take memory back from the balloon rather than kill a program.
    pub deflate_on_oom: bool,
    /// Interval of the statistics of the guest's memory, in s; with 0 there are none.
    pub stats_polling_interval_s: u16,
    /// Whether the guest reports which frames are free when all memory is to be copied.
    pub free_page_hinting: bool,
    /// Whether the guest reports frames that it has freed.
    pub free_page_reporting: bool,
    /// Target size of the balloon, in bytes.
    pub target_bytes: u64,
    /// Current size of the balloon as reported by the guest, in bytes.
    pub actual_bytes: u64,
    /// Memory returned to this host so far, in bytes; memory that is returned again counts again.
    pub discarded_bytes: u64,
}

/// Answer to `GET /balloon/statistics`, in Firecracker's format.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct BalloonStatistics {
    /// Target size of the balloon, in pages of 4 KiB.
    pub target_pages: u32,
    /// Current size of the balloon as reported by the guest, in pages of 4 KiB.
    pub actual_pages: u32,
    /// Target size of the balloon, in MiB, rounded down.
    pub target_mib: u32,
    /// Current size of the balloon as reported by the guest, in MiB, rounded down.
    pub actual_mib: u32,
    /// What the guest says about its memory, by name.
    #[serde(flatten)]
    pub memory: BTreeMap<&'static str, u64>,
}

impl BalloonStatistics {
    /// Returns the statistics of a balloon, or `None` if it was configured without.
    pub(crate) fn of(balloon: &BalloonControl) -> Option<Self> {
        if balloon.statistics_interval_s() == 0 {
            return None;
        }
        let sizes = balloon.stats();
        // A balloon has less than 2^32 pages.
        let units = |bytes: u64, unit: u64| u32::try_from(bytes / unit).unwrap_or(u32::MAX);
        Some(Self {
            target_pages: units(sizes.target_bytes, PAGE_SIZE),
            actual_pages: units(sizes.actual_bytes, PAGE_SIZE),
            target_mib: units(sizes.target_bytes, 1 << 20),
            actual_mib: units(sizes.actual_bytes, 1 << 20),
            memory: balloon.statistics().values().collect(),
        })
    }
}

/// Body of `PATCH /balloon`, in Firecracker's format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonRequest {
    /// Target size of the balloon, in MiB; at most the guest's memory.
    pub amount_mib: u64,
}
