//! A tree of one owner: the same operations without atomic instructions.

use super::element::Element;
use super::sink::{Stages, WordSink};
use super::structure::{Tree, WalkScratch};
use super::walk::TreeWalk;
use super::words::{OwnedWords, SHIFT, masks};
use crate::{FrameRun, Layout, OutOfSlot, sync};

/// A tree that no other thread can access meanwhile, like a mutex or an atomic behind the `get_mut`
/// of the standard library. From [`Tree::exclusive`].
#[derive(Debug)]
pub struct Exclusive<'t>(&'t mut Tree);

impl Tree {
    /// Returns access without atomic operations, for a tree of one owner: a drain is several times
    /// as fast (see BENCHMARKS.md). Costs nothing.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// let (mut tree, mut runs) = (Tree::new(layout)?, Vec::<FrameRun>::new());
    /// tree.exclusive().mark(FrameRun { start: Gfn(9), count: 2 })?;
    /// assert_eq!(tree.exclusive().drain_into(&mut runs), 2);
    /// assert_eq!(runs, [FrameRun { start: Gfn(9), count: 2 }]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn exclusive(&mut self) -> Exclusive<'_> {
        Exclusive(self)
    }

    /// Empties the tree into the sink that `sink` makes.
    pub(super) fn empty_exclusive<'s, S: WordSink + 's>(
        &'s mut self,
        sink: impl FnOnce(&'s Layout, &'s mut Stages) -> S,
    ) {
        let WalkScratch { pending, stages } = sync::get_mut(&mut self.scratch);
        let sink = sink(&self.layout, stages);
        self.word_list.begin();
        let words = OwnedWords(&mut self.words);
        self.simd.run(TreeWalk { words, levels: &self.levels, roots: &[0], pending, sink });
    }

    fn insert_bit_exclusive(&mut self, mut bit: u64) {
        self.word_list.mark_incomplete();
        for &(start, _) in &self.levels {
            let word = &mut self.words[start + (bit >> SHIFT) as usize];
            if sync::or_mut(word, 1 << (bit & 63)) != 0 {
                break;
            }
            bit >>= SHIFT;
        }
    }
}

impl Exclusive<'_> {
    /// As [`Tree::mark`]. It stops at the first level in which the words were not zero, so it
    /// usually costs O(words of 64 frames).
    ///
    /// # Errors
    ///
    /// Returns an error that names the run if it does not lie in one slot. Nothing changes.
    pub fn mark(&mut self, run: FrameRun) -> Result<(), OutOfSlot> {
        let tree = &mut *self.0;
        if run.count == 0 {
            return Ok(());
        }
        let first = tree.layout.bit_of_run(run)?;
        if run.count == 1 {
            tree.insert_bit_exclusive(first);
            return Ok(());
        }
        tree.word_list.mark_incomplete();
        let (mut lo, mut hi) = (first, first + run.count - 1);
        for &(start, _) in &tree.levels {
            let mut were_nonzero = true;
            for (word, mask) in masks(lo, hi) {
                were_nonzero &= sync::or_mut(&mut tree.words[start + word as usize], mask) != 0;
            }
            // By I1 a word that was not zero has its summaries, and no other thread is about to set
            // them.
            if were_nonzero {
                break;
            }
            (lo, hi) = (lo >> SHIFT, hi >> SHIFT);
        }
        Ok(())
    }

    /// As [`Tree::drain_into`].
    pub fn drain_into<T: Element>(&mut self, out: &mut Vec<T>) -> u64 {
        T::drain_exclusive(self.0, out)
    }
}
