//! Memory for frames that are still to come: a thread has the host give it to them ahead of pass 0, so
//! that they are not written one page fault after the other.
//!
//! EXPECT says what will come, and is only a word: so no more is prepared than [`AHEAD`] frames besides as many as
//! have come with content. Frames that have come already, or that follow pass 0, are not prepared.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use driftline_dirty_tracker::{FrameRun, Gfn};
use driftline_guest::Guest;

/// 64 MiB: some tens of milliseconds of a fast link.
const AHEAD: u64 = 16 << 10;

/// Frames that are prepared by one call, 2 MiB and so a huge page: a migration that is over does not wait for more.
const AT_ONCE: u64 = 512;

/// What is expected, for the thread that receives.
pub(super) struct Ahead {
    /// As announced, less what the preparer has been told of.
    runs: VecDeque<FrameRun>,
    /// Where pass 0 is.
    reached: Gfn,
    /// Frames that may still be prepared.
    credit: u64,
    to: Option<SyncSender<FrameRun>>,
}

/// The thread's half.
pub(super) struct Preparer {
    from: Receiver<FrameRun>,
}

/// Both halves.
pub(super) fn pair() -> (Ahead, Preparer) {
    let (to, from) = sync_channel((AHEAD / AT_ONCE) as usize);
    let ahead = Ahead { runs: VecDeque::new(), reached: Gfn(0), credit: AHEAD, to: Some(to) };
    (ahead, Preparer { from })
}

impl Ahead {
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

    /// Tells the preparer of what it may prepare now.
    pub(super) fn go_on(&mut self) {
        while let (Some(run), Some(to)) = (self.runs.front_mut(), &self.to) {
            // Up to where a huge page can begin.
            let aligned = AT_ONCE - run.start.0 % AT_ONCE;
            let next = FrameRun { start: run.start, count: run.count.min(aligned) };
            if next.end() > self.reached {
                // A preparer that is busy, or is not there, is told later, or never.
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

impl Preparer {
    /// Prepares frames of `guest` as it is told, until nothing is expected any more or all is `over`.
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

    fn told(preparer: &Preparer) -> u64 {
        preparer.from.try_iter().map(|run| run.count).sum()
    }

    #[test]
    fn a_word_gets_no_more_than_its_share_of_memory() {
        let (mut ahead, preparer) = pair();
        ahead.expect([run(0, 1 << 32)].into_iter());
        assert_eq!(told(&preparer), AHEAD);
        // Zeros, wherever they are, get nothing more.
        ahead.arrived(run(1 << 20, 1 << 20), false);
        ahead.go_on();
        assert_eq!(told(&preparer), 0);
        ahead.arrived(run(2 << 20, AT_ONCE), true);
        ahead.go_on();
        let next: Vec<FrameRun> = preparer.from.try_iter().collect();
        assert_eq!(next, [run((2 << 20) + AT_ONCE, AT_ONCE)], "what lies behind is passed over");
    }

    #[test]
    fn all_of_what_comes_in_order_is_prepared_but_what_has_come() {
        let (mut ahead, preparer) = pair();
        let expected = [run(10, 100), run(AHEAD, 3 * AHEAD + 7)];
        ahead.expect(expected.into_iter());
        let mut prepared = told(&preparer);
        for piece in expected.into_iter().flat_map(|run| run.chunks(128)) {
            ahead.arrived(piece, true);
            ahead.go_on();
            prepared += told(&preparer);
        }
        assert_eq!(prepared, 100 + 3 * AHEAD + 7);
        ahead.end();
        ahead.expect([run(0, 9)].into_iter());
        assert_eq!(told(&preparer), 0, "after its end nothing is prepared");
    }
}
