//! What the guest boots, its serial port and its vsock device.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::model::TokenBucketConfig;

/// Body of `PUT /boot-source`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootSourceConfig {
    /// The kernel's file.
    pub kernel_image_path: String,
    /// The initial RAM disk's file.
    pub initrd_path: Option<String>,
    /// The kernel's command line. Absent, Firecracker's default applies.
    pub boot_args: Option<String>,
}

/// Body of `PUT /serial`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SerialConfig {
    /// Regular file for the serial port's output. Others are refused at the start.
    pub serial_out_path: Option<PathBuf>,
    /// Limit of the output.
    pub rate_limiter: Option<TokenBucketConfig>,
}

/// Body of `PUT /vsock`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockDeviceConfig {
    /// Deprecated, without effect, and not shown.
    #[serde(default, skip_serializing)]
    pub vsock_id: Option<String>,
    /// The guest's context ID.
    pub guest_cid: u32,
    /// The host's unix socket.
    pub uds_path: String,
}
