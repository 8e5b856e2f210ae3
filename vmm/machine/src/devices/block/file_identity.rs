//! The identity of a disk's file on this host.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// The file's identity, whatever its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::devices) enum FileIdentity {
    /// Device number and inode number.
    Regular(u64, u64),
    /// Number of the block device.
    BlockDevice(u64),
}

impl FileIdentity {
    /// Returns the identity of the file with this `metadata`.
    fn of(metadata: &Metadata) -> Self {
        match metadata.file_type().is_block_device() {
            true => Self::BlockDevice(metadata.rdev()),
            false => Self::Regular(metadata.dev(), metadata.ino()),
        }
    }
}

/// Returns the file's identity on this host.
pub(super) fn identity_of(file: &File) -> io::Result<FileIdentity> {
    Ok(FileIdentity::of(&file.metadata()?))
}

/// Returns whether `path` leads to `file`.
pub(super) fn is_named(file: &File, path: &Path) -> io::Result<bool> {
    Ok(identity_of(file)? == FileIdentity::of(&fs::metadata(path)?))
}

/// Fails if `path` leads to another file than `file`, or to none.
pub(super) fn require_name(file: &File, path: &Path) -> io::Result<()> {
    match is_named(file, path)? {
        true => Ok(()),
        false => Err(io::Error::other("its path leads to another file now")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_names_only_its_own_file() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("disk"), dir.path().join("link"));
        let file = File::create(&path).unwrap();
        fs::hard_link(&path, &link).unwrap();
        assert!(require_name(&file, &path).is_ok() && require_name(&file, &link).is_ok());
        fs::remove_file(&path).unwrap();
        assert_eq!(require_name(&file, &path).unwrap_err().kind(), io::ErrorKind::NotFound);
        File::create(&path).unwrap();
        assert!(!is_named(&file, &path).unwrap());
        let why = require_name(&file, &path).unwrap_err().to_string();
        assert_eq!(why, "its path leads to another file now");
    }
}
