//! Requests about the machine as a whole, and its whole configuration.

use serde::{Deserialize, Serialize};

use super::balloon::BalloonDeviceConfig;
use super::boot::{BootSourceConfig, VsockDeviceConfig};
use super::drive::BlockDeviceConfig;
use super::entropy::EntropyDeviceConfig;
use super::machine::MachineConfiguration;
use super::mmds::MmdsConfig;
use super::net::NetworkInterfaceConfig;

/// An action of `PUT /actions`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub enum ActionType {
    /// Writes the metrics.
    FlushMetrics,
    /// Starts the guest.
    InstanceStart,
    /// Sends Ctrl-Alt-Del to the guest.
    SendCtrlAltDel,
}

/// Body of `PUT /actions`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActionBody {
    /// The action.
    pub action_type: ActionType,
}

/// A state that `PATCH /vm` requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub enum TargetState {
    /// vCPUs do not execute.
    Paused,
    /// vCPUs execute.
    Resumed,
}

/// Body of `PATCH /vm`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "struct Vm")]
pub struct VmStateChange {
    /// The requested state.
    pub state: TargetState,
}

/// Answer to `GET /vm/config`. Firecracker shows absent parts as null, and never the template, the
/// log and the metrics.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct VmmConfig {
    /// The balloon.
    pub balloon: Option<BalloonDeviceConfig>,
    /// The drives, in the guest's order.
    pub drives: Vec<BlockDeviceConfig>,
    /// What the guest boots; empty if nothing was configured.
    pub boot_source: BootSourceConfig,
    /// Always null.
    pub cpu_config: Option<()>,
    /// Always null.
    pub logger: Option<()>,
    /// vCPUs and memory.
    pub machine_config: MachineConfiguration,
    /// Always null.
    pub metrics: Option<()>,
    /// The metadata service.
    pub mmds_config: Option<MmdsConfig>,
    /// The network interfaces, in the guest's order.
    pub network_interfaces: Vec<NetworkInterfaceConfig>,
    /// The vsock device.
    pub vsock: Option<VsockDeviceConfig>,
    /// The entropy device.
    pub entropy: Option<EntropyDeviceConfig>,
    /// Always empty.
    pub pmem: [(); 0],
    /// Always null.
    pub memory_hotplug: Option<()>,
}
