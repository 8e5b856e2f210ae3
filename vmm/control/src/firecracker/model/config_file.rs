//! The file of `--config-file`, which configures a guest and starts it.

use std::path::PathBuf;

use serde::Deserialize;

use super::balloon::BalloonDeviceConfig;
use super::boot::{BootSourceConfig, VsockDeviceConfig};
use super::cpu::CustomCpuTemplate;
use super::drive::BlockDeviceConfig;
use super::entropy::EntropyDeviceConfig;
use super::log::{LoggerConfig, MetricsConfig};
use super::machine::MachineConfiguration;
use super::mmds::MmdsConfig;
use super::net::NetworkInterfaceConfig;
use super::refused::{MemoryHotplugConfig, PmemConfig};

/// The content of the file. Firecracker ignores unknown parts.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ConfigFile {
    /// The balloon.
    pub balloon: Option<BalloonDeviceConfig>,
    /// The drives.
    pub drives: Vec<BlockDeviceConfig>,
    /// What the guest boots.
    pub boot_source: BootSourceConfig,
    /// The custom CPU template.
    pub cpu_config: Option<CpuTemplateSource>,
    /// The log.
    pub logger: Option<LoggerConfig>,
    /// vCPUs and memory.
    pub machine_config: Option<MachineConfiguration>,
    /// The metrics.
    pub metrics: Option<MetricsConfig>,
    /// The metadata service.
    pub mmds_config: Option<MmdsConfig>,
    /// The network interfaces.
    #[serde(default)]
    pub network_interfaces: Vec<NetworkInterfaceConfig>,
    /// The vsock device.
    pub vsock: Option<VsockDeviceConfig>,
    /// The entropy device.
    pub entropy: Option<EntropyDeviceConfig>,
    /// Devices that Driftline does not have.
    #[serde(default)]
    pub pmem: Vec<PmemConfig>,
    /// A device that Driftline does not have.
    pub memory_hotplug: Option<MemoryHotplugConfig>,
}

/// A custom CPU template, or the file that contains it.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "data did not match any variant of untagged enum CustomCpuTemplateOrPath"
)]
pub enum CpuTemplateSource {
    /// The file.
    Path(PathBuf),
    /// The template.
    Template(CustomCpuTemplate),
}
