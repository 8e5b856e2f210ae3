//! Takes a snapshot of a paused guest.

use std::time::{Duration, Instant};

use driftline_dirty_tracker::{DirtySet, FrameRun, Subscription};
use driftline_guest::{GuestRam, Paused, RunState, Section, VcpuPauses};
use driftline_store::{MemoryFileLayout, RangeLock, SnapshotState, StoreFile, unix_ms};
use serde::Serialize;

use super::error::SnapshotError;
use super::new_file::{SnapshotFile, UnfinishedFile, WithdrawnFile};
use crate::guest::Checkpointable;

/// Frames written at a time: 1 MiB. Their writeback begins before the next ones are written.
///
/// Milliseconds until all is durable, by `cargo bench -p driftline-checkpoint --bench snapshot` on
/// 2 processors and ext4 on a virtio disk, 26 November 2026. Two threads gain nothing over one.
///
/// | content | sync only | each 256 KiB | each MiB | each 8 MiB |
/// | --- | ---: | ---: | ---: | ---: |
/// | 64 MiB in runs of 64 KiB | 97 | 50 | 61 | 74 |
/// | 256 MiB in one run | 211 | 117 | 109 | 115 |
const PIECE_FRAMES: u64 = 256;

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
    /// The memory file. With [`SnapshotKind::Diff`] of a tracked guest, a file that has the length
    /// of the guest's memory is changed in place, so an earlier snapshot that has the same memory
    /// file is lost. It is refused if another guest is loaded from it. Any other file is replaced;
    /// the disk needs room for both.
    pub memory: SnapshotFile,
    /// The state file, which is replaced.
    pub state: SnapshotFile,
    /// Identity of the file that the guest's memory is mapped from, if any, as
    /// [`StoreFile::identity`] returns it. This file is never changed in place, because other
    /// guests may be mapped from it, too: it is replaced with a full memory file.
    pub backing: Option<(u64, u64)>,
    /// Sections of the caller's own, which follow those of the guest in the state file.
    pub extra: Vec<Section>,
}

/// A snapshot that was taken.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct SnapshotReport {
    /// Length of the memory file in bytes, including holes.
    pub memory_bytes: u64,
    /// Frames written to it.
    pub frames: u64,
    /// Whether an existing memory file was changed in place.
    pub merged: bool,
    /// Length of the state file in bytes.
    pub state_bytes: u64,
    /// Time until memory was written, in milliseconds.
    pub write_ms: f64,
    /// Time from then until memory was durable, in milliseconds.
    pub sync_ms: f64,
    /// Duration in milliseconds.
    pub time_ms: f64,
}

/// Writes a snapshot of a guest that its operator has paused. `changes`, if the guest's writes are
/// tracked for snapshots, is a subscription that is kept since before the guest was booted or
/// loaded; it is empty afterwards. Without it, a [`SnapshotKind::Diff`] is a [`SnapshotKind::Full`]
/// one: it has all pages that the host has memory for, and replaces any file. Rebased, it leaves
/// those pages as they were that the guest has given back to the host since.
///
/// On return the snapshot is durable. Drives are not in it: the caller makes the guest's writes to
/// them durable. Memory is written from where it is, without a copy of it.
///
/// # Errors
///
/// The guest is paused as before, and `changes` has all its frames again. No incomplete snapshot is
/// ever at the names in `request`, not even after a crash of the host: either no file was changed;
/// or the memory file was and there is no state file, which may mean that an earlier snapshot is
/// gone. The latter is so only if the error came after the new memory file had become durable, or
/// while a memory file was being changed in place.
pub fn create_snapshot<G: Checkpointable + ?Sized>(
    guest: &G,
    changes: Option<&mut Subscription>,
    request: &SnapshotRequest,
) -> Result<SnapshotReport, SnapshotError> {
    let since = Instant::now();
    let SnapshotRequest { kind, memory, state, backing, extra } = request;
    let span = tracing::info_span!("snapshot", ?kind);
    let _entered = span.enter();
    if memory.path() == state.path() {
        return Err(SnapshotError::SameFile(state.path()));
    }
    let tracked = changes.is_some();
    let (pause, sections) = OperatorPause::new(guest)?;
    let changed = changes.map(|changes| pause.paused.drain(changes)).transpose()?;
    let encoded = SnapshotState {
        vm_id: guest.vm_id(),
        created_unix_ms: unix_ms(),
        tracked,
        layout: guest.layout().clone(),
        config: guest.config(),
        sections: sections.into_iter().chain(extra.iter().cloned()).collect(),
    }
    .encode()?;
    let new_state = UnfinishedFile::new(state)?;
    new_state.file.write_all_at(&encoded, 0).map_err(|e| state.io("writing", e))?;
    new_state.sync()?;
    let layout = MemoryFileLayout::new(guest.layout());
    let output = MemoryOutput { guest, layout: &layout, pause: &pause, target: memory, state };
    let written = match changed.as_ref().filter(|_| *kind == SnapshotKind::Diff) {
        Some(changed) => output.write_diff(changed, *backing)?,
        None => output.replace(None)?,
    };
    new_state.publish()?;
    drop(written.earlier);
    if let Some(changed) = changed {
        changed.commit();
    }
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let report = SnapshotReport {
        memory_bytes: layout.bytes(),
        frames: written.frames,
        merged: written.merged,
        state_bytes: encoded.len() as u64,
        write_ms: ms(written.write),
        sync_ms: ms(written.sync),
        time_ms: ms(since.elapsed()),
    };
    tracing::info!(frames = report.frames, merged = report.merged, ms = report.time_ms, "taken");
    Ok(report)
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

    /// Fails if the guest was resumed since.
    fn check(&self) -> Result<(), SnapshotError> {
        let same = self.guest.vcpu_pauses() == self.before;
        let paused = self.guest.run_state() == RunState::Paused && !self.paused.was_running();
        if same && paused { Ok(()) } else { Err(SnapshotError::Resumed) }
    }
}

