//! JSON of a guest's configuration: the answer to `GET /vm/config`, which `driftline run
//! --config-file` reads too. Names are Firecracker's where Firecracker has the same thing.

use std::path::PathBuf;

use driftline_machine::config::{
    BackendKind, BalloonConfig, Boot, CpuConfig, DeviceConfig, DiskConfig, GuestName, MacAddr,
    MachineConfig, NetConfig, VsockConfig,
};
use driftline_machine::tracking::TrackingMode;
use serde::{Deserialize, Serialize};

use super::rate_limits::{RateLimiterConfig, checked};

/// A guest's configuration. An answer has every value of the guest; a file may omit values that
/// have a default.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct VmConfig {
    /// The guest's name, chosen by its operator.
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    pub name: Option<GuestName>,
    /// The image that the guest boots.
    pub boot_source: BootSource,
    /// vCPUs, memory and tracking.
    pub machine_config: MachineSettings,
    /// The disks, in the guest's order.
    pub drives: Vec<DriveSettings>,
    /// The network interfaces, in the guest's order.
    pub network_interfaces: Vec<InterfaceSettings>,
    /// The vsock device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockSettings>,
    /// The source of randomness.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy: Option<EntropySettings>,
    /// The balloon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonSettings>,
}

/// The image that a guest boots: a kernel, or the embedded guest.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootSource {
    /// The embedded guest's spec, such as `payload,ws=64M`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<String>,
    /// The kernel's file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_image_path: Option<PathBuf>,
    /// The initial RAM disk's file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd_path: Option<PathBuf>,
    /// The kernel's command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_args: Option<String>,
    /// Whether nothing is added to the command line.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bare_boot_args: bool,
}

/// vCPUs, memory and tracking; the answer to `GET /machine-config` too.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MachineSettings {
    /// Number of vCPUs.
    pub vcpu_count: Option<u8>,
    /// Size of guest memory, in MiB, rounded down.
    pub mem_size_mib: Option<u64>,
    /// Whether two vCPUs are the threads of one core.
    pub smt: bool,
    /// Whether writes are tracked.
    pub track_dirty_pages: Option<bool>,
    /// Size of guest memory, in bytes.
    pub mem_bytes: Option<u64>,
    /// Method of tracking writes.
    pub tracking: Option<TrackingMode>,
    /// Entries of each vCPU's dirty ring.
    pub ring_entries: Option<u32>,
    /// The backend that runs the vCPUs.
    pub backend: Option<BackendKind>,
    /// The CPU model, such as `host,-cx16`.
    #[serde(with = "text")]
    pub cpu: Option<CpuConfig>,
}

/// A disk.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveSettings {
    /// The disk's name.
    #[serde(default)]
    pub drive_id: Option<String>,
    /// A raw image or a block device.
    pub path_on_host: PathBuf,
    /// Always false: the kernel's command line names the root device.
    #[serde(default)]
    pub is_root_device: bool,
    /// Whether the guest cannot write to it.
    #[serde(default)]
    pub is_read_only: bool,
    /// The serial number that the guest reads.
    #[serde(default)]
    pub serial: Option<String>,
    /// Size of the file, in bytes.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// Limits of the bytes read and written, and of all requests.
    #[serde(default, deserialize_with = "checked", skip_serializing_if = "Option::is_none")]
    pub rate_limiter: Option<RateLimiterConfig>,
}

/// A network interface.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InterfaceSettings {
    /// The interface's name.
    #[serde(default)]
    pub iface_id: Option<String>,
    /// The tap.
    pub host_dev_name: String,
    /// The address that the guest sees.
    #[serde(default, with = "text")]
    pub guest_mac: Option<MacAddr>,
    /// Number of queue pairs.
    #[serde(default)]
    pub queue_pairs: Option<u8>,
    /// Limits of what the guest receives.
    #[serde(default, deserialize_with = "checked", skip_serializing_if = "Option::is_none")]
    pub rx_rate_limiter: Option<RateLimiterConfig>,
    /// Limits of what the guest sends.
    #[serde(default, deserialize_with = "checked", skip_serializing_if = "Option::is_none")]
    pub tx_rate_limiter: Option<RateLimiterConfig>,
}

/// The vsock device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockSettings {
    /// The guest's context ID.
    pub guest_cid: u32,
    /// The unix socket.
    pub uds_path: PathBuf,
}

/// The source of randomness.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntropySettings {
    /// Limits of the random bytes and of the requests.
    #[serde(default, deserialize_with = "checked", skip_serializing_if = "Option::is_none")]
    pub rate_limiter: Option<RateLimiterConfig>,
}

