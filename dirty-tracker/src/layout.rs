//! The guest's memory slots, and the position of each slot's bits in a tree.
//!
//! Every slot starts on a 64-bit word of the tree's leaf level. Its leaves are therefore identical
//! to the bitmap that `KVM_GET_DIRTY_LOG` returns for it, or those for its parts, side by side.

use std::ops::Range;

use crate::{FrameRun, Gfn, PageSize};

/// The number of a memory slot: KVM's, unless slots are registered [in
/// parts](crate::ring::SlotParts).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SlotId(pub u32);

/// A memory slot: a range of frames that lie side by side in guest physical memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Slot {
    /// Number of the slot, unique in its layout.
    pub id: SlotId,
    /// First frame.
    pub base: Gfn,
    /// Length in frames, at least one.
    pub frames: u64,
}

impl Slot {
    /// Returns the slot as one run of frames.
    pub const fn run(&self) -> FrameRun {
        FrameRun { start: self.base, count: self.frames }
    }
}

/// The reason why a list of slots is not a valid layout, with the slots concerned.
///
/// ```
/// use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId};
/// let slot = |id, base| Slot { id: SlotId(id), base: Gfn(base), frames: 32 };
/// let error = Layout::new([slot(0, 0), slot(1, 31)]).unwrap_err();
/// assert_eq!(error.to_string(), "slots 0 and 1 overlap at gfn 0x1f");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The list is empty.
    #[error("a memory layout needs at least one slot")]
    NoSlots,
    /// A slot has no frames.
    #[error("slot {} at gfn {:#x} has no frames", .0.id.0, .0.base.0)]
    EmptySlot(Slot),
    /// A slot ends past the last address that a guest can have, 2^52 - 1.
    #[error(
        "slot {} of {} frames at gfn {:#x} ends past the last guest frame",
        .0.id.0, .0.frames, .0.base.0
    )]
    PastEnd(Slot),
    /// Two slots have the same number.
    #[error("slot {} appears twice in the layout", .0.0)]
    SameId(SlotId),
    /// Two slots share frames.
    #[error("slots {} and {} overlap at gfn {:#x}", .0.id.0, .1.id.0, .1.base.0)]
    Overlap(Slot, Slot),
}

/// A frame or an offset that lies in no slot. The call that returns it has changed nothing.
///
/// ```
/// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
/// let tree = Tree::new(Layout::new([Slot { id: SlotId(7), base: Gfn(0), frames: 32 }])?)?;
/// let error = tree.absorb_bitmap(SlotId(7), &[1 << 32]).unwrap_err();
/// assert_eq!(error.to_string(), "frames 0x20..0x21 lie outside slot 7, which has 0x20 frames");
/// let error = tree.mark(FrameRun { start: Gfn(30), count: 3 }).unwrap_err();
/// assert_eq!(error.to_string(), "gfn 0x1e..0x21 is not inside any one memory slot");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OutOfSlot {
    /// No slot has this number.
    #[error("there is no slot {} (frame offset {offset:#x})", slot.0)]
    NoSlot {
        /// The requested slot number.
        slot: SlotId,
        /// The requested offset, in frames.
        offset: u64,
    },
    /// The offset lies past the end of the slot.
    #[error(
        "frames {offset:#x}..{:#x} lie outside slot {}, which has {frames:#x} frames",
        offset.saturating_add(*count), slot.0
    )]
    PastSlot {
        /// The slot.
        slot: SlotId,
        /// First requested frame, relative to the slot's base.
        offset: u64,
        /// Number of requested frames.
        count: u64,
        /// Length of the slot in frames.
        frames: u64,
    },
    /// The frames lie in no slot, or extend past the end of one.
    #[error("{run} is not inside any one memory slot")]
    NotInOneSlot {
        /// The requested frames.
        run: FrameRun,
    },
}

/// Number of bits of a guest physical address, at most: 52 on x86-64 and on arm64.
const ADDRESS_BITS: u32 = 52;

