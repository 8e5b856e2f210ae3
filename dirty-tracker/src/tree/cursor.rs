//! Reads a tree without emptying it: tests of frames near one another, and the runs in order.

use super::structure::Tree;
use super::words::SHIFT;
use crate::layout::PlacedSlot;
use crate::sync::{AtomicU64, Ordering::SeqCst};
use crate::{FrameRun, Gfn};

/// A position in a tree, like that of the hibernation bitmap (Joerg Roedel, linux-pm, July 2014):
/// testing a frame near the last one costs a load.
///
/// Other threads may insert and drain meanwhile. Each result was correct at some moment during the
/// call.
///
/// ```
/// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
///
/// let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0x100), frames: 5000 }])?;
/// let tree = Tree::new(layout)?;
/// tree.mark(FrameRun { start: Gfn(0x180), count: 100 })?;
/// let mut cursor = tree.cursor();
/// let dirty = (0x170..0x200).filter(|frame| cursor.contains(Gfn(*frame)));
/// assert_eq!(dirty.count(), 100);
/// assert!(!cursor.contains(Gfn(0)), "it lies in no slot");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Cursor<'t> {
    tree: &'t Tree,
    /// Slot of the last frame.
    placed: PlacedSlot,
}

impl Cursor<'_> {
    /// Returns whether `gfn` is in the tree; false for a frame of no slot. O(1) within the slot of
    /// the last call, else O(log slots).
    pub fn contains(&mut self, gfn: Gfn) -> bool {
        let run = FrameRun { start: gfn, count: 1 };
        if !self.placed.has(run) {
            let Ok(placed) = self.tree.layout.placed_around(run) else { return false };
            self.placed = *placed;
        }
        self.tree.has(self.placed.bit_of(gfn))
    }
}

/// The frames of a tree as ascending runs; adjacent frames of a slot are joined. From
/// [`Tree::iter`].
#[derive(Debug, Clone)]
pub struct Iter<'t> {
    tree: &'t Tree,
    /// Slot of the last run.
    placed: PlacedSlot,
    /// Next leaf bit to look at.
    bit: u64,
}

impl Iterator for Iter<'_> {
    type Item = FrameRun;

    fn next(&mut self) -> Option<FrameRun> {
        let first = self.tree.next_bit(self.bit)?;
        let word = first >> SHIFT;
        if word.wrapping_sub(self.placed.first_word) >= self.placed.words() {
            let slots = self.tree.layout.placed();
            let after = slots.partition_point(|p| p.first_word <= word);
            self.placed = slots[after.saturating_sub(1)];
        }
        let PlacedSlot { slot, first_word } = self.placed;
        let (start, end) = (first_word << SHIFT, (first_word << SHIFT) + slot.frames);
        self.bit = first + 1;
        while self.bit < end {
            let clear = !self.tree.leaf(self.bit >> SHIFT) >> (self.bit & 63);
            let more = u64::from(clear.trailing_zeros()).min(64 - (self.bit & 63));
            self.bit += more;
            if self.bit & 63 != 0 || more == 0 {
                break;
            }
        }
        Some(FrameRun { start: Gfn(slot.base.0 + first - start), count: self.bit - first })
    }
}

impl std::iter::FusedIterator for Iter<'_> {}

impl<'t> IntoIterator for &'t Tree {
    type Item = FrameRun;
    type IntoIter = Iter<'t>;

    fn into_iter(self) -> Iter<'t> {
        self.iter()
    }
}

impl Tree {
    /// Returns a cursor. O(1). Example at [`Cursor`].
    pub fn cursor(&self) -> Cursor<'_> {
        Cursor { tree: self, placed: self.layout.placed()[0] }
    }

    /// Returns the frames in the tree as runs, ascending; adjacent frames of a slot are joined. The
    /// frames stay in the tree. A run costs O(1) if it begins in the word of 64 frames in which the
    /// last one ended, else O(levels), and a load for each of its words.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// # let tree = Tree::new(layout)?;
    /// tree.mark(FrameRun { start: Gfn(9), count: 2 })?;
    /// for run in &tree {
    ///     assert_eq!(run, FrameRun { start: Gfn(9), count: 2 });
    /// }
    /// assert!(tree.iter().flat_map(FrameRun::frames).eq([Gfn(9), Gfn(10)]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn iter(&self) -> Iter<'_> {
        Iter { tree: self, placed: self.layout.placed()[0], bit: 0 }
    }

    /// Returns whether no frame is in the tree. O(levels), and a load for each word that drains of
    /// small epochs have emptied since the last walk.
    pub fn is_empty(&self) -> bool {
        self.next_bit(0).is_none()
    }

    /// Returns the first set leaf bit from `bit` on.
    fn next_bit(&self, bit: u64) -> Option<u64> {
        let word = bit >> SHIFT;
        if word < self.levels[0].1 as u64 {
            let bits = self.leaf(word) & u64::MAX << (bit & 63);
            if bits != 0 {
                return Some(word << SHIFT | u64::from(bits.trailing_zeros()));
            }
        }
        let mut from = word + 1;
        loop {
            let word = self.next_word(from)?;
            // Zero if another thread has just drained it.
            let bits = self.leaf(word);
            if bits != 0 {
                return Some(word << SHIFT | u64::from(bits.trailing_zeros()));
            }
            from = word + 1;
        }
    }

    /// Returns the first leaf word from `word` on whose summary bits are set: goes up as far as
    /// necessary, then down.
    fn next_word(&self, word: u64) -> Option<u64> {
        let (mut level, mut index) = (0, word);
        loop {
            // The summaries tell whether `level` has a non-zero word from `index` on.
            let (start, len) = *self.levels.get(level + 1)?;
            let above = index >> SHIFT;
            if above >= len as u64 {
                return None;
            }
            let bits = self.word(start, above).load(SeqCst) & u64::MAX << (index & 63);
            if bits == 0 {
                (level, index) = (level + 1, above + 1);
                continue;
            }
            index = above << SHIFT | u64::from(bits.trailing_zeros());
            if level == 0 {
                return Some(index);
            }
            (level, index) = (level - 1, index << SHIFT);
        }
    }

    fn word(&self, start: usize, index: u64) -> &AtomicU64 {
        &self.words[start + index as usize]
    }
}
