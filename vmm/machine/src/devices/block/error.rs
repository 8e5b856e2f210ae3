//! Why a disk cannot be had.

use std::io;
use std::path::{Path, PathBuf};

use driftline_guest::VmId;

use crate::config::DiskIdentity;
use crate::sandbox::hint;

/// Why a disk cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// Its file cannot be opened.
    #[error("disk file \"{}\" cannot be opened{}: {cause}{}", path.display(), if *readonly { "" } else { " for writing" }, hint(path, cause))]
    Open {
        /// The file.
        path: PathBuf,
        /// Only for reading.
        readonly: bool,
        /// The system's answer.
        cause: io::Error,
    },
    /// It is neither a regular file nor a block device.
    #[error("disk file \"{}\" is neither a regular file nor a block device", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// It has nothing in it.
    #[error("disk file \"{}\" has 0 bytes: a disk has at least one sector of 512", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Its end would be lost on the guest.
    #[error(
        "disk file \"{}\" has {bytes} bytes, which are not whole sectors of 512: `truncate -s %512` rounds it up",
        path.display()
    )]
    Partial {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// Two disks would overwrite each other's blocks.
    #[error("disks \"{first}\" and \"{second}\" are the same file \"{}\", which only disks that are not written to can share", path.display())]
    Twice {
        /// A disk's name.
        first: String,
        /// Another disk's name.
        second: String,
        /// The file.
        path: PathBuf,
    },
    /// It is to be written over, and nobody knows whether it is the disk that the guest had.
    #[error(
        "disk \"{id}\" is to be written over, and nothing tells whether \"{}\" is the disk that the guest had: \
         --disk id={id},path={},identity=any says that it is",
        path.display(), path.display()
    )]
    Nameless {
        /// The disk's name.
        id: String,
        /// The file.
        path: PathBuf,
    },
    /// It is to be written over for a new guest, and is the disk of the guest that was
    /// checkpointed.
    #[error(
        "disk \"{id}\", in file \"{}\", {}{}",
        path.display(), why.refusal(*guest, id, *bytes), why.hint(id, path)
    )]
    Parents {
        /// The disk's name.
        id: String,
        /// The file.
        path: PathBuf,
        /// The guest whose disk it is.
        guest: VmId,
        /// Its size.
        bytes: u64,
        /// Why it is taken for that disk.
        why: ParentsDisk,
    },
    /// Another guest has it.
    #[error("{0}")]
    InUse(String),
    /// It is smaller than the disk that the guest knows.
    #[error("disk \"{id}\" has {want} bytes, and its file \"{}\" on this host has only {has}", path.display())]
    TooSmall {
        /// The disk's name.
        id: String,
        /// The file.
        path: PathBuf,
        /// Bytes that the guest knows.
        want: u64,
        /// Bytes that the file has.
        has: u64,
    },
    /// It is another disk than the guest's.
    #[error(
        "disk \"{id}\" is another one on this host: the guest comes from {theirs}, and \"{}\" is {ours} here; that it may be, as a \
         copy or on storage whose hosts number files differently, --disk id={id},path={},identity=any says here",
        path.display(), path.display()
    )]
    Another {
        /// The disk's name.
        id: String,
        /// The file.
        path: PathBuf,
        /// Which one it is where the guest comes from.
        theirs: DiskIdentity,
        /// Which one it is here.
        ours: DiskIdentity,
    },
    /// It comes along with its guest, and no file can be made for it.
    #[error("disk \"{id}\" cannot be copied to \"{}\": {why}", path.display())]
    NoCopy {
        /// The disk's name.
        id: String,
        /// Where it was to be.
        path: PathBuf,
        /// What stands against it.
        why: String,
    },
    /// No thread makes it durable.
    #[error("no thread can be started for disk \"{id}\": {cause}")]
    Thread {
        /// The disk's name.
        id: String,
        /// The system's answer.
        cause: io::Error,
    },
    /// Its writes cannot be followed.
    #[error("the writes to disk \"{id}\" cannot be followed: {cause}")]
    Untracked {
        /// The disk's name.
        id: String,
        /// What stands against it.
        cause: driftline_dirty_tracker::LayoutError,
    },
}

/// Why a file is taken for the disk of the guest that was checkpointed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ParentsDisk {
    /// It is that disk.
    Itself,
    /// It is that disk through another mount, or a copy in a snapshot of its file system.
    OrSnapshot,
    /// It is another file, at that disk's path.
    Path,
}

impl ParentsDisk {
    fn refusal(self, guest: VmId, id: &str, bytes: u64) -> String {
        match self {
            Self::Itself | Self::OrSnapshot => format!(
                "is guest {guest}'s: give the new guest a file of its own, of {bytes} bytes \
                 (--disk id={id},path=FILE), or restore that guest itself (--same-id)"
            ),
            Self::Path => format!(
                "has the path of guest {guest}'s disk: name another path (--disk id={id},path=FILE), \
                 or restore that guest itself (--same-id)"
            ),
        }
    }

    fn hint(self, id: &str, path: &Path) -> String {
        match self {
            Self::OrSnapshot => format!(
                "; if it is a copy in a snapshot of that disk's file system, --disk \
                 id={id},path={},identity=any says so",
                path.display()
            ),
            Self::Itself | Self::Path => String::new(),
        }
    }
}
