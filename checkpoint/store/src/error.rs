//! Errors of a store, each with the place where it was found.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, Gfn, LayoutError, PAGE_SIZE};
use driftline_format::FormatError;
use driftline_guest::VmId;

use crate::address;
use crate::alloc::{SlotError, SlotRun};
use crate::backend::is_media_error;
use crate::limits::SECTOR;
use crate::names::{Named, parse_name};

/// A store cannot do what the caller asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The system refused an operation on a file or the directory.
    #[error("{what} {} failed: {cause}", path.display())]
    Io {
        /// The operation: "writing", "syncing".
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// A file's content is not what it should be.
    #[error("{}", damage_in(file, *offset, damage))]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Offset at which the damaged record, or the damaged part of one, begins, in bytes.
        offset: u64,
        /// What is wrong there.
        #[source]
        damage: Damage,
    },
    /// A retained checkpoint is damaged, or one that it builds on, or the record of which
    /// checkpoints there are.
    #[error(
        "the store {} takes no new checkpoints, because {} is damaged: {cause}. Salvage the sound \
         ones with: driftline store repair {}",
        dir.display(),
        epoch.map_or_else(|| damaged_part(cause).to_owned(), |epoch| format!("checkpoint {epoch}")),
        dir.display()
    )]
    NeedsRepair {
        /// The store.
        dir: PathBuf,
        /// The damaged checkpoint, if its number can be read.
        epoch: Option<u64>,
        /// Where the damage is.
        #[source]
        cause: Box<StoreError>,
    },
    /// The directory has no file of a store.
    #[error("{} is not a Driftline store (no manifest)", dir.display())]
    NotAStore {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory has files of several guests, and no manifest says which guest's store it is.
    #[error(
        "{} has checkpoints of guests {one} and {other} and no manifest that says which of them \
         are its own. Move the log and page file of one of them to another directory",
        dir.display()
    )]
    Ambiguous {
        /// The directory.
        dir: PathBuf,
        /// One guest.
        one: VmId,
        /// Another.
        other: VmId,
    },
    /// The store has a file of another guest.
    #[error(
        "{} belongs to guest {found}, and the manifest names it as guest {expected}'s. Put the \
         file of guest {expected} in its place",
        file.display()
    )]
    Mixed {
        /// The file.
        file: PathBuf,
        /// The guest of that file.
        found: VmId,
        /// The guest of the store.
        expected: VmId,
    },
    /// Checkpoints are lost, and no sound one is left.
    #[error(
        "no checkpoint in {} is sound, so there is nothing to repair: nothing was changed",
        dir.display()
    )]
    NothingSound {
        /// The store.
        dir: PathBuf,
    },
    /// The log is missing, and no other file says which checkpoints there are.
    #[error(
        "the store {} has lost its log{}, without which nothing says which checkpoints it has, and \
         nothing can be salvaged. Put the log back, from a backup",
        dir.display(),
        log.as_ref().map_or(String::new(), |log| format!(" ({log})"))
    )]
    NoLog {
        /// The store.
        dir: PathBuf,
        /// The log's name, if the manifest can be read.
        log: Option<String>,
    },
    /// A file that the manifest names is missing, and other files of a store are there.
    #[error(
        "the manifest of the store {} names {file}, which is not there, and other logs or page \
         files are: nothing was changed. Look for sound checkpoints in those with: driftline store \
         repair {}",
        dir.display(),
        dir.display()
    )]
    NotThere {
        /// The store.
        dir: PathBuf,
        /// The missing file's name.
        file: String,
    },
    /// Neither the manifest nor any header says which guest the files belong to.
    #[error(
        "the manifest of the store {} and the headers of its log and page file are all damaged or \
         missing, so nothing says whose checkpoints it has, and nothing was changed. Put one of \
         the three files back, from a backup, and repair again",
        dir.display()
    )]
    HeadersDamaged {
        /// The store.
        dir: PathBuf,
    },
    /// The manifest is missing, so which epochs the store has is unknown.
    #[error(
        "{} holds checkpoints, but the store has no manifest; rebuild it with: driftline store \
         repair {}",
        log.display(),
        log.parent().unwrap_or(log).display()
    )]
    NoManifest {
        /// A log that was found.
        log: PathBuf,
    },
    /// No generation number is left for a new file.
    #[error(
        "{} has the highest number that a file of a store can have, so no new file can be created: \
         move it to another directory",
        file.display()
    )]
    LastName {
        /// The file.
        file: PathBuf,
    },
    /// A file of the store is no longer the one that this process writes to.
    #[error("{} was removed or replaced while this process wrote to it", file.display())]
    Replaced {
        /// The file.
        file: PathBuf,
    },
    /// The guest's state is larger than what can be stored.
    #[error("the state of checkpoint {epoch} cannot be stored: {cause}")]
    State {
        /// The epoch.
        epoch: u64,
        /// What is wrong with it.
        #[source]
        cause: FormatError,
    },
    /// The guest's state is larger than what a snapshot can have.
    #[error("the guest's state cannot be in a snapshot: {0}")]
    SnapshotState(FormatError),
    /// The epoch that this one builds on could not be stored.
    #[error("it builds on checkpoint {parent}, which is not stored")]
    ParentFailed {
        /// The number of that epoch.
        parent: u64,
    },
    /// The page file has the largest number of slots that there can be.
    #[error(
        "the page file {} has {slots} slots, the most that there can be; use another store",
        pages.display()
    )]
    NoMoreSlots {
        /// The page file.
        pages: PathBuf,
        /// Number of slots in it.
        slots: u32,
    },
    /// Another process writes to the store.
    #[error(
        "the store {} is in use by {}; one process at a time may write to a store",
        dir.display(),
        pid.map_or("another process".to_owned(), |pid| format!("process {pid}"))
    )]
    InUse {
        /// The store.
        dir: PathBuf,
        /// The process that holds the lock, if its id could be read.
        pid: Option<u32>,
    },
    /// The lock file or the whole directory is no longer the one that this process locked.
    #[error(
        "the lock of the store {} was removed or replaced while this process held it; another \
         process may write there now",
        dir.display()
    )]
    LockLost {
        /// The store.
        dir: PathBuf,
    },
    /// The store was opened for reading.
    #[error("the store {} is open for reading only", dir.display())]
    ReadOnly {
        /// The store.
        dir: PathBuf,
    },
    /// The store has epochs of another guest.
    #[error(
        "the store {} holds checkpoints of guest {stored}, and this is guest {asked}: a store has \
         checkpoints of one guest. Name another directory (--store DIR --new-store)",
        dir.display()
    )]
    OtherVm {
        /// The store.
        dir: PathBuf,
        /// The guest whose epochs it holds.
        stored: VmId,
        /// The guest whose epoch was to be added.
        asked: VmId,
    },
    /// The last epoch in the store is of the same guest, but this guest was not restored from it.
    #[error(
        "checkpoint {last}, the latest in the store {}, was taken by another process that ran \
         guest {asked}, and this one {}. Name another directory (--store DIR --new-store), or stop \
         this guest and continue from checkpoint {last} (restore --same-id)",
        dir.display(),
        match from {
            None => "was not restored from it".to_owned(),
            Some(from) if from < last => format!("continues from checkpoint {from}"),
            Some(from) => format!("continues from checkpoint {from} of another store or process"),
        }
    )]
    OtherLine {
        /// The store.
        dir: PathBuf,
        /// The guest.
        asked: VmId,
        /// The last epoch there.
        last: u64,
        /// The epoch that this guest was restored from, if any.
        from: Option<u64>,
    },
    /// Epoch numbers are used once, and the highest one has been used.
    #[error(
        "the store {} has no number left for a checkpoint after {last}; use another store",
        dir.display()
    )]
    Full {
        /// The store.
        dir: PathBuf,
        /// The last number that is used.
        last: u64,
    },
    /// The requested epoch is not in the store, or the store has none at all.
    #[error(
        "the store {} has no checkpoint{}",
        dir.display(),
        epoch.map_or(String::new(), |epoch| format!(" {epoch}"))
    )]
    NoEpoch {
        /// The store.
        dir: PathBuf,
        /// The requested epoch; `None` for the latest.
        epoch: Option<u64>,
    },
}

