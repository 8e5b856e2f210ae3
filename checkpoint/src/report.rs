//! What becomes of an epoch: how far it got, what it cost, and why it is not stored.

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use driftline_guest::{GuestError, KeepError, RunState};
use driftline_store::StoreError;
use serde::Serialize;
use vm_memory::GuestMemoryError;

/// The steps of an epoch, for logs and errors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Looking after the store's files, which are made if there are none.
    Begin,
    /// Beginning to follow writes; only before a full epoch.
    Subscribe,
    /// Copying memory of the running guest: populated memory in a full epoch, what has changed so
    /// far in another.
    CopyLive,
    /// Stopping the vCPUs. The guest stands still from here to the end of `Resume`.
    Pause,
    /// Learning what changed; once before the pause already.
    Drain,
    /// Keeping what changed as it is, to be copied while the guest runs.
    Protect,
    /// Copying what changed to the staging area.
    Copy,
    /// Saving the state besides memory.
    Save,
    /// Letting the guest run.
    Resume,
    /// Copying what is protected, while the guest runs.
    CopyBehind,
    /// Writing frames to the page file.
    Write,
    /// Copying what changed of drives, while the guest runs.
    CopyDrives,
    /// Making the frames durable, and then the log that says where they are.
    Publish,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begin => "beginning",
            Self::Subscribe => "beginning to follow writes",
            Self::CopyLive => "copying memory",
            Self::Pause => "pausing the guest",
            Self::Drain => "collecting what changed",
            Self::Protect => "protecting what changed",
            Self::Copy => "copying what changed",
            Self::CopyBehind => "copying what changed behind the guest",
            Self::Save => "saving the guest's state",
            Self::Resume => "resuming the guest",
            Self::Write => "writing",
            Self::CopyDrives => "copying what changed of disks behind the guest",
            Self::Publish => "publishing",
        })
    }
}

/// Does one step, with an event where it begins and one where it ends.
pub(crate) fn step<T, E: Into<Cause>>(
    phase: Phase,
    act: impl FnOnce() -> Result<T, E>,
) -> Result<T, (Phase, Cause)> {
    tracing::debug!(?phase, "begin");
    let since = Instant::now();
    let result = act().map_err(|e| (phase, e.into()));
    tracing::debug!(?phase, ok = result.is_ok(), us = since.elapsed().as_micros() as u64, "end");
    result
}

/// What stood in the way of an epoch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
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
        /// The system's answer.
        cause: io::Error,
    },
    /// What changed of a drive could not be kept as it was until it was copied.
    #[error("what changed of disk \"{id}\" cannot be kept as it was: {why}")]
    NotKept {
        /// Its name.
        id: String,
        /// The reason.
        why: KeepError,
    },
    /// For so long, all in all, the guest waited to write to what was not copied yet, and the store
    /// had no room for a copy.
    #[error("the store is too slow: the guest has waited {} s to write to what is not copied yet", .0.as_secs())]
    Stalled(Duration),
}

/// An epoch that was not stored. Nothing is lost: what changed in it is in the next one (I4).
#[derive(Debug, thiserror::Error)]
#[error(
    "checkpoint {epoch} is not stored: {phase} failed: {cause}; the guest is {guest}{}",
    next_has_it(*guest)
)]
pub struct CheckpointError {
    /// The number that it would have had.
    pub epoch: u64,
    /// What was being done.
    pub phase: Phase,
    /// The guest's state after the failure: as before, unless it could not be resumed.
    pub guest: RunState,
    /// Why it failed.
    pub cause: Cause,
}

fn next_has_it(guest: RunState) -> &'static str {
    // A guest that has ended has no next epoch.
    if guest == RunState::Stopped {
        ""
    } else {
        ", and what changed will be in the next checkpoint"
    }
}

/// One stored epoch. Serialized it is a line of `checkpoint --json`.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct EpochReport {
    /// Its number.
    pub epoch: u64,
    /// Frames in it, of memory.
    pub frames: u64,
    /// Blocks in it, of drives: 4 KiB each.
    pub disk_blocks: u64,
    /// From the request to pause until the guest had been resumed, in microseconds.
    pub pause_us: u64,
    /// Those of the frames that were copied while the guest ran on, after the pause.
    pub behind_frames: u64,
    /// How often somebody waited to write to a frame that was kept as it was, before the pause or
    /// after it.
    pub waits: u64,
    /// For how long somebody did, in microseconds, as far as it was known: several at a time count
    /// once.
    pub waited_us: u64,
    /// From the end of the pause until the epoch was durable, in milliseconds.
    pub write_ms: f64,
    /// Bytes that it took: slots of its own in the page file, and its records in the log.
    pub written_bytes: u64,
    /// Whether it survives a crash of the host: always, of an epoch that is reported.
    pub durable: bool,
}
