//! The copy thread: copies write-protected frames while the guest runs and unprotects them, first
//! those with a waiting writer. Before the pause, it unprotects a frame that the guest writes to
//! without copying it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, FrameSet};
use driftline_guest::{GuestError, WRITE_WAIT_LIMIT};
use parking_lot::Mutex;

use crate::chunks::Pieces;
use crate::copy_policy::CopyPolicy;
use crate::guest::Checkpointable;
use crate::protection::{EpochProtection, UnprotectOnDrop, WriterWaits};
use crate::report::EpochFailure;
use crate::staging::copy;

/// Frames unprotected before the pause; `None` once no more frames are unprotected. One lock covers
/// the list and that decision, so that the list is complete at the pause: the writer of an
/// unprotected frame may have been stopped before its write, and then writes after the pause.
pub(crate) type UnprotectedFrames = Mutex<Option<Vec<FrameRun>>>;

/// A piece on its way to the file.
pub(crate) struct CopiedPiece<'b> {
    pub(crate) runs: Vec<FrameRun>,
    pub(crate) buffer: &'b mut [u8],
}

/// Copies write-protected frames and unprotects them.
pub(crate) struct BackgroundCopier<'m, 'b> {
    pub(crate) guest: &'m dyn Checkpointable,
    pub(crate) policy: &'m CopyPolicy,
    pub(crate) protection: &'m EpochProtection<'m>,
    pub(crate) unprotected: &'m UnprotectedFrames,
    /// The protected frames, and those among them that were copied in the pause; sent when the
    /// guest resumes. Closed if there is nothing to copy.
    pub(crate) copy_sets: Receiver<(FrameSet, FrameSet)>,
    pub(crate) empty: Receiver<&'b mut [u8]>,
    pub(crate) to_file: Sender<CopiedPiece<'b>>,
    pub(crate) piece_frames: u64,
    pub(crate) waits: WriterWaits,
}

/// Result of the copy thread.
#[derive(Debug, Default)]
pub(crate) struct BackgroundCopyStats {
    pub(crate) frames: u64,
    pub(crate) waits: u64,
    pub(crate) waited: Duration,
}

impl<'b> BackgroundCopier<'_, 'b> {
    pub(crate) fn run(mut self) -> Result<BackgroundCopyStats, EpochFailure> {
        let _unprotects = UnprotectOnDrop(self.protection);
        let frames = match self.until_the_pause()? {
            Some((frames, late)) => self.copy_all(&frames, &late)?,
            None => 0,
        };
        Ok(BackgroundCopyStats { frames, waits: self.waits.times, waited: self.waits.all() })
    }

    /// Copies `frames` except `late`. Returns the number copied. If the file has failed, ends early
    /// without an error, because the file's own error explains more.
    fn copy_all(&mut self, frames: &FrameSet, late: &FrameSet) -> Result<u64, EpochFailure> {
        let frames: FrameSet = frames.iter().flat_map(|run| late.gaps(run)).collect();
        let mut pieces =
            Pieces::new(self.guest.layout(), &frames, self.piece_frames, self.policy.span_gap);
        let mut saved = 0;
        while let Some(next) = pieces.next() {
            // Room comes before the choice of the piece: a writer may begin to wait meanwhile.
            let Some(buffer) = self.room(&pieces)? else { return Ok(saved) };
            let piece = self.awaited_piece(&pieces)?.unwrap_or(next);
            let runs = pieces.runs(piece).to_vec();
            copy(buffer, self.guest.ram(), runs.iter().copied())?;
            pieces.spans(piece).try_for_each(|span| self.protection.unprotect(span))?;
            self.waits.over();
            pieces.done(piece);
            saved += runs.iter().map(|run| run.count).sum::<u64>();
            if self.to_file.send(CopiedPiece { runs, buffer }).is_err() {
                return Ok(saved);
            }
        }
        Ok(saved)
    }

    /// Returns the piece that a writer waits for, if it is to be copied. Unprotects a frame that is
    /// not.
    fn awaited_piece(&mut self, pieces: &Pieces) -> Result<Option<usize>, GuestError> {
        loop {
            self.waits.look(self.protection, Duration::ZERO)?;
            let Some(FrameRun { start, .. }) = self.waits.awaited else { return Ok(None) };
            if let Some(piece) = pieces.with(start) {
                return Ok(Some(piece));
            }
            // The frame is unprotected already, or was copied in the pause.
            self.protection.unprotect(FrameRun { start, count: 1 })?;
            self.waits.over();
        }
    }

    /// Unprotects frames that are written to, until the sets to copy arrive. Returns `None` if
    /// there are none.
    fn until_the_pause(&mut self) -> Result<Option<(FrameSet, FrameSet)>, EpochFailure> {
        loop {
            match self.copy_sets.try_recv() {
                Ok(sets) => return Ok(Some(sets)),
                Err(TryRecvError::Disconnected) => return Ok(None),
                Err(TryRecvError::Empty) => {}
            }
            self.waits.look(self.protection, self.policy.pause_poll)?;
            let Some(frames) = self.waits.awaited else { continue };
            let mut guard = self.unprotected.lock();
            let Some(unprotected) = &mut *guard else {
                drop(guard);
                // The guest is paused, or was.
                let sets = self.copy_sets.recv().ok();
                // The time of a pause does not count against the store.
                self.waits.since = Some(Instant::now());
                return Ok(sets);
            };
            self.protection.unprotect(frames)?;
            unprotected.push(frames);
            self.waits.over();
        }
    }

    /// Returns room for a piece, or `None` if the file has failed. Fails if a writer has waited for
    /// too long.
    fn room(&mut self, pieces: &Pieces) -> Result<Option<&'b mut [u8]>, EpochFailure> {
        let mut limit = Duration::ZERO;
        loop {
            match self.empty.recv_timeout(limit) {
                Ok(buffer) => return Ok(Some(buffer)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => limit = self.policy.room_poll,
            }
            if self.awaited_piece(pieces)?.is_some() && self.waits.all() >= WRITE_WAIT_LIMIT {
                return Err(EpochFailure::Stalled(WRITE_WAIT_LIMIT));
            }
        }
    }
}

