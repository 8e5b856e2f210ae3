//! Drains a tree in bounded slices, for callers that must not occupy their thread for long.

use super::sink::Runs;
use super::structure::{Tree, fence_later_reads};
use super::walk::Listed;
use super::word_list::CAPACITY;
use super::words::{SHIFT, Shared};
use crate::sync::{AtomicU64, Ordering::SeqCst};
use crate::{FrameRun, Layout};

/// The position of a drain in slices; a new one is at the lowest frame. Example at
/// [`Tree::drain_slice`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Slices {
    /// Next leaf word to look at.
    next: u64,
    over: bool,
}

impl Slices {
    /// Returns whether the last slice reached the highest frame. The next slice then starts a new
    /// round.
    pub fn is_over(&self) -> bool {
        self.over
    }
}

/// The result of a bounded search.
enum Found {
    Word(u64),
    /// No word before this leaf word.
    NotBefore(u64),
    Nothing,
}

impl Tree {
    /// Drains the next slice: at most `words` leaf words (of 64 frames) that are not zero. A
    /// spurious summary counts as one word, too. A `words` of 0 counts as 1. The frames are
    /// appended to `runs` as by [`drain`](Self::drain), but not joined with the previous slice.
    /// Returns the number of frames. A round is over when [`Slices::is_over`] returns true. Costs
    /// O(levels) for each word.
    ///
    /// Inserts and drains may run at the same time. A frame that was inserted before a round is in
    /// one of its slices. A frame that is inserted during a round is in one of its slices or still
    /// in the tree.
    ///
    /// ```
    /// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slices, Slot, SlotId, Tree};
    ///
    /// let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// let tree = Tree::new(&layout)?;
    /// tree.mark(&layout, FrameRun { start: Gfn(0), count: 1000 })?;
    /// let (mut at, mut runs) = (Slices::default(), Vec::new());
    /// assert_eq!(tree.drain_slice(&layout, &mut at, 10, &mut runs), 640);
    /// assert!(!at.is_over());
    /// assert_eq!(tree.drain_slice(&layout, &mut at, 10, &mut runs), 360);
    /// assert!(at.is_over());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn drain_slice(
        &self,
        layout: &Layout,
        at: &mut Slices,
        words: usize,
        runs: &mut Vec<FrameRun>,
    ) -> u64 {
        self.assert_same_layout(layout);
        let (mut frames, mut left) = (0, words.max(1));
        let mut next = if at.over { 0 } else { at.next };
        at.over = false;
        while left > 0 && !at.over {
            let mut list = [0; CAPACITY];
            let mut found = 0;
            while left > 0 && found < CAPACITY {
                match self.search(next, &mut left) {
                    Found::Word(word) => {
                        list[found] = word;
                        (next, found, left) = (word + 1, found + 1, left - 1);
                        // As in a walk, the summary is cleared before anything below it is loaded.
                        if self.levels.len() > 1 {
                            self.summary(1, word).fetch_and(!(1 << (word & 63)), SeqCst);
                        }
                    }
                    Found::NotBefore(word) => next = word,
                    Found::Nothing => {
                        at.over = true;
                        break;
                    }
                }
            }
            self.with_scratch(|pending, stages| {
                let sink = Runs::new(layout, runs, &mut frames, stages);
                let (words, list) = (Shared(&self.words), &list[..found]);
                self.simd.run(Listed { words, list, pending: &mut pending[0], sink });
            });
        }
        fence_later_reads();
        // Searches one word further, so that no empty slice is needed to end the round.
        at.over = at.over || matches!(self.search(next, &mut 1), Found::Nothing);
        at.next = next;
        frames
    }

    /// Returns the summary of level `level` that covers word `index` of the level below.
    fn summary(&self, level: usize, index: u64) -> &AtomicU64 {
        &self.words[self.levels[level].0 + (index >> SHIFT) as usize]
    }

    /// Returns the first leaf word from `word` on whose summary bits are set. Clears summary bits
    /// for summaries that are zero. Each such bit takes one look from `left`, and the search ends
    /// when none is left.
    fn search(&self, word: u64, left: &mut usize) -> Found {
        if self.levels.len() == 1 {
            let there = word == 0 && self.leaf(0) != 0;
            return if there { Found::Word(0) } else { Found::Nothing };
        }
        let (mut level, mut index) = (0, word);
        loop {
            let above = index >> SHIFT;
            let Some(&(_, len)) = self.levels.get(level + 1) else { return Found::Nothing };
            if above >= len as u64 {
                return Found::Nothing;
            }
            let all = self.summary(level + 1, index).load(SeqCst);
            let bits = all & u64::MAX << (index & 63);
            if bits == 0 {
                if all == 0 && self.clear_stale(level + 2, above) {
                    *left -= 1;
                }
                (level, index) = (level + 1, above + 1);
                if *left == 0 {
                    return Found::NotBefore(index << (SHIFT as usize * level));
                }
                continue;
            }
            index = above << SHIFT | u64::from(bits.trailing_zeros());
            if level == 0 {
                return Found::Word(index);
            }
            (level, index) = (level - 1, index << SHIFT);
        }
    }

    /// Clears the bit at level `level` for word `index` of the level below, which was zero. Returns
    /// whether the bit was set.
    fn clear_stale(&self, level: usize, index: u64) -> bool {
        let bit = 1 << (index & 63);
        if level >= self.levels.len() || self.summary(level, index).load(SeqCst) & bit == 0 {
            return false;
        }
        self.summary(level, index).fetch_and(!bit, SeqCst);
        let below = &self.words[self.levels[level - 1].0 + index as usize];
        if below.load(SeqCst) != 0 {
            self.summary(level, index).fetch_or(bit, SeqCst);
            // A walk between the clear and the set may have missed the words below.
            self.word_list.mark_incomplete();
        }
        true
    }
}
