//! The identity of a disk's file on this host.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// The file's identity, whatever its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::devices) enum FileIdentity {
    /// Device number and inode number.
    Regular(u64, u64),
    /// Number of the block device.
    BlockDevice(u64),
}

/// Returns the file's identity on this host.
pub(super) fn identity_of(file: &File) -> io::Result<FileIdentity> {
    let metadata = file.metadata()?;
    Ok(match metadata.file_type().is_block_device() {
        true => FileIdentity::BlockDevice(metadata.rdev()),
        false => FileIdentity::Regular(metadata.dev(), metadata.ino()),
    })
}
