//! Preallocates memory: a thread prefaults frames ahead of pass 0, so that writing them takes no
//! page faults.
//!
//! The peer may announce frames in EXPECT and never send them. So at most [`WINDOW`] frames are
//! preallocated beyond the number that has arrived with content. Frames that have arrived already
//! are skipped, and preallocation ends with pass 0.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use driftline_dirty_tracker::{FrameRun, Gfn};
use driftline_guest::Populate;

/// Frames preallocated ahead, 64 MiB: some tens of milliseconds of a fast link.
const WINDOW: u64 = 16 << 10;

/// Frames that one call prefaults, 2 MiB (one huge page). The end of a migration waits for at most
/// one call.
const PREFAULT_FRAMES: u64 = 512;

/// The expected frames, shared by the receiving threads.
pub(super) struct Prealloc {
    /// Announced frames that were not sent to the preallocating thread yet.
    runs: VecDeque<FrameRun>,
    /// Highest end of a run that has arrived in pass 0.
    reached: Gfn,
    /// Frames that may still be preallocated.
    credit: u64,
    to: Option<SyncSender<FrameRun>>,
}

/// The preallocating thread's half of the channel.
pub(super) struct Preallocator {
    from: Receiver<FrameRun>,
}

/// Returns both halves.
pub(super) fn pair() -> (Prealloc, Preallocator) {
    let (to, from) = sync_channel((WINDOW / PREFAULT_FRAMES) as usize);
    let prealloc =
        Prealloc { runs: VecDeque::new(), reached: Gfn(0), credit: WINDOW, to: Some(to) };
    (prealloc, Preallocator { from })
}

impl Prealloc {
    /// Adds announced frames.
    pub(super) fn expect(&mut self, runs: impl Iterator<Item = FrameRun>) {
        self.runs.extend(runs);
        self.feed();
    }

    /// Records that these frames have arrived, with content or without.
    pub(super) fn arrived(&mut self, run: FrameRun, with_content: bool) {
        self.reached = self.reached.max(run.end());
        self.credit += if with_content { run.count } else { 0 };
    }

    /// Sends frames to the preallocating thread, as many as it may prefault now.
    pub(super) fn feed(&mut self) {
        while let (Some(run), Some(to)) = (self.runs.front_mut(), &self.to) {
            // Up to the next boundary of a huge page.
            let aligned = PREFAULT_FRAMES - run.start.0 % PREFAULT_FRAMES;
            let next = FrameRun { start: run.start, count: run.count.min(aligned) };
            if next.end() > self.reached {
                // A full queue is retried with the next call.
                if next.count > self.credit || to.try_send(next).is_err() {
                    return;
                }
                self.credit -= next.count;
            }
            *run = FrameRun { start: next.end(), count: run.count - next.count };
            if run.count == 0 {
                self.runs.pop_front();
            }
        }
    }

    /// Ends the preallocation: pass 0 is over.
    pub(super) fn end(&mut self) {
        self.runs.clear();
        self.to = None;
    }
}

impl Preallocator {
    /// Prefaults frames of `guest` until the other half ends the preallocation, or `over` is set.
    pub(super) fn run<G: Populate + ?Sized>(self, guest: &G, over: &AtomicBool) {
        for run in self.from {
            if over.load(Ordering::Relaxed) {
                return;
            }
            guest.prefault(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, count: u64) -> FrameRun {
        FrameRun { start: Gfn(start), count }
    }

    fn requested_frames(preallocator: &Preallocator) -> u64 {
        preallocator.from.try_iter().map(|run| run.count).sum()
    }

    #[test]
    fn announcement_alone_gets_one_window_of_memory() {
        let (mut prealloc, preallocator) = pair();
        prealloc.expect([run(0, 1 << 32)].into_iter());
        assert_eq!(requested_frames(&preallocator), WINDOW);
        // Zero frames add no credit, at any address.
        prealloc.arrived(run(1 << 20, 1 << 20), false);
        prealloc.feed();
        assert_eq!(requested_frames(&preallocator), 0);
        prealloc.arrived(run(2 << 20, PREFAULT_FRAMES), true);
        prealloc.feed();
        let next: Vec<FrameRun> = preallocator.from.try_iter().collect();
        assert_eq!(
            next,
            [run((2 << 20) + PREFAULT_FRAMES, PREFAULT_FRAMES)],
            "frames before `reached` are skipped"
        );
    }

    #[test]
    fn expected_frames_are_preallocated_once_in_order() {
        let (mut prealloc, preallocator) = pair();
        let expected = [run(10, 100), run(WINDOW, 3 * WINDOW + 7)];
        prealloc.expect(expected.into_iter());
        let mut prefaulted = requested_frames(&preallocator);
        for piece in expected.into_iter().flat_map(|run| run.chunks(128)) {
            prealloc.arrived(piece, true);
            prealloc.feed();
            prefaulted += requested_frames(&preallocator);
        }
        assert_eq!(prefaulted, 100 + 3 * WINDOW + 7);
        prealloc.end();
        prealloc.expect([run(0, 9)].into_iter());
        assert_eq!(requested_frames(&preallocator), 0, "nothing is preallocated after the end");
    }
}
