//! Drives.

use serde::{Deserialize, Serialize};

use crate::model::RateLimiterConfig;

/// Whether the drive offers a flush to the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum CacheType {
    /// It does not: what the guest writes may be lost with the host.
    #[default]
    Unsafe,
    /// It does, and a flush makes the drive's content durable.
    Writeback,
}

/// How the drive's file is read and written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum FileEngineType {
    /// By io_uring.
    Async,
    /// By blocking system calls.
    #[default]
    Sync,
}

/// Body of `PUT /drives/{id}`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockDeviceConfig {
    /// The drive's name, equal to the one in the path.
    pub drive_id: String,
    /// UUID of the root partition, if the drive is the root device and has partitions.
    pub partuuid: Option<String>,
    /// Whether the guest's root file system is on this drive.
    pub is_root_device: bool,
    /// Whether the drive offers a flush.
    #[serde(default)]
    pub cache_type: CacheType,
    /// Whether the guest cannot write to it. Absent means false.
    pub is_read_only: Option<bool>,
    /// A raw image or a block device. Exactly one of this and `socket` is given.
    pub path_on_host: Option<String>,
    /// Limits of the drive.
    pub rate_limiter: Option<RateLimiterConfig>,
    /// How the file is read and written.
    pub io_engine: Option<FileEngineType>,
    /// Socket of a vhost-user backend.
    pub socket: Option<String>,
}

impl BlockDeviceConfig {
    /// Returns the drive as `GET /vm/config` shows it, with its defaults.
    pub(crate) fn in_effect(self) -> Self {
        Self {
            is_read_only: Some(self.is_read_only.unwrap_or_default()),
            rate_limiter: self.rate_limiter.and_then(RateLimiterConfig::in_effect),
            io_engine: Some(self.io_engine.unwrap_or_default()),
            ..self
        }
    }
}

/// Body of `PATCH /drives/{id}`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockDeviceUpdateConfig {
    /// The drive's name, equal to the one in the path.
    pub drive_id: String,
    /// New image or block device.
    pub path_on_host: Option<String>,
    /// New limits.
    pub rate_limiter: Option<RateLimiterConfig>,
}
