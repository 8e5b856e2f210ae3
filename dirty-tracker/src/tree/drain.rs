//! Drains an entire tree by one thread: to runs, to frames, or without output.

use super::sink::{Frames, Runs, Sink};
use super::structure::{Scratch, Tree, fence_later_reads};
use super::walk::{Discard, Listed, Pending, Walk};
use super::words::{Owned, Shared};
use crate::sync;
use crate::{FrameRun, Gfn, Layout};

impl Tree {
    /// Empties the tree and appends its frames to `runs`, ascending; adjacent frames of a slot are
    /// joined. Returns the number of frames. Inserts may run at the same time. An insert that
    /// returned before this call is in the result. One that overlaps it is in the result or still
    /// in the tree. If two drains run at once, each frame is in one of them.
    ///
    /// Costs a few loads and an exchange for each dirty word, wherever it lies in the tree.
    /// Allocates only if `runs` has no more room, or if two threads drain at once.
    pub fn drain(&self, layout: &Layout, runs: &mut Vec<FrameRun>) -> u64 {
        self.assert_same_layout(layout);
        let mut frames = 0;
        self.with_scratch(|pending, stages| {
            self.empty(pending, Runs::new(layout, runs, &mut frames, stages));
        });
        frames
    }

    /// As [`drain`](Self::drain), without atomic operations: several times as fast.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// let (mut tree, mut runs) = (Tree::new(&layout)?, Vec::new());
    /// tree.mark_mut(&layout, FrameRun { start: Gfn(9), count: 2 })?;
    /// assert_eq!(tree.drain_mut(&layout, &mut runs), 2);
    /// assert_eq!(runs, [FrameRun { start: Gfn(9), count: 2 }]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn drain_mut(&mut self, layout: &Layout, runs: &mut Vec<FrameRun>) -> u64 {
        self.assert_same_layout(layout);
        let mut frames = 0;
        let Scratch { pending, stages } = sync::get_mut(&mut self.scratch);
        let sink = Runs::new(layout, runs, &mut frames, stages);
        self.word_list.begin();
        let words = Owned(&mut self.words);
        self.simd.run(Walk { words, levels: &self.levels, roots: &[0], pending, sink });
        frames
    }

    /// As [`drain`](Self::drain), but appends single frames, ascending.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// # let mut tree = Tree::new(&layout)?;
    /// let mut frames = vec![Gfn(1)]; // it stays in the list
    /// tree.mark(&layout, FrameRun { start: Gfn(9), count: 2 })?;
    /// tree.drain_frames(&layout, &mut frames);
    /// assert_eq!(frames, [Gfn(1), Gfn(9), Gfn(10)]);
    /// tree.mark(&layout, FrameRun { start: Gfn(3), count: 1 })?;
    /// tree.drain_frames_mut(&layout, &mut frames);
    /// assert_eq!(frames.last(), Some(&Gfn(3)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn drain_frames(&self, layout: &Layout, frames: &mut Vec<Gfn>) {
        self.assert_same_layout(layout);
        self.with_scratch(|pending, stages| {
            self.empty(pending, Frames::new(layout, frames, stages));
        });
    }

    /// As [`drain_frames`](Self::drain_frames), without atomic operations.
    pub fn drain_frames_mut(&mut self, layout: &Layout, frames: &mut Vec<Gfn>) {
        self.assert_same_layout(layout);
        let Scratch { pending, stages } = sync::get_mut(&mut self.scratch);
        let sink = Frames::new(layout, frames, stages);
        self.word_list.begin();
        let words = Owned(&mut self.words);
        self.simd.run(Walk { words, levels: &self.levels, roots: &[0], pending, sink });
    }

    /// Empties the tree. Costs as much as a drain: O(dirty words), not O(size of the tree).
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// # let tree = Tree::new(&layout)?;
    /// tree.mark(&layout, FrameRun { start: Gfn(9), count: 2 })?;
    /// tree.clear();
    /// assert_eq!(tree.count(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn clear(&self) {
        self.with_scratch(|pending, _| self.empty(pending, Discard));
    }

    fn empty(&self, pending: &mut [Pending], sink: impl Sink) {
        let words = Shared(&self.words);
        match self.word_list.complete() {
            Some(mut list) => {
                let pending = &mut pending[0];
                self.simd.run(Listed { words, list: list.words(), pending, sink });
                list.drained();
            }
            None => self.simd.run(Walk { words, levels: &self.levels, roots: &[0], pending, sink }),
        }
        fence_later_reads();
    }
}