/// The slots of a guest, ascending by frame, and the position of each in a tree's leaf level.
///
/// A layout is immutable and cheap to share in an `Arc`. A look-up is a binary search over the
/// slots, O(log slots). Operations that are documented as O(1) remember the last slot.
///
/// ```
/// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId};
/// let layout = Layout::new([
///     Slot { id: SlotId(0), base: Gfn(0), frames: 100 },
///     Slot { id: SlotId(1), base: Gfn(0x100000), frames: 64 },
/// ])?;
/// assert_eq!(layout.frames(), 164);
/// assert_eq!(layout.locate(Gfn(0x100003)), Some((SlotId(1), 3)));
/// assert!(!layout.contains(FrameRun { start: Gfn(98), count: 3 }), "it ends in a hole");
/// assert!(layout.slots().map(|slot| slot.run()).all(|run| layout.contains(run)));
/// # Ok::<(), driftline_dirty_tracker::LayoutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    slots: Vec<PlacedSlot>,
    /// Indices into `slots`, ascending by slot number.
    by_id: Vec<(SlotId, usize)>,
    leaf_words: u64,
    page: PageSize,
}

/// A slot and the index of its first leaf word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedSlot {
    pub(crate) slot: Slot,
    pub(crate) first_word: u64,
}

impl PlacedSlot {
    pub(crate) fn words(&self) -> u64 {
        self.slot.frames.div_ceil(64)
    }

    /// Returns whether `run` lies inside the slot.
    pub(crate) fn has(&self, run: FrameRun) -> bool {
        let offset = run.start.0.wrapping_sub(self.slot.base.0);
        offset < self.slot.frames && run.count <= self.slot.frames - offset
    }

    /// Returns the leaf bit of `gfn` if the slot has that frame.
    #[inline]
    pub(crate) fn bit_in(&self, gfn: Gfn) -> Option<u64> {
        let offset = gfn.0.wrapping_sub(self.slot.base.0);
        (offset < self.slot.frames).then(|| self.first_word * 64 + offset)
    }

    /// Returns the leaf bit of a frame of the slot.
    pub(crate) fn bit_of(&self, gfn: Gfn) -> u64 {
        self.first_word * 64 + (gfn.0 - self.slot.base.0)
    }

    /// Returns the slot's words in the leaf level.
    pub(crate) fn range(&self) -> Range<usize> {
        self.first_word as usize..(self.first_word + self.words()) as usize
    }

    /// Checks that `bitmap` has bits only for frames of the slot. The error names the first bit
    /// that is not.
    pub(crate) fn check_bitmap(&self, bitmap: &[u64]) -> Result<(), OutOfSlot> {
        let Slot { id: slot, frames, .. } = self.slot;
        for (w, &bits) in bitmap.iter().enumerate().skip((frames / 64) as usize) {
            let valid = frames.saturating_sub(w as u64 * 64);
            let stray = bits >> valid << valid;
            if stray != 0 {
                let offset = w as u64 * 64 + u64::from(stray.trailing_zeros());
                return Err(OutOfSlot::PastSlot { slot, offset, count: 1, frames });
            }
        }
        Ok(())
    }
}

impl Layout {
    /// Creates a layout of `slots`, which may come in any order, with frames of 4 KiB. O(slots *
    /// log slots).
    ///
    /// # Errors
    ///
    /// Returns an error if there are no slots, if a slot has no frames or ends past the last guest
    /// frame, or if two slots have the same number or overlap.
    pub fn new(slots: impl IntoIterator<Item = Slot>) -> Result<Self, LayoutError> {
        Self::with_page_size(PageSize::default(), slots)
    }

