//! Emptying a tree a slice at a time, for callers that must not hold their thread for longer.

use super::recent::BOUND;
use super::sink::Runs;
use super::walk::{Listed, Shared};
use super::{SHIFT, Tree};
use crate::sync::Ordering::SeqCst;
use crate::{FrameRun, Layout};

/// Where a drain in slices is: at the lowest frame when new. Example at [`Tree::drain_slice`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Slices {
    /// The next leaf word to look at; none once the round is over.
    next: Option<u64>,
}

impl Slices {
    /// Whether the last slice reached the highest frame (or there was none yet); another begins anew.
    pub fn is_over(&self) -> bool {
        self.next.is_none()
    }
}

impl Tree {
    /// Drains the next slice: at most `words` leaf words (of 64 frames) that hold something, appended to
    /// `runs` as by [`drain`](Self::drain), but not joined with the slice before. Returns the frames. A round is over
    /// when [`Slices::is_over`] says so. Costs O(levels) for each word; a `words` of 0 counts as 1.
    ///
    /// Meanwhile others may insert and drain. What was inserted before a round is in one of its
    /// slices; what is inserted during it is in one of them or still in the tree.
    ///
    /// ```
    /// use dirty_tracker::{FrameRun, Gfn, Layout, Slices, Slot, SlotId, Tree};
    ///
    /// let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// let tree = Tree::new(&layout);
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
        let (mut frames, mut left) = (0, words.max(1));
        let mut next = at.next.unwrap_or(0);
        while left > 0 {
            let mut list = [0; BOUND];
            let mut found = 0;
            for place in list.iter_mut().take(left) {
                let Some(word) = self.next_filled(next) else { break };
                *place = word;
                (next, found) = (word + 1, found + 1);
                // As in a walk: before anything below is looked at.
                let (summary, bit) = (word >> SHIFT, word & 63);
                if let Some((start, _)) = self.levels.get(1) {
                    self.words[start + summary as usize].fetch_and(!(1 << bit), SeqCst);
                }
            }
            self.with_scratch(|pending, stages| {
                let sink = Runs::new(layout, runs, &mut frames, stages);
                let (words, list) = (Shared(&self.words), &list[..found]);
                self.kernel.run(Listed { words, list, pending: &mut pending[0], sink });
            });
            left -= found;
            if self.next_filled(next).is_none() {
                at.next = None;
                return frames;
            }
        }
        at.next = Some(next);
        frames
    }

    /// The first leaf word from `word` on that the summaries call not zero, or a tree of one word.
    fn next_filled(&self, word: u64) -> Option<u64> {
        match self.levels.len() {
            1 => (word == 0 && self.leaf(0) != 0).then_some(0),
            _ => self.next_word(word),
        }
    }
}
