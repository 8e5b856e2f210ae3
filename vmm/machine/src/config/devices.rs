//! The devices of a machine in its configuration and on the command line.

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::balloon::{self, BalloonConfig};
use super::device_id::check_id;
use super::disk::DiskConfig;
use super::error::{ConfigError, in_range};
use super::net::{NetConfig, VsockConfig};
use super::rate_limits::RateLimits;

/// Maximum number of virtio devices: there are no interrupts for more.
pub const MAX_DEVICES: usize = 16;

/// A virtio device. Its position in the list decides its register address and its interrupt.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceConfig {
    /// A disk.
    Disk(DiskConfig),
    /// A source of randomness; a machine has at most one.
    Rng(RngConfig),
    /// A network interface.
    Net(NetConfig),
    /// The vsock device; a machine has at most one.
    Vsock(VsockConfig),
    /// A balloon.
    Balloon(BalloonConfig),
}

/// A source of randomness.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RngConfig {
    /// Limits of the random bytes and of the requests.
    pub limits: RateLimits,
}

impl DeviceConfig {
    /// Returns the name of the device, unique within the machine.
    pub fn id(&self) -> &str {
        match self {
            Self::Disk(disk) => &disk.id,
            Self::Rng(_) => "rng",
            Self::Net(net) => &net.id,
            Self::Vsock(_) => "vsock",
            Self::Balloon(_) => "balloon",
        }
    }
}

/// Checks that a host could run a guest of this memory with these devices.
pub(super) fn check(devices: &[DeviceConfig], mem_bytes: u64) -> Result<(), ConfigError> {
    in_range("virtio devices", devices.len() as u64, 0, MAX_DEVICES as u64)?;
    let twice = |what, name: &str| ConfigError::Twice { what, name: name.to_owned() };
    let (mut ids, mut taps) = (HashSet::new(), HashSet::new());
    for device in devices {
        check_id(device.id())?;
        if !ids.insert(device.id()) {
            return Err(twice("devices with the name", device.id()));
        }
        match device {
            DeviceConfig::Disk(disk) => disk.check()?,
            DeviceConfig::Net(net) => {
                net.check()?;
                if !taps.insert(&net.tap) {
                    return Err(twice("network interfaces over the tap", &net.tap));
                }
            }
            DeviceConfig::Vsock(vsock) => vsock.check()?,
            DeviceConfig::Balloon(config) => balloon::check(config, mem_bytes)?,
            DeviceConfig::Rng(rng) => rng.limits.check("the source of randomness")?,
        }
    }
    Ok(())
}

/// Returns the paths in `devices`, which must be UTF-8 to be encoded.
pub(super) fn paths(devices: &[DeviceConfig]) -> impl Iterator<Item = &Path> {
    devices.iter().filter_map(|device| match device {
        DeviceConfig::Disk(disk) => Some(disk.path.as_path()),
        DeviceConfig::Vsock(vsock) => Some(vsock.uds.as_path()),
        DeviceConfig::Net(_) | DeviceConfig::Rng(_) | DeviceConfig::Balloon(_) => None,
    })
}

/// Returns the disks of `devices`, in order.
pub fn disks(devices: &[DeviceConfig]) -> impl Iterator<Item = &DiskConfig> {
    devices.iter().filter_map(|device| match device {
        DeviceConfig::Disk(disk) => Some(disk),
        _ => None,
    })
}

/// Returns the disks of `devices` as [`disks`] does, mutably.
pub(crate) fn disks_mut(devices: &mut [DeviceConfig]) -> impl Iterator<Item = &mut DiskConfig> {
    devices.iter_mut().filter_map(|device| match device {
        DeviceConfig::Disk(disk) => Some(disk),
        _ => None,
    })
}
