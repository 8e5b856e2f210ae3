//! What a snapshot is asked for, and what it cost.

use driftline_guest::{GuestIdentity, Section};
use driftline_store::{SnapshotState, unix_ms};
use serde::Serialize;

use super::error::SnapshotError;
use super::new_file::{SnapshotFile, UnfinishedFile};

/// How much of memory a snapshot's memory file has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotKind {
    /// All pages that the guest has written.
    Full,
    /// The pages that the guest has written since the last snapshot, or since it was booted or
    /// loaded.
    Diff,
}

/// Which files a snapshot is written to, and how.
#[derive(Debug)]
pub struct SnapshotRequest {
    /// How much of memory is written.
    pub kind: SnapshotKind,
    /// The memory file. With [`SnapshotKind::Diff`] of a tracked guest, unless it is the first
    /// [since boot](Self::since_boot), a file that has the length of the guest's memory is changed
    /// in place, so an earlier snapshot that has the same memory file is lost. It is refused if
    /// another guest is loaded from it. Any other file is replaced; the disk needs room for both.
    pub memory: SnapshotFile,
    /// The state file, which is replaced.
    pub state: SnapshotFile,
    /// Identity of the file that the guest's memory is mapped from, if any, as its
    /// [`identity`](driftline_store::StoreFile::identity). This file is never changed in place,
    /// because other guests may be mapped from it, too: it is replaced with a full memory file.
    pub backing: Option<(u64, u64)>,
    /// Whether this guest was booted and has had no snapshot yet. Its first [`SnapshotKind::Diff`]
    /// has all its memory, and replaces a file that was left by another guest.
    pub since_boot: bool,
    /// Sections of the caller's own, which follow those of the guest in the state file.
    pub extra: Vec<Section>,
}

/// A snapshot that was taken.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct SnapshotReport {
    /// Length of the memory file in bytes, including holes.
    pub memory_bytes: u64,
    /// Frames written to it. A frame counts each time that it is copied.
    pub frames: u64,
    /// Whether an existing memory file was changed in place.
    pub merged: bool,
    /// Length of the state file in bytes.
    pub state_bytes: u64,
    /// Length of the pause of a guest that ran, in microseconds; 0 if its operator had paused it.
    pub pause_us: u64,
    /// Time until memory was written, in milliseconds.
    pub write_ms: f64,
    /// Time from then until both files were durable, in milliseconds.
    pub sync_ms: f64,
    /// Duration in milliseconds.
    pub time_ms: f64,
}

impl SnapshotRequest {
    /// Fails if both paths name the same file.
    pub(super) fn check_names(&self) -> Result<(), SnapshotError> {
        match self.memory.is_same(&self.state) {
            true => Err(SnapshotError::SameFile(self.state.path())),
            false => Ok(()),
        }
    }

    /// Writes the state of `guest` to `new`. Returns its length in bytes.
    pub(super) fn write_state<G: GuestIdentity + ?Sized>(
        &self,
        guest: &G,
        tracked: bool,
        sections: Vec<Section>,
        new: &UnfinishedFile<'_>,
    ) -> Result<u64, SnapshotError> {
        let encoded = SnapshotState {
            vm_id: guest.vm_id(),
            created_unix_ms: unix_ms(),
            tracked,
            layout: guest.layout().clone(),
            config: guest.config(),
            sections: sections.into_iter().chain(self.extra.iter().cloned()).collect(),
        }
        .encode()?;
        let bytes = encoded.len() as u64;
        new.file.write_all_at(&encoded, 0).map_err(|e| self.state.io("writing", e))?;
        new.file.begin_writeback(0, bytes);
        Ok(bytes)
    }
}