/// The memory of a guest on its way into a file.
struct MemoryOutput<'o, 'g, G: Checkpointable + ?Sized> {
    guest: &'g G,
    layout: &'o MemoryFileLayout,
    pause: &'o OperatorPause<'g, G>,
    target: &'o SnapshotFile,
    state: &'o SnapshotFile,
}

/// A memory file that is complete and durable.
struct WrittenMemory<'o> {
    frames: u64,
    merged: bool,
    write: Duration,
    sync: Duration,
    /// The state file that went with the file before.
    earlier: WithdrawnFile<'o>,
}

impl<'o, G: Checkpointable + ?Sized> MemoryOutput<'o, '_, G> {
    /// Writes `changed` to the file that exists, if that can be changed, or to a new one.
    fn write_diff(
        &self,
        changed: &DirtySet,
        backing: Option<(u64, u64)>,
    ) -> Result<WrittenMemory<'o>, SnapshotError> {
        let Some(file) = self.target.open()? else { return self.replace(Some(changed)) };
        let length = file.len().map_err(|e| self.target.io("reading", e))?;
        let identity = file.identity().map_err(|e| self.target.io("reading", e))?;
        if length != self.layout.bytes() {
            self.replace(Some(changed))
        } else if Some(identity) == backing {
            // All memory is what the backing file and the changes are together.
            self.replace(None)
        } else {
            self.merge(&*file, changed)
        }
    }

    /// Writes `changed` over `file`, which no guest may be loaded from. From the first write on, a
    /// state file at the new one's name does not go with the memory file any more.
    fn merge(
        &self,
        file: &dyn StoreFile,
        changed: &DirtySet,
    ) -> Result<WrittenMemory<'o>, SnapshotError> {
        match file.lock_range(0..self.layout.bytes(), RangeLock::Exclusive) {
            Ok(true) => {}
            Ok(false) => return Err(SnapshotError::InUse(self.target.path())),
            Err(e) => tracing::warn!("loaded guests are not looked for: no locks on files: {e}"),
        }
        let runs: Vec<FrameRun> = changed.runs().collect();
        // Before anything is withdrawn: it may fail.
        self.guest.fetch(&runs)?;
        let earlier = WithdrawnFile::new(self.state)?;
        let (frames, write, sync) = self.write(file, runs)?;
        Ok(WrittenMemory { frames, merged: true, write, sync, earlier })
    }

    /// Writes `changed`, or else all memory, to a new file that replaces the one before.
    fn replace(&self, changed: Option<&DirtySet>) -> Result<WrittenMemory<'o>, SnapshotError> {
        let runs = match changed {
            Some(changed) => changed.runs().collect(),
            None => self.guest.resident()?,
        };
        self.guest.fetch(&runs)?;
        let new = UnfinishedFile::new(self.target)?;
        new.file.truncate(self.layout.bytes()).map_err(|e| self.target.io("growing", e))?;
        let (frames, write, sync) = self.write(&*new.file, runs)?;
        // No moment has the new memory file beside an earlier snapshot's state.
        let earlier = WithdrawnFile::new(self.state)?;
        match new.publish() {
            Ok(()) => Ok(WrittenMemory { frames, merged: false, write, sync, earlier }),
            Err(e) => {
                if new.is_unpublished() {
                    earlier.put_back();
                }
                Err(e.into())
            }
        }
    }

    /// Writes `runs`, which are there, to their places and makes them durable. Nothing else is
    /// written, so that the rest of a new file is a hole. Returns the number of frames, and the
    /// durations of both.
    fn write(
        &self,
        file: &dyn StoreFile,
        runs: Vec<FrameRun>,
    ) -> Result<(u64, Duration, Duration), SnapshotError> {
        let since = Instant::now();
        let frames = write_runs(file, self.guest.ram(), self.layout, &runs)
            .map_err(|e| self.target.io("writing", e))?;
        let write = since.elapsed();
        file.sync().map_err(|e| self.target.io("syncing", e))?;
        self.pause.check()?;
        Ok((frames, write, since.elapsed() - write))
    }
}

/// Writes `runs`, which ascend, to their places. Returns the number of frames.
fn write_runs(
    file: &dyn StoreFile,
    ram: &GuestRam,
    layout: &MemoryFileLayout,
    runs: &[FrameRun],
) -> std::io::Result<u64> {
    let (mut frames, mut unwritten, mut from) = (0, 0, 0);
    for (part, offset) in runs.iter().flat_map(|run| layout.parts(*run)) {
        let mut at = offset;
        for piece in part.chunks(PIECE_FRAMES) {
            file.write_guest_at(ram, piece, at)?;
            at += piece.bytes();
            frames += piece.count;
            unwritten += piece.count;
            if unwritten >= PIECE_FRAMES {
                file.begin_writeback(from, at - from);
                (unwritten, from) = (0, at);
            }
        }
    }
    Ok(frames)
}
