//! Splits the frames of an epoch into pieces. The frames of a piece are copied and unprotected
//! together.
//!
//! ```text
//! frames    ##.#  ##       .: a gap small enough to be protected with its neighbours
//! spans     [  ]  []       what is protected
//! pieces    0  1  1        each covers the spans from its first frame to the next piece's first
//! ```

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, Layout};

/// Returns the runs to protect so that all of `frames` is protected: few runs, each within one
/// slot. Runs with at most `gap` frames between them become one.
pub(crate) fn spans(layout: &Layout, frames: &FrameSet, gap: u64) -> Vec<FrameRun> {
    let mut spans: Vec<FrameRun> = Vec::new();
    for slot in layout.slots() {
        let first = spans.len();
        for run in frames.within(slot.run()) {
            match spans[first..].last_mut() {
                Some(span) if run.start.0 - span.end().0 <= gap => {
                    span.count = run.end().0 - span.start.0;
                }
                _ => spans.push(run),
            }
        }
    }
    spans
}

/// Returns `frames` as runs that each lie in one slot.
pub(crate) fn in_slots(layout: &Layout, frames: &FrameSet) -> impl Iterator<Item = FrameRun> {
    layout.slots().flat_map(|slot| frames.within(slot.run()))
}

/// Frames to be copied, in pieces, and which pieces are done.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Ascending; each run lies in one slot and one piece.
    runs: Vec<FrameRun>,
    /// For each piece, the index of its first run; ascending.
    firsts: Vec<usize>,
    done: Vec<bool>,
    /// All pieces before this one are done.
    next: usize,
    spans: FrameSet,
}

impl Pieces {
    /// Splits `frames` into pieces of at most `most` frames, and of at least one. `gap` is that of
    /// [`spans`].
    pub(crate) fn new(layout: &Layout, frames: &FrameSet, most: u64, gap: u64) -> Self {
        let most = most.max(1);
        let (mut runs, mut firsts, mut room) = (Vec::new(), Vec::new(), 0);
        for mut run in in_slots(layout, frames) {
            while run.count > 0 {
                if room == 0 {
                    firsts.push(runs.len());
                    room = most;
                }
                let count = run.count.min(room);
                runs.push(FrameRun { start: run.start, count });
                room -= count;
                run = FrameRun { start: Gfn(run.start.0 + count), count: run.count - count };
            }
        }
        let spans = spans(layout, frames, gap).into_iter().collect();
        Self { done: vec![false; firsts.len()], runs, firsts, next: 0, spans }
    }

    /// Returns the next piece that is not done, in order.
    pub(crate) fn next(&mut self) -> Option<usize> {
        while *self.done.get(self.next)? {
            self.next += 1;
        }
        Some(self.next)
    }

    /// Returns the piece with which `gfn` is unprotected, if that piece is not done.
    pub(crate) fn with(&self, gfn: Gfn) -> Option<usize> {
        let after = self.firsts.partition_point(|first| self.runs[*first].start <= gfn);
        let piece = after.checked_sub(1)?;
        (!self.done[piece] && self.spans.contains(gfn)).then_some(piece)
    }

    /// Returns the runs of `piece` to be copied.
    pub(crate) fn runs(&self, piece: usize) -> &[FrameRun] {
        let first = self.firsts.get(piece).copied().unwrap_or(self.runs.len());
        let end = self.firsts.get(piece + 1).copied().unwrap_or(self.runs.len());
        &self.runs[first..end]
    }

    /// Returns the runs to be unprotected with `piece`.
    pub(crate) fn spans(&self, piece: usize) -> impl Iterator<Item = FrameRun> {
        let start = self.runs(piece).first().map_or(Gfn(u64::MAX), |run| run.start);
        let next = self.runs(piece + 1).first().map_or(Gfn(u64::MAX), |run| run.start);
        self.spans.within(FrameRun { start, count: next.0 - start.0 })
    }

    /// Marks `piece` as done.
    pub(crate) fn done(&mut self, piece: usize) {
        if let Some(done) = self.done.get_mut(piece) {
            *done = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use driftline_dirty_tracker::{Slot, SlotId};
    use proptest::prelude::*;

    use super::*;

    /// Two adjacent slots, and one apart.
    fn layout() -> Layout {
        let slot = |id, base, frames| Slot { id: SlotId(id), base: Gfn(base), frames };
        Layout::new([slot(0, 3, 200), slot(1, 203, 100), slot(2, 310, 300)]).unwrap()
    }

    const GAP: u64 = crate::copy_policy::CopyPolicy::DEFAULT.span_gap;

    proptest! {
        #[test]
        fn pieces_copy_and_unprotect_every_frame_once(
            wanted in prop::collection::vec((0u64..620, 1u64..40), 0..20),
            most in 1u64..70,
            order in prop::collection::vec(0u64..620, 0..40),
        ) {
            let layout = layout();
            let mut frames = FrameSet::new();
            for (start, count) in wanted {
                let run = FrameRun { start: Gfn(start), count };
                for slot in layout.slots() {
                    let low = run.start.max(slot.base);
                    let high = run.end().min(slot.run().end());
                    frames.insert(FrameRun { start: low, count: high.0.saturating_sub(low.0) });
                }
            }
            let all = spans(&layout, &frames, GAP);
            prop_assert!(all.iter().all(|span| layout.contains(*span)), "none crosses slots");
            let is_protected = |gfn: Gfn| all.iter().any(|s| (s.start..s.end()).contains(&gfn));
            prop_assert!(frames.iter().flat_map(FrameRun::frames).all(is_protected));
            let mut pieces = Pieces::new(&layout, &frames, most, GAP);
            let (mut copied, mut unprotected) = (FrameSet::new(), FrameSet::new());
            let mut awaited = order.into_iter();
            while let Some(next) = pieces.next() {
                let wanted = awaited.next().and_then(|gfn| {
                    let piece = pieces.with(Gfn(gfn));
                    let due = is_protected(Gfn(gfn)) && !unprotected.contains(Gfn(gfn));
                    assert_eq!(piece.is_some(), due, "an awaited frame is in a pending piece");
                    piece
                });
                let piece = wanted.unwrap_or(next);
                let count: u64 = pieces.runs(piece).iter().map(|run| run.count).sum();
                prop_assert!(count <= most && count > 0);
                for run in pieces.runs(piece) {
                    prop_assert!(layout.contains(*run));
                    prop_assert_eq!(copied.insert(*run), run.count, "copied once");
                    prop_assert!(!unprotected.intersects(*run), "copied before it is unprotected");
                }
                for span in pieces.spans(piece) {
                    prop_assert_eq!(unprotected.insert(span), span.count);
                }
                pieces.done(piece);
            }
            prop_assert_eq!(copied, frames);
            prop_assert_eq!(unprotected, all.into_iter().collect::<FrameSet>());
        }
    }
}