    /// As [`new`](Self::new), with frames of another size. Example at [`PageSize`].
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_page_size(
        page: PageSize,
        slots: impl IntoIterator<Item = Slot>,
    ) -> Result<Self, LayoutError> {
        let limit = 1 << (ADDRESS_BITS - page.shift());
        let mut slots: Vec<Slot> = slots.into_iter().collect();
        slots.sort_by_key(|s| s.base);
        if slots.is_empty() {
            return Err(LayoutError::NoSlots);
        }
        for s in &slots {
            if s.frames == 0 {
                return Err(LayoutError::EmptySlot(*s));
            }
            if s.base.0.checked_add(s.frames).is_none_or(|end| end > limit) {
                return Err(LayoutError::PastEnd(*s));
            }
        }
        for pair in slots.windows(2) {
            if pair[0].run().end() > pair[1].base {
                return Err(LayoutError::Overlap(pair[0], pair[1]));
            }
        }
        let mut by_id: Vec<(SlotId, usize)> = slots.iter().map(|s| s.id).zip(0..).collect();
        by_id.sort();
        if let Some(pair) = by_id.windows(2).find(|p| p[0].0 == p[1].0) {
            return Err(LayoutError::SameId(pair[0].0));
        }
        let mut leaf_words = 0;
        let slots = slots
            .into_iter()
            .map(|slot| {
                let placed = PlacedSlot { slot, first_word: leaf_words };
                leaf_words += placed.words();
                placed
            })
            .collect();
        Ok(Self { slots, by_id, leaf_words, page })
    }

    /// Returns the slots, ascending by frame.
    pub fn slots(&self) -> impl ExactSizeIterator<Item = &Slot> {
        self.slots.iter().map(|p| &p.slot)
    }

    /// Returns the number of frames in all slots. O(slots).
    pub fn frames(&self) -> u64 {
        self.slots.iter().map(|p| p.slot.frames).sum()
    }

    /// Returns the number of 64-bit words in the leaf level of a tree over this layout. O(1).
    pub(crate) fn leaf_words(&self) -> u64 {
        self.leaf_words
    }

    /// Returns the slot of `gfn` and its offset in the slot, in frames; `None` if `gfn` is in no
    /// slot.
    pub fn locate(&self, gfn: Gfn) -> Option<(SlotId, u64)> {
        self.placed_at(gfn).map(|p| (p.slot.id, gfn.0 - p.slot.base.0))
    }

    /// Returns whether `run` is not empty and lies entirely inside one slot.
    pub fn contains(&self, run: FrameRun) -> bool {
        run.count > 0 && self.bit_of_run(run).is_ok()
    }

    /// Returns the size of a frame.
    pub fn page_size(&self) -> PageSize {
        self.page
    }

    /// Returns the parts of `run` that lie in slots, ascending. No part crosses the end of a slot.
    pub(crate) fn parts(&self, run: FrameRun) -> impl Iterator<Item = FrameRun> {
        let first = self.slots.partition_point(|p| p.slot.run().end() <= run.start);
        self.slots[first..].iter().map_while(move |p| {
            let start = p.slot.base.max(run.start);
            let end = p.slot.run().end().min(run.end());
            (start < end).then(|| FrameRun { start, count: end.0 - start.0 })
        })
    }

    fn placed_at(&self, gfn: Gfn) -> Option<&PlacedSlot> {
        let after = self.slots.partition_point(|p| p.slot.base <= gfn);
        let p = &self.slots[after.checked_sub(1)?];
        (gfn < p.slot.run().end()).then_some(p)
    }

    pub(crate) fn placed(&self) -> &[PlacedSlot] {
        &self.slots
    }

    pub(crate) fn placed_by_id(&self, id: SlotId) -> Option<&PlacedSlot> {
        let at = self.by_id.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(&self.slots[self.by_id[at].1])
    }

    /// As [`placed_by_id`](Self::placed_by_id), with an error that names the missing slot.
    pub(crate) fn placed_of(&self, slot: SlotId) -> Result<PlacedSlot, OutOfSlot> {
        self.placed_by_id(slot).copied().ok_or(OutOfSlot::NoSlot { slot, offset: 0 })
    }

