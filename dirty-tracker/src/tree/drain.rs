//! Drains an entire tree by one thread: to runs, to frames, or without output.

use super::element::{Element, Sealed};
use super::sink::{FrameWriter, RunWriter, WordSink};
use super::structure::{Tree, fence_later_reads};
use super::walk::{Discard, LevelBuffer, ListedWords, TreeWalk};
use super::words::SharedWords;
use crate::{FrameRun, Gfn};

impl Sealed for FrameRun {
    fn drain(tree: &Tree, out: &mut Vec<Self>) -> u64 {
        let mut frames = 0;
        tree.with_scratch(|pending, stages| {
            tree.empty(pending, RunWriter::new(&tree.layout, out, &mut frames, stages));
        });
        frames
    }

    fn drain_exclusive(tree: &mut Tree, out: &mut Vec<Self>) -> u64 {
        let mut frames = 0;
        tree.empty_exclusive(|layout, stages| RunWriter::new(layout, out, &mut frames, stages));
        frames
    }
}

impl Sealed for Gfn {
    fn drain(tree: &Tree, out: &mut Vec<Self>) -> u64 {
        let before = out.len();
        tree.with_scratch(|pending, stages| {
            tree.empty(pending, FrameWriter::new(&tree.layout, out, stages));
        });
        (out.len() - before) as u64
    }

    fn drain_exclusive(tree: &mut Tree, out: &mut Vec<Self>) -> u64 {
        let before = out.len();
        tree.empty_exclusive(|layout, stages| FrameWriter::new(layout, out, stages));
        (out.len() - before) as u64
    }
}

impl Tree {
    /// Empties the tree and returns its frames as ascending runs; adjacent frames of a slot are
    /// joined. Inserts may run at the same time. An insert that returned before this call is in the
    /// result. One that overlaps it is in the result or still in the tree. If two drains run at the
    /// same time, each frame is in one of them.
    ///
    /// Costs a few loads and an exchange for each dirty word, wherever it lies in the tree.
    /// Example at [`Tree`].
    pub fn drain(&self) -> std::vec::IntoIter<FrameRun> {
        let mut runs = Vec::new();
        self.drain_into(&mut runs);
        runs.into_iter()
    }

    /// As [`drain`](Self::drain), but appends the frames to `out`, as runs or as single frames.
    /// Returns the number of frames. Allocates only if `out` has no more room, or if two threads
    /// drain at the same time.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// # let tree = Tree::new(layout)?;
    /// let mut frames = vec![Gfn(1)]; // it stays in the list
    /// tree.mark(FrameRun { start: Gfn(9), count: 2 })?;
    /// assert_eq!(tree.drain_into(&mut frames), 2);
    /// assert_eq!(frames, [Gfn(1), Gfn(9), Gfn(10)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn drain_into<T: Element>(&self, out: &mut Vec<T>) -> u64 {
        T::drain(self, out)
    }

    /// Empties the tree. Costs as much as a drain: O(dirty words), not O(size of the tree).
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// # let tree = Tree::new(layout)?;
    /// tree.mark(FrameRun { start: Gfn(9), count: 2 })?;
    /// tree.clear();
    /// assert!(tree.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn clear(&self) {
        self.with_scratch(|pending, _| self.empty(pending, Discard));
    }

    fn empty(&self, pending: &mut [LevelBuffer], sink: impl WordSink) {
        let words = SharedWords(&self.words);
        match self.word_list.complete() {
            Some(mut list) => {
                let pending = &mut pending[0];
                self.simd.run(ListedWords { words, list: list.words(), pending, sink });
                list.drained();
            }
            None => {
                self.simd.run(TreeWalk { words, levels: &self.levels, roots: &[0], pending, sink })
            }
        }
        fence_later_reads();
    }
}
