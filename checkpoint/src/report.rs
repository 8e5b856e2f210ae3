//! The outcome of an epoch: how far it got, what it cost, and why it is not stored.

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::NoMemory;
use driftline_guest::{CopyBeforeWriteError, DriveHead, GuestError, RunState};
use driftline_store::StoreError;
use serde::{Deserialize, Serialize};
use vm_memory::GuestMemoryError;

/// The steps of an epoch, for logs and errors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EpochStep {
    /// Checking the store's files; creates them if there are none.
    Begin,
    /// Beginning to track writes; only before a full epoch.
    Subscribe,
    /// Copying memory while the guest runs: populated memory in a full epoch, what has changed so
    /// far in another.
    CopyLive,
    /// Stopping the vCPUs. The guest is paused from here to the end of `Resume`.
    Pause,
    /// Draining what changed; happens once before the pause, too.
    Drain,
    /// Write-protecting what changed, to be copied while the guest runs.
    Protect,
    /// Copying what changed to the staging area.
    Copy,
    /// Saving the state besides memory.
    Save,
    /// Resuming the guest.
    Resume,
    /// Copying what is protected, while the guest runs.
    CopyInBackground,
    /// Writing frames to the page file.
    Write,
    /// Copying changed blocks of drives: puts them under copy-before-write in the pause, and copies
    /// them while the guest runs.
    CopyDrives,
    /// Making the frames durable, and then the log that says where they are.
    Publish,
}

impl fmt::Display for EpochStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begin => "opening the store",
            Self::Subscribe => "starting to track writes",
            Self::CopyLive => "copying memory",
            Self::Pause => "pausing the guest",
            Self::Drain => "collecting changed pages",
            Self::Protect => "write-protecting changed pages",
            Self::Copy => "copying changed pages",
            Self::CopyInBackground => "copying changed pages in the background",
            Self::Save => "saving the guest's state",
            Self::Resume => "resuming the guest",
            Self::Write => "writing pages to the store",
            Self::CopyDrives => "copying changed disk blocks",
            Self::Publish => "making the checkpoint durable",
        })
    }
}

/// A step that failed, which ends its epoch.
#[derive(Debug)]
pub(crate) struct FailedStep {
    pub(crate) step: EpochStep,
    pub(crate) cause: EpochFailure,
}

/// Runs one step, with an event at its beginning and one at its end.
pub(crate) fn step<T, E: Into<EpochFailure>>(
    step: EpochStep,
    act: impl FnOnce() -> Result<T, E>,
) -> Result<T, FailedStep> {
    tracing::debug!(?step, "begin");
    let since = Instant::now();
    let result = act().map_err(|e| FailedStep { step, cause: e.into() });
    tracing::debug!(?step, ok = result.is_ok(), us = since.elapsed().as_micros() as u64, "end");
    result
}

/// Why an epoch failed.
#[derive(Debug, thiserror::Error)]
pub enum EpochFailure {
    /// The store.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// The guest.
    #[error("{0}")]
    Guest(#[from] GuestError),
    /// The guest's memory.
    #[error("{0}")]
    Memory(#[from] GuestMemoryError),
    /// A drive of the guest.
    #[error("disk \"{id}\" cannot be read: {cause}")]
    Drive {
        /// Its name.
        id: String,
        /// The error of the operating system.
        #[source]
        cause: io::Error,
    },
    /// Changed blocks of a drive could not be preserved until they were copied.
    #[error("the changed blocks of disk \"{id}\" cannot be copied: {cause}")]
    NotCopied {
        /// Its name.
        id: String,
        /// The reason.
        #[source]
        cause: CopyBeforeWriteError,
    },
    /// The changes of a drive cannot be followed.
    #[error("{drive} cannot be in checkpoints: {cause}")]
    DriveRefused {
        /// The drive.
        drive: DriveHead,
        /// The reason.
        #[source]
        cause: DriveRefusal,
    },
    /// Fewer blocks of a drive were copied than changed. The others would have the content of the
    /// previous epoch.
    #[error("{copied} blocks of disk \"{id}\" were copied of {changed} that changed")]
    BlocksMissing {
        /// Its name.
        id: String,
        /// Number of blocks copied.
        copied: u64,
        /// Number of blocks that changed.
        changed: u64,
    },
    /// A thread could not be started.
    #[error("starting the {thread} thread failed: {cause}")]
    NoThread {
        /// Its job.
        thread: &'static str,
        /// The error of the operating system.
        #[source]
        cause: io::Error,
    },
    /// A thread that an epoch needs has ended.
    #[error("the {thread} thread has ended; the log says why")]
    ThreadEnded {
        /// Its job.
        thread: &'static str,
    },
    /// The guest waited for this long in total to write to what was not copied yet, and the store
    /// had no room for a copy.
    #[error(
        "the store is too slow: the guest has waited {} s to write to pages or blocks that are not \
         copied yet",
        .0.as_secs()
    )]
    Stalled(Duration),
}

/// Why a drive cannot be in checkpoints.
#[derive(Debug, thiserror::Error)]
pub enum DriveRefusal {
    /// It was detached, or replaced.
    #[error("the guest does not have it any more")]
    Detached,
    /// Its device cannot save blocks before it overwrites them.
    #[error("it has no copy-before-write")]
    NoCopyBeforeWrite,
    /// Its device does not report what it writes.
    #[error("its writes are not tracked")]
    NotTracked,
    /// The host lacks address space to track its writes.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

/// An epoch that was not stored. Nothing is lost: what changed in it is in the next one (I4).
#[derive(Debug, thiserror::Error)]
#[error(
    "checkpoint {epoch} is not stored: {step} failed: {cause}; the guest is {guest}{}",
    next_has_it(*guest)
)]
pub struct CheckpointError {
    /// The number it would have had.
    pub epoch: u64,
    /// The step that failed.
    pub step: EpochStep,
    /// The guest's state after the failure: as before, unless it could not be resumed.
    pub guest: RunState,
    /// The reason.
    #[source]
    pub cause: EpochFailure,
}

fn next_has_it(guest: RunState) -> &'static str {
    // A guest that has ended has no next epoch.
    if guest == RunState::Stopped {
        ""
    } else {
        ", and what changed will be in the next checkpoint"
    }
}

/// One stored epoch.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct EpochReport {
    /// Its number.
    #[serde(rename = "checkpoint")]
    pub epoch: u64,
    /// Frames of memory in it.
    pub frames: u64,
    /// Blocks of drives in it, 4 KiB each.
    pub disk_blocks: u64,
    /// Time from the pause request until the guest had resumed, in microseconds.
    pub pause_us: u64,
    /// Frames of it that were copied after the pause, while the guest ran.
    pub copied_after_frames: u64,
    /// Number of times a write waited for a write-protected frame, before the pause or after it.
    pub waits: u64,
    /// Time for which writes waited, in microseconds, as far as it is known; simultaneous waits
    /// count once.
    pub waited_us: u64,
    /// Time from the end of the pause until the epoch was durable, in milliseconds.
    pub write_ms: f64,
    /// Bytes it took: its own slots in the page file, and its records in the log.
    pub written_bytes: u64,
    /// Whether it survives a crash of the host: always true in a report.
    pub durable: bool,
}