/// The balloon.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonSettings {
    /// Target size at the guest's start, in MiB, rounded down.
    #[serde(default)]
    pub amount_mib: Option<u64>,
    /// Target size at the guest's start, in bytes.
    #[serde(default)]
    pub target_bytes: Option<u64>,
    /// Whether the guest may take memory back from the balloon rather than kill a program.
    #[serde(default = "yes")]
    pub deflate_on_oom: bool,
    /// Whether the guest reports which frames are free when all memory is to be copied.
    #[serde(default = "yes")]
    pub free_page_hinting: bool,
    /// Whether the guest reports frames that it has freed.
    #[serde(default = "yes")]
    pub free_page_reporting: bool,
    /// Interval of the statistics of the guest's memory, in s; with 0 there are none.
    #[serde(default)]
    pub stats_polling_interval_s: u16,
}

fn yes() -> bool {
    true
}

fn is_false(value: &bool) -> bool {
    !value
}

impl From<&MachineConfig> for VmConfig {
    fn from(config: &MachineConfig) -> Self {
        let mut all = Self {
            name: config.identity.name.clone(),
            boot_source: BootSource::from(&config.boot),
            machine_config: MachineSettings::from(config),
            ..Self::default()
        };
        for device in &config.devices {
            match device {
                DeviceConfig::Disk(disk) => all.drives.push(disk.into()),
                DeviceConfig::Net(net) => all.network_interfaces.push(net.into()),
                DeviceConfig::Vsock(vsock) => all.vsock = Some(vsock.into()),
                DeviceConfig::Rng(rng) => {
                    let rate_limiter = RateLimiterConfig::shown(&rng.limits);
                    all.entropy = Some(EntropySettings { rate_limiter });
                }
                DeviceConfig::Balloon(balloon) => all.balloon = Some(balloon.into()),
            }
        }
        all
    }
}

impl From<&Boot> for BootSource {
    fn from(boot: &Boot) -> Self {
        match boot {
            Boot::Payload(spec) => Self { guest: Some(spec.clone()), ..Self::default() },
            Boot::Kernel { kernel, initrd, cmdline, bare } => Self {
                guest: None,
                kernel_image_path: Some(kernel.clone()),
                initrd_path: initrd.clone(),
                boot_args: Some(cmdline.clone()),
                bare_boot_args: *bare,
            },
        }
    }
}

impl From<&MachineConfig> for MachineSettings {
    fn from(config: &MachineConfig) -> Self {
        Self {
            vcpu_count: Some(config.vcpus),
            mem_size_mib: Some(config.mem_bytes >> 20),
            smt: config.cpu.smt,
            track_dirty_pages: Some(config.tracking != TrackingMode::None),
            mem_bytes: Some(config.mem_bytes),
            tracking: Some(config.tracking),
            ring_entries: Some(config.ring_entries),
            backend: Some(config.backend),
            cpu: Some(config.cpu.clone()),
        }
    }
}

impl From<&DiskConfig> for DriveSettings {
    fn from(disk: &DiskConfig) -> Self {
        Self {
            drive_id: Some(disk.id.clone()),
            path_on_host: disk.path.clone(),
            is_root_device: false,
            is_read_only: disk.readonly,
            serial: Some(disk.serial.clone()),
            bytes: Some(disk.bytes),
            rate_limiter: RateLimiterConfig::shown(&disk.limits),
        }
    }
}

impl From<&NetConfig> for InterfaceSettings {
    fn from(net: &NetConfig) -> Self {
        Self {
            iface_id: Some(net.id.clone()),
            host_dev_name: net.tap.clone(),
            guest_mac: Some(net.mac),
            queue_pairs: Some(net.queues),
            rx_rate_limiter: RateLimiterConfig::shown(&net.limits.receive),
            tx_rate_limiter: RateLimiterConfig::shown(&net.limits.transmit),
        }
    }
}

impl From<&VsockConfig> for VsockSettings {
    fn from(vsock: &VsockConfig) -> Self {
        Self { guest_cid: vsock.cid, uds_path: vsock.uds.clone() }
    }
}

impl From<&BalloonConfig> for BalloonSettings {
    fn from(balloon: &BalloonConfig) -> Self {
        Self {
            amount_mib: Some(balloon.bytes >> 20),
            target_bytes: Some(balloon.bytes),
            deflate_on_oom: balloon.deflate_on_oom,
            free_page_hinting: balloon.hinting,
            free_page_reporting: balloon.reporting,
            stats_polling_interval_s: balloon.statistics_interval_s,
        }
    }
}

/// Values whose JSON is their text on the command line.
mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer, T: Display>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        D: Deserializer<'de>,
        T: FromStr<Err: Display>,
    {
        let text: Option<String> = Option::deserialize(deserializer)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}
