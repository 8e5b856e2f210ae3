//! A guest with a beginning and an end, as the command line and the API see it.

use std::sync::Arc;
use std::time::Duration;

use driftline_guest::{Guest, RunState, VmId};
use serde::{Deserialize, Serialize};

use crate::config::{GuestName, Lineage, MachineConfig};
use crate::devices::{BalloonControl, DeviceFigures};
pub use crate::end_reason::EndReason;

/// One vCPU's share of what `info` reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VcpuInfo {
    /// Exits to the VMM since the start.
    pub exits: u64,
    /// Of these, exits because the dirty ring was full.
    pub ring_full_exits: u64,
    /// How long it was held back by migrations that it outran, ms.
    #[serde(default)]
    pub held_ms: u64,
    /// The most entries that its dirty ring had when it was emptied, in the last second; none
    /// without a ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring_peak_entries: Option<u64>,
}

/// What `info` reports.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmInfo {
    /// The guest's identity.
    pub vm_id: VmId,
    /// The name that its operator gave it.
    pub name: Option<GuestName>,
    /// Which guest's checkpoint it began as, if it did.
    pub lineage: Option<Lineage>,
    /// Whether it runs.
    pub state: RunState,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Guest memory in bytes.
    pub mem_bytes: u64,
    /// How writes are tracked.
    pub tracking: driftline_dirty_tracker::TrackingMode,
    /// What runs the vCPUs.
    pub backend: crate::config::Backend,
    /// How long the VMM has had this guest, ms.
    pub uptime_ms: u64,
    /// Dirty ring overruns so far (I6).
    pub ring_overruns: u64,
    /// Per vCPU.
    pub vcpu: Vec<VcpuInfo>,
    /// The dirty tracker's counters.
    pub dirty: driftline_dirty_tracker::TrackerStats,
    /// Disks and network interfaces.
    pub devices: Vec<DeviceFigures>,
}

/// A guest that can also be looked at and waited for.
///
/// A new one is paused: `Guest::resume` starts it.
pub trait Vm: Guest {
    /// The configuration that it was made from.
    fn machine_config(&self) -> &MachineConfig;

    /// A snapshot of its figures.
    fn info(&self) -> VmInfo;

    /// Its balloon, if it has one.
    fn balloon(&self) -> Option<&BalloonControl>;

    /// Blocks until the guest has ended, or `timeout` has passed (`None`).
    fn wait_end(&self, timeout: Option<Duration>) -> Option<EndReason>;
}

/// The machine that the command line, the API and the jobs share.
pub type SharedVm = Arc<dyn Vm>;
