//! A disk in a configuration and on the command line.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::device_id::check_id;
use super::error::ConfigError;
use super::identity::DiskIdentity;
use super::rate_limits::{RateLimits, read_bandwidth, read_operations};
use super::spec::{SpecError, Syntax};

/// Maximum length of a drive's serial number, in bytes: the space that virtio has for it.
pub const MAX_SERIAL_BYTES: usize = 20;
/// Largest block of a disk, in bytes: a page, since Linux accepts no larger blocks.
pub(crate) const MAX_BLOCK_BYTES: u32 = 4096;

/// A disk backed by a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DiskConfig {
    /// The disk's name.
    pub id: String,
    /// A raw image or a block device. Another host may use another one, see
    /// [`HostConfig::disks`](super::HostConfig::disks).
    pub path: PathBuf,
    /// Whether the guest cannot write to it.
    pub readonly: bool,
    /// The serial number that the guest reads.
    pub serial: String,
    /// Size that the guest sees, in bytes: whole sectors of 512 bytes.
    pub bytes: u64,
    /// Block size that the guest reads, in bytes, a power of two: the best unit for reads and
    /// writes of the file.
    pub block_bytes: u32,
    /// Identity of the disk, if known. In a configuration from another host, the disk's identity on
    /// that host.
    pub identity: Option<DiskIdentity>,
    /// Limits of the bytes read and written, zeros included, and of all requests.
    pub limits: RateLimits,
}

/// A disk on the command line:
/// `path=F[,readonly][,id=NAME][,serial=TEXT][,bandwidth=SIZE][,iops=N][,identity=any][,copy]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskSpec {
    /// A raw image or a block device.
    pub path: PathBuf,
    /// Whether the guest must not write to it.
    pub readonly: bool,
    /// The disk's name.
    pub id: Option<String>,
    /// The serial number that the guest reads.
    pub serial: Option<String>,
    /// Limits of a new guest's disk.
    pub limits: RateLimits,
    /// Whether it may be another disk than the one that the guest arrives with.
    pub any_identity: bool,
    /// Whether the disk is copied with its guest, into a file that is created for it.
    pub copy: bool,
}

static DISK: Syntax = Syntax {
    device: "a disk",
    options: &[
        "path=FILE",
        "readonly",
        "id=NAME",
        "serial=TEXT",
        "bandwidth=SIZE",
        "iops=N",
        "identity=any (for receive-migration and restore)",
        "copy (for receive-migration)",
    ],
};

impl FromStr for DiskSpec {
    type Err = SpecError;

    fn from_str(s: &str) -> Result<Self, SpecError> {
        if s.split(',').next().is_some_and(|o| !o.contains('=') && o.contains(['.', '/'])) {
            return Err(SpecError::DiskPath { path: s.to_owned() });
        }
        let options = DISK.read(s)?;
        if let Some(value) = options.get("identity").filter(|value| *value != "any") {
            let option = format!("identity={value}");
            return Err(
                ConfigError::malformed("identity of a disk", option, "it can only be any").into()
            );
        }
        Ok(Self {
            path: options.require("path")?.into(),
            readonly: options.has("readonly"),
            id: options.get("id").map(check_id).transpose()?,
            serial: options.get("serial").map(check_serial).transpose()?,
            limits: RateLimits {
                bandwidth: read_bandwidth(&options, "bandwidth")?,
                operations: read_operations(&options, "iops")?,
            },
            any_identity: options.has("identity"),
            copy: options.has("copy"),
        })
    }
}

fn check_serial(serial: &str) -> Result<String, ConfigError> {
    if serial.len() > MAX_SERIAL_BYTES || !serial.bytes().all(|b| b.is_ascii_graphic()) {
        let form = format!("it has at most {MAX_SERIAL_BYTES} printable ASCII characters");
        return Err(ConfigError::malformed("serial number of a disk", serial, form));
    }
    Ok(serial.to_owned())
}

impl DiskConfig {
    /// Checks that a guest can have the disk.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let Self { id, bytes, block_bytes, .. } = self;
        check_serial(&self.serial)?;
        if *bytes == 0 || !bytes.is_multiple_of(512) {
            let (part, wanted) = (format!("disk \"{id}\""), "whole sectors of 512".to_owned());
            return Err(ConfigError::Size { part, value: *bytes, unit: "bytes", wanted });
        }
        let usable = (512..=MAX_BLOCK_BYTES).contains(block_bytes) && block_bytes.is_power_of_two();
        if !usable || !bytes.is_multiple_of(u64::from(*block_bytes)) {
            let part = format!("a block of disk \"{id}\"");
            let wanted = format!(
                "a power of two from 512 to {MAX_BLOCK_BYTES} that divides the disk's {bytes}"
            );
            let value = u64::from(*block_bytes);
            return Err(ConfigError::Size { part, value, unit: "bytes", wanted });
        }
        self.limits.check(&format!("disk \"{id}\""))?;
        self.identity.as_ref().map_or(Ok(()), DiskIdentity::check)
    }
}
