//! The copy of an epoch. The guest is paused for as long as it takes to drain what changed and
//! to save its state. Changed frames are copied in that pause. If there are many and the guest can
//! [write-protect](WriteProtection) them, they are copied after the guest has resumed:
//!
//! ```text
//! this thread   collect, drain, protect; repeat   PAUSE: save, drain, copy   write ...  publish
//! copy thread       unprotect what is written ..                             copy, unprotect ..
//! guest         runs .........................                               runs; a write to an
//!                                                                            uncopied frame waits
//! ```
//!
//! So the length of the pause depends on what changes during the last round of protection, not on
//! what changed before it. Frames are protected before the pause. If many frames change meanwhile,
//! another round protects them. A frame that the guest writes before the pause is unprotected
//! immediately, becomes dirty again, and is copied in the pause. After the pause, a frame is
//! unprotected when it has been copied: frames with a waiting writer first, the others in order.
//! Copies wait in the staging area until they are written to the file. If the file is slow, writers
//! wait for room in the area.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{DirtySet, FrameSet, PAGE_SIZE};
use driftline_guest::{GuestError, WriteProtection};
use parking_lot::Mutex;

use crate::background_copy::{
    BackgroundCopier, BackgroundCopyStats, CopiedPiece, UnprotectedFrames,
};
use crate::chunks::{in_slots, spans};
use crate::copy_time::{CopyTime, CopyTimes};
use crate::pause::{Epoch, Pause, longest_stop};
use crate::precopy_buffer::StagedFrames;
use crate::protect_ahead::{ProtectedAhead, protect_ahead};
use crate::protection::{COPY_THREAD, EpochProtection, UnprotectOnDrop, WriterWaits};
use crate::report::{EpochFailure, EpochStep, FailedStep, step};
use crate::staging::{Staging, copy, window};

/// Copies an epoch: its memory, its drives and its state.
pub(crate) struct EpochCopier<'s> {
    pub(crate) epoch: Epoch<'s>,
    pub(crate) protection: Option<&'s dyn WriteProtection>,
    pub(crate) times: &'s mut CopyTimes,
    pub(crate) staging: &'s mut Staging,
}

/// An epoch whose content is all in the file; nothing of it is durable yet.
pub(crate) struct EpochCopy {
    /// Changed frames and blocks, to be committed once the epoch is durable.
    pub(crate) changed: Vec<DirtySet>,
    /// Frames that had to fit into the staging area together.
    pub(crate) staged: u64,
    /// Frames, and blocks of drives, that were copied in the pause. Frames count only if none were
    /// copied in the background.
    pub(crate) in_pause: u64,
    /// Frames copied while the guest ran.
    pub(crate) copied_after: u64,
    /// Number of times a write waited, before the pause or after it.
    pub(crate) waits: u64,
    /// Time for which writes waited.
    pub(crate) waited: Duration,
    /// Length of the pause, by the vCPUs' clocks where these are available.
    pub(crate) pause: Duration,
    pub(crate) resumed: Instant,
}

/// The memory of an epoch and the state, in the file.
struct MemoryCopy {
    changed: Vec<DirtySet>,
    staged: u64,
    in_pause: u64,
    /// Result of the background copy.
    saved: BackgroundCopyStats,
    /// Length by the clock of this thread.
    pause: Duration,
    resumed: Instant,
}