impl StoreError {
    /// Returns whether a file of a store is damaged, or its disk cannot read it. The sound
    /// checkpoints can then be [salvaged](crate::Store::repair).
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } => true,
            // Failed writes to the store or to an export are not damage.
            Self::Io { what: "opening" | "reading", path, cause } => {
                matches!(named_by(path), Named::Manifest | Named::Log(_) | Named::Pages(_))
                    && is_media_error(cause)
            }
            _ => false,
        }
    }
}

/// Names the part of the store that `damage` is in, if no checkpoint's number is known.
fn damaged_part(damage: &StoreError) -> &'static str {
    let (file, offset) = match damage {
        StoreError::Damaged { file, offset, .. } => (file, *offset),
        StoreError::Io { path, .. } => (path, 0),
        _ => return "a checkpoint",
    };
    match named_by(file) {
        Named::Manifest => "its manifest",
        Named::Log(_) if offset < SECTOR as u64 => "the header of its log",
        Named::Pages(_) if offset < PAGE_SIZE => "the header of its page file",
        _ => "a checkpoint",
    }
}

fn named_by(path: &Path) -> Named {
    parse_name(path.file_name().and_then(|name| name.to_str()).unwrap_or_default())
}

/// Describes which file is damaged, where and how.
fn damage_in(file: &Path, offset: u64, damage: &Damage) -> String {
    let file = file.display();
    match damage {
        Damage::EndsEarly { length, wanted } => format!(
            "{file} is truncated: it ends at byte {length}, and the record at byte {offset} needs \
             {wanted} bytes"
        ),
        damage => format!("{file}, byte {offset}: {damage}"),
    }
}

