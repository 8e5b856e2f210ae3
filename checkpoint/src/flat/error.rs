//! Why a snapshot was not taken, or cannot be loaded.

use std::path::PathBuf;

use driftline_guest::{GuestError, RunState};
use driftline_store::StoreError;

use crate::report::{EpochFailure, EpochStep};

/// A snapshot that was not taken, or that cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The guest is not paused.
    #[error("the guest is {0}: pause it before its snapshot")]
    NotPaused(RunState),
    /// The guest was resumed while its memory was written.
    #[error("the guest was resumed before its snapshot was complete: take it again")]
    Resumed,
    /// A guest that runs has a drive that it can write to.
    #[error(
        "no live snapshot: the guest can write to drive \"{0}\", whose file would be of a later \
         moment; pause the guest and do not set `live`, or take a checkpoint, which has its drives"
    )]
    LiveDrive(String),
    /// Copying a guest that runs failed.
    #[error("{step} failed: {cause}")]
    Live {
        /// The step.
        step: EpochStep,
        /// The reason.
        #[source]
        cause: EpochFailure,
    },
    /// The guest refused a request.
    #[error("{0}")]
    Guest(#[from] GuestError),
    /// A file is damaged, or the system refused an operation on it.
    #[error("{0}")]
    File(#[from] StoreError),
    /// The path names no file that a snapshot can be written to.
    #[error("{} cannot be a file of a snapshot: {why}", path.display())]
    Name {
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// One file for both, however the paths are spelled.
    #[error("{} cannot be both the memory file and the state file: name two files", .0.display())]
    SameFile(PathBuf),
    /// Guests are loaded from the memory file, or it is being changed.
    #[error(
        "{} is in use: a guest is loaded from it, or another snapshot is being written to it; name \
         another memory file",
        .0.display()
    )]
    InUse(PathBuf),
    /// The memory file has another length than the memory of the guest.
    #[error(
        "{} has {found} bytes, and the memory of the snapshot's guest has {expected}: it is not \
         the memory file of this snapshot",
        file.display()
    )]
    MemoryLength {
        /// The memory file.
        file: PathBuf,
        /// Its length in bytes.
        found: u64,
        /// The length that the state file says, in bytes.
        expected: u64,
    },
}