impl EpochCopier<'_> {
    /// Copies the state, and what changed since the last epoch. On every return path the guest runs
    /// again if it ran before, and no write waits for a frame or a block.
    pub(crate) fn run(mut self) -> Result<EpochCopy, FailedStep> {
        let before = self.epoch.guest.vcpu_pauses();
        let memory = self.copy_memory()?;
        // The vCPUs have resumed by now. There may be another pause while drives are copied.
        let pause = longest_stop(self.epoch.guest, &before).unwrap_or(memory.pause);
        let Self { epoch: Epoch { guest, disks, file, .. }, staging, .. } = self;
        let in_pause = memory.in_pause + disks.copied_in_pause();
        // Drives come after memory, because vCPUs wait for memory.
        let (blocks, waits) = step(EpochStep::CopyDrives, || disks.finish(staging, file))?;
        // All of memory has been read.
        step(EpochStep::Copy, || guest.memory_right().check().map_err(GuestError::from))?;
        let mut changed = memory.changed;
        changed.extend(blocks);
        Ok(EpochCopy {
            changed,
            staged: memory.staged,
            in_pause,
            copied_after: memory.saved.frames,
            waits: memory.saved.waits + waits.times,
            waited: memory.saved.waited + waits.time,
            pause,
            resumed: memory.resumed,
        })
    }

    fn copy_memory(&mut self) -> Result<MemoryCopy, FailedStep> {
        // What is collected here need not be collected in the pause.
        let early = self.epoch.drain()?;
        let (frames, room) = (early.frames(), self.staging.frames());
        let time = self.times.of_next(self.epoch.policy, frames, room, self.protection.is_some());
        match (time, self.protection) {
            (CopyTime::Background, Some(protection)) => self.copy_in_background(protection, early),
            (CopyTime::BeforePause, _) => self.copy_in_pause(Some(early)),
            _ => {
                early.give_back();
                self.copy_in_pause(None)
            }
        }
    }

    /// Copies memory in the pause. `early` holds the frames that are already drained, if any: they
    /// are copied before it.
    fn copy_in_pause(&mut self, early: Option<DirtySet>) -> Result<MemoryCopy, FailedStep> {
        let Self { epoch, times, staging, .. } = self;
        let guest = epoch.guest;
        let mut frames = match &early {
            Some(early) => {
                step(EpochStep::CopyLive, || StagedFrames::before_pause(guest, staging, early))?
            }
            None => StagedFrames::default(),
        };
        let Pause { changed, sections, handled: (), time, resumed } =
            epoch.pause(|changed, file| {
                step(EpochStep::Copy, || frames.in_pause(guest, staging, file, changed.runs()))
            })?;
        step::<_, EpochFailure>(EpochStep::Write, || {
            let Epoch { policy, disks, file, .. } = epoch;
            for (runs, at) in frames.left() {
                let left = runs.iter().map(|run| run.count).sum();
                let piece_frames = if disks.is_empty() { left } else { policy.frames_per_look };
                for from in (0..left).step_by(piece_frames.max(1) as usize) {
                    let count = piece_frames.min(left - from);
                    let part = window(runs.iter().copied(), from, count);
                    file.frames(part, staging.from(at + from, count), false)?;
                    disks.write_saved(&mut **file)?;
                }
            }
            Ok(sections.iter().try_for_each(|section| file.section(section))?)
        })?;
        if early.is_some() {
            times.note(epoch.policy, &frames);
        }
        Ok(MemoryCopy {
            changed: early.into_iter().chain([changed]).collect(),
            staged: frames.staged(),
            in_pause: frames.copied_in_pause(),
            saved: BackgroundCopyStats::default(),
            pause: time,
            resumed,
        })
    }

    /// Copies memory after the guest has resumed. `early` is already drained.
    fn copy_in_background(
        &mut self,
        protection: &dyn WriteProtection,
        early: DirtySet,
    ) -> Result<MemoryCopy, FailedStep> {
        let Self { epoch, staging, .. } = self;
        let (guest, policy) = (epoch.guest, epoch.policy);
        let protection = &EpochProtection::new(protection);
        // The copy thread has its own guard: if it ends early, nothing can be protected afterwards.
        let _unprotects = UnprotectOnDrop(protection);
        let piece_frames = policy.piece_frames.min(staging.frames() / 2);
        let (late_room, room) = staging.split(policy.late_frames.min(staging.frames() / 2));
        let (to_guest, empty) = mpsc::channel();
        for buffer in room.chunks_exact_mut((piece_frames * PAGE_SIZE) as usize) {
            // The receiver is in this function.
            let _ = to_guest.send(buffer);
        }
        let (to_copier, copy_sets) = mpsc::channel();
        let (to_file, full) = mpsc::channel();
        let unprotected = &Mutex::new(Some(Vec::new()));
        let waits = WriterWaits::default();
        let copier = BackgroundCopier {
            guest,
            policy,
            protection,
            unprotected,
            copy_sets,
            empty,
            to_file,
            piece_frames,
            waits,
        };
        thread::scope(|scope| {
            let span = tracing::Span::current();
            let copying = thread::Builder::new()
                .name("checkpoint-copy".into())
                .spawn_scoped(scope, move || span.in_scope(|| copier.run()))
                .map_err(|cause| EpochFailure::NoThread { thread: COPY_THREAD, cause });
            let copying =
                copying.map_err(|cause| FailedStep { step: EpochStep::Protect, cause })?;
            let background =
                Background { epoch, protection, unprotected, late_room, to_copier, full, to_guest };
            let taken = background.take(early);
            // The channels are closed: the copy thread ends if it has not ended yet.
            let panicked = || Err(EpochFailure::ThreadEnded { thread: COPY_THREAD });
            let saved = copying.join().unwrap_or_else(|_| panicked());
            // Report the copy thread's error first: the other error may follow from it. The copy
            // thread never fails because of an error of this thread.
            let step = EpochStep::CopyInBackground;
            let saved = saved.map_err(|cause| FailedStep { step, cause })?;
            Ok(MemoryCopy { saved, ..taken? })
        })
    }
}

