//! The leaves of an owned tree as plain words: KVM's bitmap is read, written or replaced in place,
//! and the summaries above are rebuilt.

use std::ops::Range;

use super::split::{Split, distribute, sum};
use super::structure::Tree;
use super::words::{SHIFT, nonzero, ones};
use crate::layout::Placed;
use crate::{Layout, OutOfSlot, SlotId, sync};

impl Tree {
    /// Returns the slot's leaves without a copy: its dirty bitmap in the form of
    /// `KVM_GET_DIRTY_LOG`.
    ///
    /// O(log slots). While the tree is shared, [`leaves`](Self::leaves) reads the leaves word by
    /// word.
    ///
    /// # Errors
    /// Returns an error if there is no such slot.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(3), base: Gfn(0x100), frames: 130 }])?;
    /// # let mut tree = Tree::new(&layout)?;
    /// tree.mark(&layout, FrameRun { start: Gfn(0x100 + 63), count: 2 })?;
    /// assert_eq!(tree.bitmap(&layout, SlotId(3))?, [1 << 63, 1, 0]);
    /// let error = tree.bitmap(&layout, SlotId(4)).unwrap_err();
    /// assert_eq!(error.to_string(), "there is no slot 4 (frame offset 0x0)");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn bitmap(&mut self, layout: &Layout, slot: SlotId) -> Result<&[u64], OutOfSlot> {
        let range = layout.placed_of(slot)?.range();
        Ok(&sync::plain_mut(&mut self.words)[range])
    }

    /// Calls `write` with the slot's leaves, one word for every 64 frames of the slot, then
    /// rebuilds the summaries. KVM can write its bitmap here without a copy.
    ///
    /// The tree is consistent afterwards even if `write` panics (I1). Costs what `write` costs and
    /// a load of each word, by several threads from 32 GiB of memory on.
    ///
    /// # Errors
    /// Returns an error if there is no such slot. If `write` set bits past the slot's end, they are
    /// cleared and the error names the first of them; the other bits are in the tree.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId, Tree};
    /// # fn kvm_get_dirty_log(_: SlotId, bitmap: &mut [u64]) -> std::io::Result<()> {
    /// #     Ok(bitmap[1] = 1)
    /// # }
    /// let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 262_144 }])?;
    /// let mut tree = Tree::new(&layout)?;
    /// tree.write_leaves(&layout, SlotId(0), |bitmap| kvm_get_dirty_log(SlotId(0), bitmap))??;
    /// let mut runs = Vec::new();
    /// tree.drain_mut(&layout, &mut runs);
    /// assert_eq!(runs[0].start, Gfn(64));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn write_leaves<R>(
        &mut self,
        layout: &Layout,
        slot: SlotId,
        write: impl FnOnce(&mut [u64]) -> R,
    ) -> Result<R, OutOfSlot> {
        let placed = layout.placed_of(slot)?;
        let range = placed.range();
        let written = Written { tree: self, placed };
        let result = write(&mut sync::plain_mut(&mut written.tree.words)[range.clone()]);
        let checked = placed.check_bitmap(&sync::plain_mut(&mut written.tree.words)[range]);
        drop(written);
        checked.map(|()| result)
    }

    /// Replaces the frames of `slot` by those of a KVM dirty bitmap. Frames past the end of a short
    /// bitmap become clean. Returns the number of frames in the bitmap.
    ///
    /// Costs a copy and a load of each word, by several threads from 32 GiB of memory on.
    ///
    /// # Errors
    /// Returns an error if there is no such slot, or if the bitmap has bits past the slot's end; it
    /// names the first. Nothing changes.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1000 }])?;
    /// # let mut tree = Tree::new(&layout)?;
    /// tree.mark(&layout, FrameRun { start: Gfn(0), count: 1000 })?;
    /// assert_eq!(tree.adopt_bitmap(&layout, SlotId(0), &[0b110])?, 2);
    /// assert_eq!(tree.absorb_bitmap_mut(&layout, SlotId(0), &[0b011])?, 2);
    /// assert!(tree.frames(&layout).eq([Gfn(0), Gfn(1), Gfn(2)]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn adopt_bitmap(
        &mut self,
        layout: &Layout,
        slot: SlotId,
        bitmap: &[u64],
    ) -> Result<u64, OutOfSlot> {
        let (placed, bitmap) = layout.checked_bitmap(slot, bitmap)?;
        let range = placed.range();
        let first = range.start;
        Ok(self.rework(range, |leaves, at, summary| {
            let from = &bitmap[(at - first).min(bitmap.len())..];
            let from = &from[..from.len().min(leaves.len())];
            let found = nonzero(from);
            // Zeros are not written over zeros: words that were never dirty stay without memory.
            if found != 0 || leaves.iter().any(|leaf| *leaf != 0) {
                let (here, beyond) = leaves.split_at_mut(from.len());
                here.copy_from_slice(from);
                beyond.fill(0);
            }
            renew(summary, at, leaves.len(), found);
            ones(from)
        }))
    }

    /// As [`absorb_bitmap`](Self::absorb_bitmap), without atomic operations. Example at
    /// [`adopt_bitmap`](Self::adopt_bitmap).
    ///
    /// # Errors
    /// As [`absorb_bitmap`](Self::absorb_bitmap).
    pub fn absorb_bitmap_mut(
        &mut self,
        layout: &Layout,
        slot: SlotId,
        bitmap: &[u64],
    ) -> Result<u64, OutOfSlot> {
        let (placed, bitmap) = layout.checked_bitmap(slot, bitmap)?;
        let first = placed.first_word as usize;
        Ok(self.rework(first..first + bitmap.len(), |leaves, at, summary| {
            let from = &bitmap[at - first..][..leaves.len()];
            let found = nonzero(from);
            if found == 0 {
                return 0;
            }
            leaves.iter_mut().zip(from).for_each(|(leaf, bits)| *leaf |= bits);
            *summary |= found << (at & 63);
            ones(from)
        }))
    }

    /// Rebuilds all summaries from the leaves. Afterwards no summary is spurious.
    ///
    /// Correctness does not need this, since every change keeps the summaries right (I1). Costs a
    /// load of every leaf, by several threads from 32 GiB of memory on.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// # let mut tree = Tree::new(&layout)?;
    /// tree.mark(&layout, FrameRun { start: Gfn(9), count: 2 })?;
    /// tree.rebuild();
    /// assert_eq!((tree.count(), tree.check()), (2, Ok(())));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rebuild(&mut self) {
        self.rebuild_range(0..self.levels[0].1);
    }

    fn rebuild_range(&mut self, leaves: Range<usize>) {
        self.rework(leaves, |leaves, at, summary| {
            renew(summary, at, leaves.len(), nonzero(leaves));
            0
        });
    }

    /// Visits the leaf words `range` by their summaries. `each` gets the words of one summary that
    /// lie in the range, the position of the first, and the summary to set. Then rebuilds the
    /// levels above in the same way. Returns the sum of the results of `each`.
    fn rework(
        &mut self,
        range: Range<usize>,
        each: impl Fn(&mut [u64], usize, &mut u64) -> u64 + Sync,
    ) -> u64 {
        self.word_list.mark_incomplete();
        let grain = self.grain;
        let (mut below, mut rest) = sync::plain_mut(&mut self.words).split_at_mut(self.levels[0].1);
        let mut no_summary = [0];
        let mut above = match self.levels.get(1) {
            Some(level) => rest.split_off_mut(..level.1).unwrap_or_default(),
            None => &mut no_summary,
        };
        let sum = level(below, above, range.clone(), grain, each);
        let mut range = range;
        for pair in self.levels.windows(2).skip(1) {
            range = range.start >> SHIFT..range.end.div_ceil(64);
            below = above;
            above = rest.split_off_mut(..pair[1].1).unwrap_or_default();
            level(below, above, range.clone(), grain, |words, at, summary| {
                renew(summary, at, words.len(), nonzero(words));
                0
            });
        }
        sum
    }
}