/// What is wrong with a file of a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// The header or a record is damaged by itself.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// The file is shorter than it must be.
    #[error("truncated: the file ends at byte {length}, where {wanted} more bytes should follow")]
    EndsEarly {
        /// The file's length in bytes.
        length: u64,
        /// Number of bytes that the record needs from this offset on.
        wanted: u64,
    },
    /// A number contradicts another part of the file.
    #[error("{what} is {found} and should be {expected}")]
    Mismatch {
        /// Name of the number.
        what: &'static str,
        /// Number as stored.
        found: u64,
        /// Number as it must be.
        expected: u64,
    },
    /// The file belongs to another guest than the others.
    #[error("the file belongs to guest {found}, the others to guest {expected}")]
    OtherVm {
        /// The guest of this file.
        found: VmId,
        /// The guest of the store.
        expected: VmId,
    },
    /// Bytes that must have been written are not there, although what follows them was written
    /// later.
    #[error("nothing was written here, although later records were")]
    Unwritten,
    /// The disk cannot read the bytes.
    #[error("it cannot be read: {cause}")]
    Unreadable {
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The bytes were not read, because failed reads of the file have used up their time.
    #[error(
        "it cannot be read: not tried, since other reads failed for {} s",
        failing.as_secs()
    )]
    NotTried {
        /// Total time of the failed reads.
        failing: Duration,
    },
    /// A frame failed its checksum, and passed it when it was read again.
    #[error("its content changed between two reads: the disk or its cable is failing")]
    Changed,
    /// Blocks of a drive that the epoch does not have.
    #[error("it has pages of object {object}, which the checkpoint does not have")]
    Object {
        /// Number of the drive.
        object: u16,
    },
    /// Slot numbers that no page file has.
    #[error("{slots} cannot hold pages")]
    Slots {
        /// The slots.
        slots: SlotRun,
    },
    /// Slots that cannot be used in the way that the log says.
    #[error("checkpoint {epoch}: {cause}")]
    Used {
        /// The epoch that has them, by the log.
        epoch: u64,
        /// The contradiction.
        #[source]
        cause: SlotError,
    },
    /// The content of a frame is not what was stored.
    #[error(
        "{} of checkpoint {epoch} fails its checksum: it is {found:#010x} and should be \
         {expected:#010x}",
        address::name(*gfn)
    )]
    Frame {
        /// The frame.
        gfn: Gfn,
        /// The epoch that was being read.
        epoch: u64,
        /// Checksum as computed.
        found: u32,
        /// Checksum in the log.
        expected: u32,
    },
    /// Compressed contents that the decompressor refuses.
    #[error("the compressed contents of {frames} pages cannot be decompressed: {cause}")]
    Packed {
        /// Number of frames.
        frames: u64,
        /// The decompressor's error.
        #[source]
        cause: io::Error,
    },
    /// Compressed contents of another number of frames.
    #[error(
        "the compressed contents of {frames} pages cannot be decompressed: they are {found} bytes"
    )]
    PackedLength {
        /// Number of frames that they should be.
        frames: u64,
        /// Their length in bytes.
        found: u64,
    },
    /// A record of a kind that is not allowed here, or that this program does not know.
    #[error("a record of tag {tag:#06x} has no place here")]
    Misplaced {
        /// The record's tag.
        tag: u16,
    },
    /// Frames or blocks that the guest does not have.
    #[error("{}", outside(*object, *run))]
    Outside {
        /// 0 for memory, the number of the drive for blocks.
        object: u16,
        /// The frames.
        run: FrameRun,
    },
    /// A record of frames that has no runs.
    #[error("a record of pages has no runs")]
    NoRuns,
    /// Memory slots out of order.
    #[error("a memory slot at page {found:#x} follows one at {before:#x}; slots ascend")]
    SlotOrder {
        /// First frame of the slot that is out of order.
        found: u64,
        /// First frame of the one before it.
        before: u64,
    },
    /// Runs of a record that do not ascend, or that overlap.
    #[error(
        "{} follow {}; the runs of a record ascend",
        address::name_run(*run),
        address::name_run(*before)
    )]
    Order {
        /// The run that is out of order.
        run: FrameRun,
        /// The one before it.
        before: FrameRun,
    },
    /// A drive that an epoch cannot have.
    #[error("drive {number} is invalid: {why}")]
    Drive {
        /// Number of the drive, from 1 on.
        number: u16,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Memory slots that are not a valid layout.
    #[error("the memory layout is invalid: {0}")]
    Layout(#[from] LayoutError),
}

fn outside(object: u16, run: FrameRun) -> String {
    let (first, end) = (run.start.0, run.start.0.saturating_add(run.count));
    match object {
        0 => format!("pages {first:#x}..{end:#x} are not in guest memory"),
        drive => format!("blocks {first:#x}..{end:#x} are not in drive {drive}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failed_reads_of_a_store_are_damage() {
        let is_damage = |what, name: &str, errno| {
            let (path, cause) = (Path::new("/s").join(name), io::Error::from_raw_os_error(errno));
            StoreError::Io { what, path, cause }.is_damage()
        };
        for name in ["manifest", "log-1", "pages-2"] {
            assert!(is_damage("reading", name, libc::EIO), "{name}");
            assert!(is_damage("opening", name, libc::EUCLEAN), "{name}");
            assert!(!is_damage("reading", name, libc::ENOMEM), "{name}");
            for what in ["writing", "syncing", "growing", "locking", "committing to"] {
                assert!(!is_damage(what, name, libc::EIO), "{what}");
            }
        }
        for (what, name) in [("writing", "out.raw"), ("syncing", "out.raw"), ("reading", "lock")] {
            assert!(!is_damage(what, name, libc::EIO), "{what} {name}");
        }
    }
}
