//! Properties of a disk besides its content: how it is addressed, and its identity, which is the
//! same on every host that shares the disk.
//!
//! A file's identity is its inode number and its creation time. A block device's number is valid on
//! this host only, so its identity is the maker's or volume manager's name that the kernel knows.
//! Disks without an identity are not compared.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rustix::fs::{major, minor};

use crate::config::{DiskIdentity, MAX_BLOCK_BYTES};

/// Files in which the kernel gives the names of devices: NVMe, SCSI, LVM and multipath, virtio.
const NAMES: [&str; 4] = ["wwid", "device/wwid", "dm/uuid", "serial"];

/// File in which the kernel gives the size of a device's logical blocks.
const LOGICAL: &str = "queue/logical_block_size";

/// Returns the identity of `file`, if it has one.
pub(super) fn of(file: &File) -> Option<DiskIdentity> {
    let metadata = file.metadata().ok()?;
    if metadata.file_type().is_block_device() {
        return device_name(&sysfs(metadata.rdev()));
    }
    let born = metadata.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let born_ns = born.and_then(|since| u64::try_from(since.as_nanos()).ok());
    Some(DiskIdentity::File { inode: metadata.ino(), born_ns })
}

/// Returns the preferred size in bytes for reading and writing `file`: a block device's logical
/// block size, at most a page.
pub(super) fn block_bytes(file: &File) -> u32 {
    let number = file.metadata().ok().filter(|m| m.file_type().is_block_device());
    let folder = number.map(|m| sysfs(m.rdev()));
    // The sandbox permits reading this file, but not an ioctl. A partition has its disk's value.
    let read = |at: &str| fs::read_to_string(folder.as_ref()?.join(at).join(LOGICAL)).ok();
    let text = read(".").or_else(|| read(".."));
    let bytes = text.and_then(|text| text.trim().parse::<u32>().ok());
    bytes
        .filter(|bytes| bytes.is_power_of_two())
        .map_or(512, |bytes| bytes.clamp(512, MAX_BLOCK_BYTES))
}

/// Returns the kernel's directory for the block device of this number.
fn sysfs(device: u64) -> PathBuf {
    format!("/sys/dev/block/{}:{}", major(device), minor(device)).into()
}

/// Returns the name of the device with this directory. A partition has the name of its disk with
/// the partition's number.
fn device_name(folder: &Path) -> Option<DiskIdentity> {
    let partition = fs::read_to_string(folder.join("partition")).ok();
    let whole = if partition.is_some() { folder.join("..") } else { folder.to_owned() };
    let named = |name: &&str| {
        let text = fs::read_to_string(whole.join(name)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let name = NAMES.iter().find_map(named)?;
    match partition {
        Some(number) => DiskIdentity::device(&format!("{name} partition {}", number.trim())),
        None => DiskIdentity::device(&name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_is_the_first_sysfs_name() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, partition) = (dir.path().join("sda"), dir.path().join("sda/sda2"));
        fs::create_dir_all(disk.join("device")).unwrap();
        fs::create_dir_all(&partition).unwrap();
        fs::write(partition.join("partition"), "2\n").unwrap();
        let text = |folder| device_name(folder).map(|identity| identity.to_string());
        assert_eq!((text(&disk), text(&partition)), (None, None));
        fs::write(disk.join("serial"), "\n").unwrap();
        assert_eq!(text(&disk), None, "an empty one is none");
        fs::write(disk.join("serial"), "S1\n").unwrap();
        assert_eq!(text(&disk).unwrap(), "device S1");
        fs::write(disk.join("device/wwid"), "naa.50\n").unwrap();
        assert_eq!(text(&disk).unwrap(), "device naa.50");
        assert_eq!(text(&partition).unwrap(), "device naa.50 partition 2");
    }

    #[test]
    fn identity_survives_rename_but_not_copy() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let identity = |name: &str| of(&File::open(path(name)).unwrap()).unwrap();
        fs::write(path("a"), "x").unwrap();
        fs::copy(path("a"), path("copy")).unwrap();
        let before = identity("a");
        fs::write(path("a"), "longer").unwrap();
        fs::rename(path("a"), path("b")).unwrap();
        assert_eq!(identity("b"), before);
        assert!(identity("copy").differs(&before));
    }
}
