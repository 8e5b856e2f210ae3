//! Errors that keep a disk from being used.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use driftline_guest::{DriveHead, VmId};

use crate::config::DiskIdentity;
use crate::sandbox::permission_hint;

/// Error that keeps a disk from being used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The disk's file cannot be opened.
    #[error(
        "disk file \"{}\" cannot be opened{}: {cause}{}",
        path.display(),
        if *readonly { "" } else { " for writing" },
        permission_hint(path, cause)
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Whether the file was opened for reading only.
        readonly: bool,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The disk is to be used by io_uring, which this host does not offer.
    #[error("disk \"{id}\" cannot be used by io_uring: {cause}")]
    NoUring {
        /// The disk's name.
        id: String,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The path is neither a regular file nor a block device.
    #[error("disk file \"{}\" is neither a regular file nor a block device", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// The file is empty.
    #[error("disk file \"{}\" has 0 bytes: a disk has at least one sector of 512", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file's size is not a multiple of a sector, so the guest could not use its end.
    #[error(
        "disk file \"{}\" has {bytes} bytes, which are not whole sectors of 512: \
         `truncate -s %512` rounds it up",
        path.display()
    )]
    Partial {
        /// The file.
        path: PathBuf,
        /// The file's size in bytes.
        bytes: u64,
    },
    /// Two disks have the same file and would overwrite each other's blocks.
    #[error(
        "disks \"{first}\" and \"{second}\" use the same file \"{}\": only read-only disks can \
         share a file",
        path.display()
    )]
    Twice {
        /// The first disk's name.
        first: String,
        /// The second disk's name.
        second: String,
        /// The file.
        path: PathBuf,
    },
    /// The file is to be overwritten, and no identity shows that it is the guest's disk.
    #[error(
        "disk \"{id}\" would be overwritten, and no identity shows that \"{}\" is the guest's \
         disk: if it is, give --disk id={id},path={},identity=any",
        path.display(), path.display()
    )]
    Nameless {
        /// The disk's name.
        id: String,
        /// The file.
        path: PathBuf,
    },
    /// The file is to be overwritten for a new guest, but it is the disk of the guest that was
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
        /// The guest that owns the disk.
        guest: VmId,
        /// The disk's size in bytes.
        bytes: u64,
        /// Why the file is taken for that disk.
        why: ParentsDisk,
    },
    /// Another guest or program uses the file.
    #[error(
        "disk file \"{}\" is in use by another process: `lslocks` and `fuser -v {}` name it if it \
         runs on this host",
        .0.display(), .0.display()
    )]
    InUse(PathBuf),
    /// The file cannot be locked or unlocked.
    #[error("disk file \"{}\" cannot be {what}: {cause}", path.display())]
    Lock {
        /// The file.
        path: PathBuf,
        /// What failed: `locked` or `unlocked`.
        what: &'static str,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// Data of the guest is lost, and the guest has not been told yet.
    #[error(
        "disk \"{id}\": writes of the guest could not be made durable in \"{}\": {cause}; the \
         guest is not handed over before its next flush has reported the error: run `sync` in the \
         guest or mount the file system again, or end the guest with `driftline stop`",
        path.display()
    )]
    Lost {
        /// The disk's name.
        id: String,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// A flush was still in progress when the disk was to be handed over.
    #[error(
        "disk \"{id}\": writes of the guest are still being made durable in \"{}\" after \
         {waited:.1?}: the storage is stuck, or too slow for a hand-over now",
        path.display()
    )]
    FlushUnderWay {
        /// The disk's name.
        id: String,
        /// The file.
        path: PathBuf,
        /// Time that the caller has waited.
        waited: Duration,
    },
    /// The disk was to get another file, and requests of the guest are still in flight.
    #[error("disk \"{id}\" keeps its file: requests of the guest are still in flight")]
    Busy {
        /// The disk's name.
        id: String,
    },
    /// The disk was to get another file, and its driver has broken the rules of virtio.
    #[error(
        "disk \"{id}\" keeps its file: its driver has broken the rules, and the disk has stopped"
    )]
    Stopped {
        /// The disk's name.
        id: String,
    },
    /// The disk was to get another file, which the sandbox does not allow.
    #[error(
        "the VMM's sandbox does not allow writes to disk file \"{}\": put it into a directory \
         below {places}",
        path.display()
    )]
    Outside {
        /// The file.
        path: PathBuf,
        /// Directories in which files can be.
        places: String,
    },
    /// The disk was to get another file, and this host does not hold it.
    #[error("disk \"{id}\" keeps its file: its guest does not run here at the moment")]
    Released {
        /// The disk's name.
        id: String,
    },
    /// The disk's flush thread has ended.
    #[error("disk \"{id}\": its flush thread has ended")]
    FlushEnded {
        /// The disk's name.
        id: String,
    },
    /// The file is smaller than the disk that the guest knows.
    #[error(
        "disk \"{id}\" has {want} bytes, and its file \"{}\" on this host has only {has}",
        path.display()
    )]
    TooSmall {
        /// The disk's name.
        id: String,
        /// The file.
        path: PathBuf,
        /// The disk's size in bytes, as the guest knows it.
        want: u64,
        /// The file's size in bytes.
        has: u64,
    },
    /// The file is a different disk from the guest's.
    #[error(
        "disk \"{id}\" is a different disk on this host: the guest had {theirs}, and \"{}\" is \
         {ours}; if it is a copy, or on storage whose hosts number files differently, give \
         --disk id={id},path={},identity=any",
        path.display(), path.display()
    )]
    Another {
        /// The disk's name.
        id: String,
        /// The file.
        path: PathBuf,
        /// The disk's identity on the host that the guest comes from.
        theirs: DiskIdentity,
        /// The identity of the file on this host.
        ours: DiskIdentity,
    },
    /// The disk is copied along with its guest, and no file can be created for it.
    #[error(
        "disk \"{id}\" cannot be copied to \"{}\": {cause}{}",
        path.display(), cause.hint(path)
    )]
    NoCopy {
        /// The disk's name.
        id: String,
        /// The path for the copy.
        path: PathBuf,
        /// The reason.
        #[source]
        cause: CopyRefusal,
    },
    /// A thread that flushes the disk, or tracks its writes, cannot be started.
    #[error("no thread can be started for disk \"{id}\": {cause}")]
    Thread {
        /// The disk's name.
        id: String,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The disk was to get another file, and the events of its engine cannot be watched.
    #[error("disk \"{id}\" keeps its file: the events of the new one cannot be watched: {cause}")]
    Watch {
        /// The disk's name.
        id: String,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The writes to the disk cannot be tracked.
    #[error("the writes to disk \"{id}\" cannot be tracked: {cause}")]
    Untracked {
        /// The disk's name.
        id: String,
        /// The tracker's error.
        #[source]
        cause: driftline_dirty_tracker::LayoutError,
    },
}

/// Why a file does not become the copy of a disk.
#[derive(Debug, thiserror::Error)]
pub enum CopyRefusal {
    /// The system refused an operation.
    #[error("{what} failed: {cause}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The path is that of a directory, a device or another special file.
    #[error("it is not a regular file")]
    NotRegular,
    /// Another process has locked the file.
    #[error("it is in use by another process")]
    InUse,
    /// The file may be another guest's.
    #[error(
        "there is a file with data in it, which a copy never overwrites: give a path that does not \
         exist, or remove the file"
    )]
    HasData,
    /// The file is longer than the disk.
    #[error("there is a file of {bytes} bytes, and the disk has only {disk}")]
    TooLong {
        /// Length of the file.
        bytes: u64,
        /// Size of the disk in bytes.
        disk: u64,
    },
    /// The file was replaced while it was prepared.
    #[error("its path leads to another file now")]
    Replaced,
}