/// This thread's end of a copy in the background.
struct Background<'m, 'e, 'b> {
    epoch: &'m mut Epoch<'e>,
    protection: &'m EpochProtection<'m>,
    unprotected: &'m UnprotectedFrames,
    late_room: &'b mut [u8],
    to_copier: Sender<(FrameSet, FrameSet)>,
    full: Receiver<CopiedPiece<'b>>,
    to_guest: Sender<&'b mut [u8]>,
}

impl Background<'_, '_, '_> {
    /// Pauses the guest, and then writes what the copy thread copies.
    fn take(self, early: DirtySet) -> Result<MemoryCopy, FailedStep> {
        let Self { epoch, protection, unprotected, late_room, to_copier, full, to_guest } = self;
        let (guest, policy) = (epoch.guest, epoch.policy);
        let layout = guest.layout();
        let ProtectedAhead { mut frames, left, mut drained } =
            protect_ahead(guest, policy, protection, unprotected, early, epoch.subscription)?;
        let Pause { changed, sections, handled: late, time, resumed } =
            epoch.pause(|changed, _| {
                let unprotected = unprotected.lock().take();
                let unprotected = unprotected.into_iter().flatten();
                let mut late: FrameSet =
                    changed.runs().chain(left.iter()).chain(unprotected).collect();
                if late.frames() * PAGE_SIZE <= late_room.len() as u64 {
                    step(EpochStep::Copy, || {
                        copy(late_room, guest.ram(), in_slots(layout, &late))
                    })?;
                } else {
                    let spans = spans(layout, &late, policy.span_gap);
                    step(EpochStep::Protect, || protection.protect(&spans))?;
                    frames.insert_all(late.as_slice());
                    late.clear();
                }
                Ok(late)
            })?;
        // Since the pause took the unprotected frames, no frame has been unprotected without being
        // copied. If the copy thread has ended, its join returns the reason.
        let _ = to_copier.send((frames, late.clone()));
        step::<_, EpochFailure>(EpochStep::Write, || {
            let Epoch { disks, file, .. } = epoch;
            for CopiedPiece { runs, buffer } in full {
                file.frames(runs.iter().copied(), buffer, false)?;
                // The copy thread may have ended because everything is copied.
                let _ = to_guest.send(buffer);
                disks.write_saved(&mut **file)?;
            }
            let bytes = (late.frames() * PAGE_SIZE) as usize;
            file.frames(in_slots(layout, &late), &late_room[..bytes], false)?;
            Ok(sections.iter().try_for_each(|section| file.section(section))?)
        })?;
        drained.push(changed);
        Ok(MemoryCopy {
            changed: drained,
            staged: 0,
            in_pause: 0,
            saved: BackgroundCopyStats::default(),
            pause: time,
            resumed,
        })
    }
}