/// Calls `each` for the words `range` of `below`, grouped by their summaries in `above`. Each
/// thread has whole summaries, and `grain` words are worth a thread.
fn level(
    below: &mut [u64],
    above: &mut [u64],
    range: Range<usize>,
    grain: usize,
    each: impl Fn(&mut [u64], usize, &mut u64) -> u64 + Sync,
) -> u64 {
    let (first, end) = (range.start >> SHIFT << SHIFT, range.end);
    let Split { workers, piece } = Split::of_leaves(range.len(), grain);
    let pieces =
        below[first..end].chunks_mut(piece).zip(above[first >> SHIFT..].chunks_mut(piece >> SHIFT));
    let pieces = (first..).step_by(piece).zip(pieces);
    let each = |((words, summary), at): ((&mut [u64], _), usize)| {
        let skip = range.start.saturating_sub(at);
        each(&mut words[skip..], at + skip, summary)
    };
    sum(workers, |sums| {
        distribute(sums, pieces, |sum, (at, (below, above))| {
            let groups = below.chunks_mut(64).zip(above).zip((at..).step_by(64));
            *sum += groups.map(&each).sum::<u64>();
        });
    })
}

/// Leaves that were passed to a writer. Dropping it makes the tree consistent.
struct Written<'t> {
    tree: &'t mut Tree,
    placed: Placed,
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        let range = self.placed.range();
        let past = self.placed.slot.frames & 63;
        if past != 0 {
            sync::plain_mut(&mut self.tree.words)[range.end - 1] &= (1 << past) - 1;
        }
        self.tree.rebuild_range(range);
    }
}

/// Sets the summary bits of `count` words from word `at` on, at most 64 and all below this summary,
/// to `found`. Like leaves, summaries that are already right are not written.
fn renew(summary: &mut u64, at: usize, count: usize, found: u64) {
    let mask = u64::MAX.checked_shr(64 - count as u32).unwrap_or(0) << (at & 63);
    let new = *summary & !mask | found << (at & 63);
    if *summary != new {
        *summary = new;
    }
}