/// What is wrong with a list of disks, which comes from a peer or a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum DiskListDefect {
    /// The guest can write to a disk that is not in the list.
    #[error("disk \"{id}\" is not in it")]
    Unlisted {
        /// The disk's name.
        id: String,
    },
    /// The guest has no such disk.
    #[error("{drive} is not a disk of the guest")]
    Foreign {
        /// The entry of the list.
        drive: DriveHead,
    },
    /// The guest's disk has another size, or is read-only and the entry is not, or the reverse.
    #[error("{drive} differs from the disk in the guest's configuration")]
    Differs {
        /// The entry of the list.
        drive: DriveHead,
    },
    /// Two entries name the same disk.
    #[error("{drive} is listed twice")]
    Twice {
        /// The second entry.
        drive: DriveHead,
    },
}

impl CopyRefusal {
    /// Returns the conversion of an error of the operation `what`.
    pub(super) fn system(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |cause| Self::System { what, cause }
    }

    fn hint(&self, path: &Path) -> &'static str {
        match self {
            Self::System { cause, .. } => permission_hint(path, cause),
            _ => "",
        }
    }
}

/// Why a file is taken for the disk of the guest that was checkpointed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ParentsDisk {
    /// The file is that disk.
    Itself,
    /// The file is that disk through another mount, or a copy in a snapshot of its file system.
    OrSnapshot,
    /// A different file, at that disk's path.
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
                "has the path of guest {guest}'s disk: name another path \
                 (--disk id={id},path=FILE), or restore that guest itself (--same-id)"
            ),
        }
    }

    fn hint(self, id: &str, path: &Path) -> String {
        match self {
            Self::OrSnapshot => format!(
                "; if it is a copy in a snapshot of that disk's file system, give --disk \
                 id={id},path={},identity=any",
                path.display()
            ),
            Self::Itself | Self::Path => String::new(),
        }
    }
}
