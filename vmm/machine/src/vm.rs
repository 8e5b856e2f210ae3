//! A guest that starts and ends, as the command line and the API see it.

use std::sync::Arc;
use std::time::Duration;

use driftline_guest::{Guest, GuestError, RunState, VmId};
use serde::{Deserialize, Serialize};

use crate::config::{GuestName, Lineage, MachineConfig};
use crate::devices::{
    BalloonControl, DeviceStats, DiskFileControl, MachineCounts, RateLimitControl,
};
pub use crate::end_reason::EndReason;
use crate::histogram::Distribution;
use crate::memory::RestoreFigures;

/// The part of `info` about one vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VcpuInfo {
    /// Number of exits to the VMM since the start.
    pub exits: u64,
    /// Number of those exits that were caused by a full dirty ring.
    pub ring_full_exits: u64,
    /// Time for which the vCPU was throttled for migrations to converge, in ms.
    pub throttled_ms: u64,
    /// Highest number of entries found in the vCPU's dirty ring when it was harvested, in the last
    /// second; `None` without a ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring_peak_entries: Option<u64>,
}

/// The report of `info`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmInfo {
    /// The guest's identity.
    pub vm_id: VmId,
    /// The name that its operator gave it.
    pub name: Option<GuestName>,
    /// The checkpoint that the guest began as, if any.
    pub lineage: Option<Lineage>,
    /// The guest's run state.
    pub state: RunState,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Guest memory in bytes.
    pub mem_bytes: u64,
    /// The method that tracks the guest's writes.
    pub tracking: crate::tracking::TrackingMode,
    /// The backend that runs the vCPUs.
    pub backend: crate::config::BackendKind,
    /// Time for which this VMM has had the guest, in ms.
    pub uptime_ms: u64,
    /// Number of dirty ring overruns so far (I6).
    pub ring_overruns: u64,
    /// One entry per vCPU.
    pub vcpu: Vec<VcpuInfo>,
    /// The dirty tracker's counters.
    pub dirty: driftline_dirty_tracker::TrackerStats,
    /// Figures of disks and network interfaces.
    pub devices: Vec<DeviceStats>,
}

/// Figures for metrics that `info` does not have.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Timings {
    /// Times of collections of dirty frames: harvest, reprotect and insertion together. `None` if
    /// no thread collects.
    pub collections: Option<Distribution>,
    /// The lazy restore, if there was one.
    pub restore: Option<RestoreFigures>,
}

/// A guest that can also report on itself and be waited for.
///
/// A new guest is paused: `Lifecycle::resume` starts it.
pub trait Vm: Guest {
    /// Returns the configuration that the guest was built from.
    fn machine_config(&self) -> &MachineConfig;

    /// Returns a snapshot of the guest's figures.
    fn info(&self) -> VmInfo;

    /// Sends every vCPU a non-maskable interrupt.
    ///
    /// # Errors
    ///
    /// The guest has ended, or its backend has no interrupts.
    fn send_nmi(&self) -> Result<(), GuestError>;

    /// Presses Ctrl-Alt-Del, by which most guests shut down in order.
    ///
    /// # Errors
    ///
    /// The guest has no keyboard, or has not read what was pressed before.
    fn press_ctrl_alt_del(&self) -> Result<(), GuestError>;

    /// Returns a snapshot of the guest's timings.
    fn timings(&self) -> Timings;

    /// Returns the handles for the rate limits of the devices that can have some: disks, network
    /// interfaces and the source of randomness.
    fn rate_limits(&self) -> &[RateLimitControl];

    /// Returns the handles by which the guest's disks get other files.
    fn disk_files(&self) -> &[DiskFileControl];

    /// Returns the counters of the guest's parts that [`info`](Self::info) does not show.
    fn counts(&self) -> MachineCounts;

    /// Returns the guest's balloon, if it has one.
    fn balloon(&self) -> Option<&BalloonControl>;

    /// Blocks until the guest has ended, or until `timeout` has passed (then `None`).
    fn wait_end(&self, timeout: Option<Duration>) -> Option<EndReason>;
}

/// The guest that the command line, the API and the jobs share.
pub type SharedVm = Arc<dyn Vm>;
