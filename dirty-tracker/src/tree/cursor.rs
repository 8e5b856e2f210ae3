//! Reads a tree without emptying it: a cursor that keeps its position, and iterators on top of it.

use super::structure::Tree;
use super::words::SHIFT;
use crate::layout::Placed;
use crate::sync::{AtomicU64, Ordering::SeqCst};
use crate::{FrameRun, Gfn, Layout, OutOfSlot};

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
/// let tree = Tree::new(&layout)?;
/// tree.mark(&layout, FrameRun { start: Gfn(0x180), count: 100 })?;
/// let mut cursor = tree.cursor(&layout);
/// assert!(cursor.test(Gfn(0x181))? && !cursor.test(Gfn(0x17f))?);
/// assert_eq!(cursor.set(Gfn(0x17f)), Ok(true), "it was new");
/// cursor.seek(Gfn(0x1e0));
/// assert_eq!(cursor.next_frame(), Some(Gfn(0x1e0)));
/// assert_eq!(cursor.next_run(), Some(FrameRun { start: Gfn(0x1e1), count: 3 }));
/// assert_eq!(cursor.next_run(), None);
/// assert!(cursor.test(Gfn(0)).is_err(), "it lies in no slot");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Cursor<'t> {
    tree: &'t Tree,
    layout: &'t Layout,
    /// Slot of the last frame.
    placed: Placed,
    /// Next leaf bit for `next_frame` and `next_run`.
    bit: u64,
}

impl<'t> Cursor<'t> {
    pub(super) fn new(tree: &'t Tree, layout: &'t Layout) -> Self {
        Self { tree, layout, placed: layout.placed()[0], bit: 0 }
    }

    /// Returns the leaf bit of `gfn`. O(1) within the last slot, else O(log slots).
    fn bit_of(&mut self, gfn: Gfn) -> Result<u64, OutOfSlot> {
        let Placed { slot, first_word } = self.placed;
        match gfn.0.checked_sub(slot.base.0) {
            Some(offset) if offset < slot.frames => Ok((first_word << SHIFT) + offset),
            _ => {
                let bit = self.layout.bit_of_run(FrameRun { start: gfn, count: 1 })?;
                self.enter(bit >> SHIFT);
                Ok(bit)
            }
        }
    }

    /// Enters the slot of leaf word `word`.
    fn enter(&mut self, word: u64) {
        let slots = self.layout.placed();
        let after = slots.partition_point(|p| p.first_word <= word);
        self.placed = slots[after.saturating_sub(1)];
    }

    fn frame_of(&self, bit: u64) -> Gfn {
        Gfn(self.placed.slot.base.0 + bit - (self.placed.first_word << SHIFT))
    }

    /// Returns whether `gfn` is in the tree. O(1) within the slot of the last call, else O(log
    /// slots). Does not move the cursor.
    ///
    /// # Errors
    /// Returns an error if `gfn` lies in no slot.
    pub fn test(&mut self, gfn: Gfn) -> Result<bool, OutOfSlot> {
        let bit = self.bit_of(gfn)?;
        Ok(self.tree.contains(bit))
    }

    /// Inserts `gfn` like [`Tree::mark`] and returns whether it was new. If several threads insert
    /// it at once, it is new for one of them. O(levels) within the slot of the last call.
    ///
    /// # Errors
    /// Returns an error if `gfn` lies in no slot.
    pub fn set(&mut self, gfn: Gfn) -> Result<bool, OutOfSlot> {
        let bit = self.bit_of(gfn)?;
        Ok(self.tree.insert_word(bit >> SHIFT, 1 << (bit & 63)) != 0)
    }

    /// Moves to `gfn`, or to the first frame after it if `gfn` lies in no slot. O(1) within the
    /// slot of the last call, else O(log slots).
    pub fn seek(&mut self, gfn: Gfn) {
        self.bit = match self.bit_of(gfn) {
            Ok(bit) => bit,
            Err(_) => {
                let slots = self.layout.placed();
                let next = slots.get(slots.partition_point(|p| p.slot.base < gfn));
                next.map_or(u64::MAX, |p| p.first_word << SHIFT)
            }
        };
    }

    /// Returns the next frame in the tree from this position on, and moves past it. O(1) if the
    /// frame is in the same word of 64 frames or in the next one, else O(levels).
    pub fn next_frame(&mut self) -> Option<Gfn> {
        let bit = self.tree.next_bit(self.bit)?;
        self.bit = bit + 1;
        let word = bit >> SHIFT;
        if word.wrapping_sub(self.placed.first_word) >= self.placed.words() {
            self.enter(word);
        }
        Some(self.frame_of(bit))
    }

    /// Returns the next frame in the tree with the consecutive frames that follow it in the slot,
    /// and moves past them. Costs a [`next_frame`](Self::next_frame) and a load for each word of
    /// the run.
    pub fn next_run(&mut self) -> Option<FrameRun> {
        let start = self.next_frame()?;
        let first = self.bit - 1;
        let end = (self.placed.first_word << SHIFT) + self.placed.slot.frames;
        while self.bit < end {
            let clear = !self.tree.leaf(self.bit >> SHIFT) >> (self.bit & 63);
            let more = u64::from(clear.trailing_zeros()).min(64 - (self.bit & 63));
            self.bit += more;
            if self.bit & 63 != 0 || more == 0 {
                break;
            }
        }
        Some(FrameRun { start, count: self.bit - first })
    }
}

impl Tree {
    /// Returns a cursor at the first frame. O(1). Example at [`Cursor`].
    pub fn cursor<'t>(&'t self, layout: &'t Layout) -> Cursor<'t> {
        self.assert_same_layout(layout);
        Cursor::new(self, layout)
    }

    /// Returns the frames in the tree as runs, ascending; adjacent frames of a slot are joined. The
    /// frames stay in the tree. Costs a [`Cursor::next_run`] for each run.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// # let tree = Tree::new(&layout)?;
    /// tree.mark(&layout, FrameRun { start: Gfn(9), count: 2 })?;
    /// for _ in 0..2 {
    ///     assert_eq!(tree.runs(&layout).next(), Some(FrameRun { start: Gfn(9), count: 2 }));
    ///     assert!(tree.frames(&layout).eq([Gfn(9), Gfn(10)]));
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn runs<'t>(&'t self, layout: &'t Layout) -> impl Iterator<Item = FrameRun> + 't {
        let mut cursor = self.cursor(layout);
        std::iter::from_fn(move || cursor.next_run())
    }

    /// Returns the frames in the tree, ascending. They stay in the tree. Costs a
    /// [`Cursor::next_frame`] for each frame. Example at [`runs`](Self::runs).
    pub fn frames<'t>(&'t self, layout: &'t Layout) -> impl Iterator<Item = Gfn> + 't {
        let mut cursor = self.cursor(layout);
        std::iter::from_fn(move || cursor.next_frame())
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
    pub(super) fn next_word(&self, word: u64) -> Option<u64> {
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
