//! Devices of Firecracker that Driftline does not have. Their bodies are parsed, so that a wrong
//! body gets the same answer as from Firecracker.

use serde::Deserialize;

use crate::model::RateLimiterConfig;

/// Body of `PUT /pmem/{id}`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PmemConfig {
    /// The device's name, equal to the one in the path.
    pub id: String,
    /// The file.
    pub path_on_host: String,
    /// Whether the guest's root file system is on this device.
    #[serde(default)]
    pub root_device: bool,
    /// Whether the guest cannot write to it.
    #[serde(default)]
    pub read_only: bool,
    /// Limits of the flushes.
    pub rate_limiter: Option<RateLimiterConfig>,
}

/// Body of `PATCH /pmem/{id}`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PmemDeviceUpdateConfig {
    /// The device's name, equal to the one in the path.
    pub id: String,
    /// New limits.
    pub rate_limiter: Option<RateLimiterConfig>,
}

/// Body of `PUT /hotplug/memory`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryHotplugConfig {
    /// Largest size, in MiB.
    pub total_size_mib: usize,
    /// Unit in which the guest takes memory, in MiB.
    #[serde(default = "default_block")]
    pub block_size_mib: usize,
    /// Unit in which the host gives memory, in MiB.
    #[serde(default = "default_slot")]
    pub slot_size_mib: usize,
}

fn default_block() -> usize {
    2
}

fn default_slot() -> usize {
    128
}

/// Body of `PATCH /hotplug/memory`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryHotplugSizeUpdate {
    /// New size, in MiB.
    pub requested_size_mib: usize,
}