    /// Returns the slot and the part of `bitmap` that covers it, or an error if `bitmap` has other
    /// bits.
    pub(crate) fn checked_bitmap<'b>(
        &self,
        slot: SlotId,
        bitmap: &'b [u64],
    ) -> Result<(PlacedSlot, &'b [u64]), OutOfSlot> {
        let placed = self.placed_of(slot)?;
        placed.check_bitmap(bitmap)?;
        Ok((placed, &bitmap[..bitmap.len().min(placed.words() as usize)]))
    }

    /// Returns the slot in which all of `run` lies.
    pub(crate) fn placed_around(&self, run: FrameRun) -> Result<&PlacedSlot, OutOfSlot> {
        let around = self.placed_at(run.start).filter(|p| p.has(run));
        around.ok_or(OutOfSlot::NotInOneSlot { run })
    }

    /// Returns the leaf bit of the first frame of `run`, which must lie in one slot.
    pub(crate) fn bit_of_run(&self, run: FrameRun) -> Result<u64, OutOfSlot> {
        Ok(self.placed_around(run)?.bit_of(run.start))
    }

    /// Returns the slot of a frame that KVM names by slot number and offset.
    pub(crate) fn placed_with(&self, slot: SlotId, offset: u64) -> Result<&PlacedSlot, OutOfSlot> {
        let p = self.placed_by_id(slot).ok_or(OutOfSlot::NoSlot { slot, offset })?;
        if offset >= p.slot.frames {
            let frames = p.slot.frames;
            return Err(OutOfSlot::PastSlot { slot, offset, count: 1, frames });
        }
        Ok(p)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(id: u32, base: u64, frames: u64) -> Slot {
        Slot { id: SlotId(id), base: Gfn(base), frames }
    }

    #[test]
    fn invalid_slot_lists_are_refused() {
        let refused = |slots: &[Slot]| Layout::new(slots.iter().copied()).unwrap_err();
        assert_eq!(refused(&[]), LayoutError::NoSlots);
        assert!(matches!(refused(&[slot(0, 0, 0)]), LayoutError::EmptySlot(_)));
        assert!(matches!(refused(&[slot(0, u64::MAX, 2)]), LayoutError::PastEnd(_)));
        assert!(matches!(refused(&[slot(0, 1 << 40, 1)]), LayoutError::PastEnd(_)));
        assert!(matches!(refused(&[slot(0, 0, 2), slot(1, 1, 1)]), LayoutError::Overlap(..)));
        assert!(matches!(refused(&[slot(3, 0, 2), slot(3, 9, 1)]), LayoutError::SameId(SlotId(3))));
    }

    #[test]
    fn error_names_frames_outside_their_slot() {
        let layout = Layout::new([slot(0, 0, 10), slot(7, 100, 10)]).unwrap();
        let e = layout.placed_with(SlotId(7), 10).unwrap_err();
        assert_eq!(e.to_string(), "frames 0xa..0xb lie outside slot 7, which has 0xa frames");
        let e = layout.placed_with(SlotId(2), 5).unwrap_err();
        assert_eq!(e.to_string(), "there is no slot 2 (frame offset 0x5)");
        let run = FrameRun { start: Gfn(8), count: 3 };
        let e = layout.bit_of_run(run).unwrap_err();
        assert_eq!(e.to_string(), "gfn 0x8..0xb is not inside any one memory slot");
        assert_eq!(layout.locate(Gfn(50)), None);
        assert_eq!(layout.bit_of_run(FrameRun { start: Gfn(103), count: 1 }), Ok(64 + 3));
    }

    #[test]
    fn parts_are_the_intersection_with_each_slot() {
        let layout = Layout::new([slot(0, 10, 10), slot(1, 20, 5), slot(2, 40, 10)]).unwrap();
        let run = |start, count| FrameRun { start: Gfn(start), count };
        let parts = |start, count| layout.parts(run(start, count)).collect::<Vec<_>>();
        assert_eq!(parts(0, 100), [run(10, 10), run(20, 5), run(40, 10)]);
        assert_eq!(parts(15, 7), [run(15, 5), run(20, 2)]);
        assert_eq!(parts(22, 20), [run(22, 3), run(40, 2)]);
        assert_eq!(parts(25, 15), []);
        assert_eq!(parts(50, 9), []);
    }

    #[test]
    fn page_size_bounds_the_frames() {
        for (page, limit) in
            [(PageSize::Kib4, 1 << 40), (PageSize::Kib16, 1 << 38), (PageSize::Kib64, 1 << 36)]
        {
            let last = Layout::with_page_size(page, [slot(0, limit - 1, 1)]).unwrap();
            assert_eq!(last.page_size(), page);
            let past = Layout::with_page_size(page, [slot(0, limit - 1, 2)]);
            assert!(matches!(past, Err(LayoutError::PastEnd(_))), "{page:?}");
        }
    }
}