#[cfg(all(test, feature = "testing"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use driftline_dirty_tracker::{Gfn, PAGE_SIZE};
    use driftline_guest::testing::{MemoryConfig, MemoryGuest};
    use driftline_guest::{GuestContents, VmId};

    /// Makes a guest wait for a store that takes one frame each `every`, or none. Returns how long
    /// the copy thread allowed that.
    fn stalled(every: Option<Duration>) -> Duration {
        let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
        let opened = guest.write_protection().unwrap().unwrap();
        let protection = &EpochProtection::new(&*opened);
        let frames = FrameRun { start: Gfn(3), count: 40 };
        protection.protect(&[frames]).unwrap();
        let mut buffer = vec![0; PAGE_SIZE as usize];
        let ((to_copier, copy_sets), (to_file, full)) = (mpsc::channel(), mpsc::channel());
        let (to_guest, empty) = mpsc::channel();
        to_copier.send((FrameSet::from_iter([frames]), FrameSet::new())).unwrap();
        if every.is_some() {
            to_guest.send(&mut buffer[..]).unwrap();
        }
        let writer = guest.clone();
        // In the reverse order of the pieces.
        let writer =
            thread::spawn(move || (3..43).rev().try_for_each(|gfn| writer.write(Gfn(gfn), &[1])));
        let (guest_dyn, unprotected) = (&*guest as &dyn Checkpointable, &Mutex::new(None));
        let (waits, piece_frames) = (WriterWaits::default(), 1);
        let policy = &CopyPolicy::DEFAULT;
        let copier = BackgroundCopier {
            guest: guest_dyn,
            policy,
            protection,
            unprotected,
            copy_sets,
            empty,
            to_file,
            piece_frames,
            waits,
        };
        let since = Instant::now();
        thread::scope(|scope| {
            scope.spawn(move || {
                for CopiedPiece { buffer, .. } in full {
                    thread::sleep(every.unwrap_or(WRITE_WAIT_LIMIT));
                    let _ = to_guest.send(buffer);
                }
            });
            let saved = copier.run();
            assert!(matches!(saved, Err(EpochFailure::Stalled(_))), "{saved:?}");
        });
        let took = since.elapsed();
        writer.join().unwrap().unwrap();
        assert_eq!(guest.protected(), 0);
        protection.protect(&[frames]).unwrap_err();
        assert_eq!(guest.protected(), 0, "no thread would serve a waiting writer");
        took
    }

    #[test]
    fn stuck_store_stalls_the_guest_for_limited_time() {
        assert!(stalled(None) >= WRITE_WAIT_LIMIT);
    }

    #[test]
    fn slow_store_stalls_the_guest_for_limited_time() {
        // The limit is for the sum of the waits. A limit for each wait would not end the copy,
        // because no single wait is that long: all 40 frames would be copied.
        let every = WRITE_WAIT_LIMIT / 8;
        assert!(stalled(Some(every)) >= WRITE_WAIT_LIMIT);
    }
}
