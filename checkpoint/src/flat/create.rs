//! Takes a snapshot of a paused guest.

use std::time::Instant;

use driftline_dirty_tracker::{DirtySet, FrameRun, Subscription};
use driftline_guest::{GuestError, GuestRam, Paused, RunState, Section, VcpuPauses};
use driftline_store::{MemoryFileLayout, StoreFile};

use super::error::SnapshotError;
use super::memory_output::{MemoryExtent, MemoryOutput, SnapshotMemory};
use super::new_file::UnfinishedFile;
use super::request::{SnapshotReport, SnapshotRequest};
use super::writeback::{PIECE_FRAMES, Writeback};
use crate::guest::Checkpointable;

/// Writes a snapshot of a guest that its operator has paused. `changes`, if the guest's writes are
/// tracked for snapshots, is a subscription that is kept since before the guest was booted or
/// loaded; it is empty afterwards. Without it, a [`Diff`](super::SnapshotKind::Diff) is a
/// [`Full`](super::SnapshotKind::Full) one: it has all pages that the host has memory for, and
/// replaces any file. If its data are written over an earlier memory file, pages that the guest has
/// given back to the host since keep their earlier content.
///
/// On return the snapshot is durable. Drives are not in it: the caller makes the guest's writes to
/// them durable. Memory is written from where it is, without a copy of it.
///
/// # Errors
///
/// The guest is paused as before, and `changes` has all its frames again. No incomplete snapshot is
/// ever at the names in `request`, not even after a crash of the host. Either no file was changed,
/// or the memory file was changed and there is no state file, so that an earlier snapshot may be
/// lost. The latter happens only if the error came after the new memory file had become durable, or
/// while a memory file was being changed in place.
pub fn create_snapshot<G: Checkpointable + ?Sized>(
    guest: &G,
    changes: Option<&mut Subscription>,
    request: &SnapshotRequest,
) -> Result<SnapshotReport, SnapshotError> {
    let since = Instant::now();
    let span = tracing::info_span!("snapshot", kind = ?request.kind);
    let _entered = span.enter();
    request.check_names()?;
    let (layout, tracked) = (MemoryFileLayout::new(guest.layout()), changes.is_some());
    let (pause, sections) = OperatorPause::new(guest)?;
    let changed = changes.map(|changes| pause.paused.drain(changes)).transpose()?;
    let mut new_state = UnfinishedFile::new(&request.state)?;
    let state_bytes = request.write_state(guest, tracked, sections, &new_state)?;
    let (layout, changes) = (&layout, changed.as_ref());
    let mut writer =
        PausedMemory { guest, layout, pause, request, changed: changes, runs: Vec::new() };
    let output = MemoryOutput { request, layout, tracked, new_state: &new_state };
    let written = output.write(&mut writer)?;
    new_state.publish()?;
    if let Some(changed) = changed {
        changed.commit();
    }
    Ok(written.report(since, layout, state_bytes))
}

/// A pause that was there before, and lasts at least until this is dropped.
struct OperatorPause<'g, G: Checkpointable + ?Sized> {
    guest: &'g G,
    paused: Paused<'g, G>,
    /// The pauses that had ended when this began.
    before: Vec<VcpuPauses>,
}

impl<'g, G: Checkpointable + ?Sized> OperatorPause<'g, G> {
    /// Joins the pause of `guest`, and saves its state. Never pauses a guest that runs.
    fn new(guest: &'g G) -> Result<(Self, Vec<Section>), SnapshotError> {
        let run_state = guest.run_state();
        if run_state != RunState::Paused {
            return Err(SnapshotError::NotPaused(run_state));
        }
        let before = guest.vcpu_pauses();
        let (paused, saved) = Paused::saving(guest)?;
        let pause = Self { guest, paused, before };
        pause.check()?;
        Ok((pause, saved?))
    }

    /// Fails if the guest was resumed since, or another process has its memory.
    fn check(&self) -> Result<(), SnapshotError> {
        self.guest.memory_right().check().map_err(GuestError::from)?;
        let same = self.guest.vcpu_pauses() == self.before;
        let paused = self.guest.run_state() == RunState::Paused && !self.paused.was_running();
        if same && paused { Ok(()) } else { Err(SnapshotError::Resumed) }
    }
}

/// The memory of a paused guest on its way into a file.
struct PausedMemory<'o, 'g, G: Checkpointable + ?Sized> {
    guest: &'g G,
    layout: &'o MemoryFileLayout,
    pause: OperatorPause<'g, G>,
    request: &'o SnapshotRequest,
    /// What changed since the last snapshot, if that is tracked.
    changed: Option<&'o DirtySet>,
    /// What is to be written.
    runs: Vec<FrameRun>,
}

impl<G: Checkpointable + ?Sized> SnapshotMemory for PausedMemory<'_, '_, G> {
    fn prepare(&mut self, extent: MemoryExtent) -> Result<(), SnapshotError> {
        self.runs = match (extent, self.changed) {
            (MemoryExtent::Changes, Some(changed)) => changed.runs().collect(),
            _ => self.guest.resident()?,
        };
        Ok(self.guest.fetch(&self.runs)?)
    }

    fn has_state(&self) -> bool {
        true
    }

    fn write(&mut self, _: MemoryExtent, file: &dyn StoreFile) -> Result<u64, SnapshotError> {
        let frames = write_runs(file, self.guest.ram(), self.layout, &self.runs)
            .map_err(|e| self.request.memory.io("writing", e))?;
        self.pause.check()?;
        Ok(frames)
    }
}

/// Writes `runs`, which ascend, to their places. Returns the number of frames.
fn write_runs(
    file: &dyn StoreFile,
    ram: &GuestRam,
    layout: &MemoryFileLayout,
    runs: &[FrameRun],
) -> std::io::Result<u64> {
    let (mut frames, mut writeback) = (0, Writeback::new(file));
    for (part, offset) in runs.iter().flat_map(|run| layout.parts(*run)) {
        let mut at = offset;
        for piece in part.chunks(PIECE_FRAMES) {
            file.write_guest_at(ram, piece, at)?;
            writeback.wrote(at, piece.count);
            at += piece.bytes();
            frames += piece.count;
        }
    }
    Ok(frames)
}
