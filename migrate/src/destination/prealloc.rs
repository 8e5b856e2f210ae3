//! Memory for frames that are still to come: a thread has the host give it to them ahead of pass 0,
//! so that they are not written one page fault after the other.
//!
//! EXPECT says what will come, and is only a word: so no more is prepared than [`WINDOW`] frames
//! besides as many as have come with content. Frames that have come already, or that follow pass 0,
//! are not prepared.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use driftline_dirty_tracker::{FrameRun, Gfn};
use driftline_guest::Guest;

/// 64 MiB: some tens of milliseconds of a fast link.
const WINDOW: u64 = 16 << 10;

/// Frames that are prepared by one call, 2 MiB and so a huge page: a migration that is over does
/// not wait for more.
const AT_ONCE: u64 = 512;

/// What is expected, for the thread that receives.
pub(super) struct Prealloc {
    /// As announced, less what the preallocator has been told of.
    runs: VecDeque<FrameRun>,
    /// Where pass 0 is.
    reached: Gfn,
    /// Frames that may still be prepared.
    credit: u64,
    to: Option<SyncSender<FrameRun>>,
}

/// The thread's half.
pub(super) struct Preallocator {
    from: Receiver<FrameRun>,
}

/// Both halves.
pub(super) fn pair() -> (Prealloc, Preallocator) {
    let (to, from) = sync_channel((WINDOW / AT_ONCE) as usize);
    let prealloc =
        Prealloc { runs: VecDeque::new(), reached: Gfn(0), credit: WINDOW, to: Some(to) };
    (prealloc, Preallocator { from })
}

impl Prealloc {
    /// These frames will come.
    pub(super) fn expect(&mut self, runs: impl Iterator<Item = FrameRun>) {
        self.runs.extend(runs);
        self.go_on();
    }

    /// These frames have come, with content or without.
    pub(super) fn arrived(&mut self, run: FrameRun, with_content: bool) {
        self.reached = self.reached.max(run.end());
        self.credit += if with_content { run.count } else { 0 };
    }

    /// Tells the preallocator of what it may prepare now.
    pub(super) fn go_on(&mut self) {
        while let (Some(run), Some(to)) = (self.runs.front_mut(), &self.to) {
            // Up to where a huge page can begin.
            let aligned = AT_ONCE - run.start.0 % AT_ONCE;
            let next = FrameRun { start: run.start, count: run.count.min(aligned) };
            if next.end() > self.reached {
                // A preallocator that is busy, or is not there, is told later, or never.
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

    /// Pass 0 is over.
    pub(super) fn end(&mut self) {
        self.runs.clear();
        self.to = None;
    }
}

impl Preallocator {
    /// Prepares frames of `guest` as it is told, until nothing is expected any more or all is
    /// `over`.
    pub(super) fn run<G: Guest + ?Sized>(self, guest: &G, over: &AtomicBool) {
        for run in self.from {
            if over.load(Ordering::Relaxed) {
                return;
            }
            guest.prepare(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, count: u64) -> FrameRun {
        FrameRun { start: Gfn(start), count }
    }

    fn told(preallocator: &Preallocator) -> u64 {
        preallocator.from.try_iter().map(|run| run.count).sum()
    }

    #[test]
    fn a_word_gets_no_more_than_its_share_of_memory() {
        let (mut prealloc, preallocator) = pair();
        prealloc.expect([run(0, 1 << 32)].into_iter());
        assert_eq!(told(&preallocator), WINDOW);
        // Zeros, wherever they are, get nothing more.
        prealloc.arrived(run(1 << 20, 1 << 20), false);
        prealloc.go_on();
        assert_eq!(told(&preallocator), 0);
        prealloc.arrived(run(2 << 20, AT_ONCE), true);
        prealloc.go_on();
        let next: Vec<FrameRun> = preallocator.from.try_iter().collect();
        assert_eq!(next, [run((2 << 20) + AT_ONCE, AT_ONCE)], "what lies behind is passed over");
    }

    #[test]
    fn all_of_what_comes_in_order_is_prepared_but_what_has_come() {
        let (mut prealloc, preallocator) = pair();
        let expected = [run(10, 100), run(WINDOW, 3 * WINDOW + 7)];
        prealloc.expect(expected.into_iter());
        let mut prepared = told(&preallocator);
        for piece in expected.into_iter().flat_map(|run| run.chunks(128)) {
            prealloc.arrived(piece, true);
            prealloc.go_on();
            prepared += told(&preallocator);
        }
        assert_eq!(prepared, 100 + 3 * WINDOW + 7);
        prealloc.end();
        prealloc.expect([run(0, 9)].into_iter());
        assert_eq!(told(&preallocator), 0, "after its end nothing is prepared");
    }
}
