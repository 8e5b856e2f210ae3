//! Errors of a store, each with the place where it was found.

use std::io;
use std::path::{Path, PathBuf};

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_format::FormatError;
use driftline_guest::VmId;

use crate::backend::is_media_error;
use crate::damage::Damage;
use crate::limits::SECTOR;
use crate::names::{Named, parse_name};

/// A store cannot do what the caller asked for.
#[derive(Debug, thiserror::Error)]
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
    /// The disk cannot read a file of the store.
    #[error("{what} {} failed: {cause}", path.display())]
    Unreadable {
        /// The operation: "opening", "reading".
        what: &'static str,
        /// The file.
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
        "the manifest of the store {} names {file}, which is not there, but there are other logs \
         or page files. Nothing was changed. Look for sound checkpoints in those files with: \
         driftline store repair {}",
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
    /// The guest's state has a section with a tag that is not a state section's.
    #[error("the guest's state cannot be stored: no section may have the tag {tag:#06x}")]
    SectionTag {
        /// The section's tag.
        tag: u16,
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
    /// Returns the error of opening or reading a manifest, a log or a page file: that of the disk,
    /// or that of a system that refuses to read the file.
    pub(crate) fn not_read(what: &'static str, path: PathBuf, cause: io::Error) -> Self {
        match is_media_error(&cause) {
            true => Self::Unreadable { what, path, cause },
            false => Self::Io { what, path, cause },
        }
    }

    /// Returns whether a file of a store is damaged, or its disk cannot read it. The sound
    /// checkpoints can then be [salvaged](crate::Store::repair). Failed writes to the store or to
    /// an export are not damage.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::Unreadable { .. })
    }

    /// Returns whether the system, or the disk, failed an operation on a file.
    pub(crate) fn is_of_system(&self) -> bool {
        matches!(self, Self::Io { .. } | Self::Unreadable { .. })
    }
}

/// Names the part of the store that `damage` is in, if no checkpoint's number is known.
fn damaged_part(damage: &StoreError) -> &'static str {
    let (file, offset) = match damage {
        StoreError::Damaged { file, offset, .. } => (file, *offset),
        StoreError::Unreadable { path, .. } => (path, 0),
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

/// Returns whether an error means that a file does not exist.
pub(crate) fn is_not_found(e: &StoreError) -> bool {
    matches!(e, StoreError::Io { cause, .. } if cause.kind() == io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failed_reads_of_a_store_are_damage() {
        let (path, eio) = (Path::new("/s/log-1"), || io::Error::from_raw_os_error(libc::EIO));
        for (errno, is_damage) in [(libc::EIO, true), (libc::EUCLEAN, true), (libc::ENOMEM, false)]
        {
            let cause = io::Error::from_raw_os_error(errno);
            let e = StoreError::not_read("reading", path.to_owned(), cause);
            assert_eq!(e.is_damage(), is_damage, "{e}");
        }
        let written = StoreError::Io { what: "writing", path: path.to_owned(), cause: eio() };
        assert!(!written.is_damage(), "{written}");
        let unreadable = StoreError::not_read("reading", path.to_owned(), eio());
        let same = StoreError::Io { what: "reading", path: path.to_owned(), cause: eio() };
        assert_eq!(unreadable.to_string(), same.to_string());
    }
}
