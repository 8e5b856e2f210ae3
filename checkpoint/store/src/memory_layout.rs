//! Where the memory slots of a guest are in the memory file of a snapshot.

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, PAGE_SIZE, Slot};

/// A memory slot, and its place in a memory file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotPlace {
    /// The slot.
    pub slot: Slot,
    /// Offset of its first byte in the file, in bytes.
    pub offset: u64,
}

/// The places of all memory slots in a memory file: one after another, ascending by guest address,
/// without the holes between them.
///
/// ```
/// use driftline_store::MemoryFileLayout;
/// use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId};
/// let slot = |id, base, frames| Slot { id: SlotId(id), base: Gfn(base), frames };
/// let layout = Layout::new([slot(0, 0, 100), slot(1, 0x10_0000, 20)])?;
/// let file = MemoryFileLayout::new(&layout);
/// assert_eq!((file.slots()[1].offset, file.bytes()), (100 * 4096, 120 * 4096));
/// # Ok::<(), driftline_dirty_tracker::LayoutError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryFileLayout {
    slots: Vec<SlotPlace>,
    bytes: u64,
}

impl MemoryFileLayout {
    /// Returns the places of the slots of `layout`.
    pub fn new(layout: &Layout) -> Self {
        let mut bytes = 0;
        let place = |slot: &Slot| {
            let offset = bytes;
            bytes += slot.run().bytes();
            SlotPlace { slot: *slot, offset }
        };
        let slots = layout.slots().map(place).collect();
        Self { slots, bytes }
    }

    /// Returns the slots, ascending.
    pub fn slots(&self) -> &[SlotPlace] {
        &self.slots
    }

    /// Returns the length of the file, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the parts of `run` that lie in one slot each, and their offsets in the file. Frames
    /// in no slot are not among them.
    pub fn parts(&self, run: FrameRun) -> impl Iterator<Item = (FrameRun, u64)> {
        let first = self.slots.partition_point(|place| place.slot.run().end() <= run.start);
        let within = self.slots[first..].iter().take_while(move |p| p.slot.base < run.end());
        within.map(move |SlotPlace { slot, offset }| {
            let start = Gfn(run.start.0.max(slot.base.0));
            let end = run.end().min(slot.run().end());
            let part = FrameRun { start, count: end.0 - start.0 };
            (part, offset + (start.0 - slot.base.0) * PAGE_SIZE)
        })
    }
}

#[cfg(test)]
mod tests {
    use driftline_dirty_tracker::SlotId;

    use super::*;

    #[test]
    fn run_is_split_at_slots() {
        let slot = |id, base, frames| Slot { id: SlotId(id), base: Gfn(base), frames };
        let layout = Layout::new([slot(2, 30, 10), slot(0, 0, 10), slot(1, 10, 10)]).unwrap();
        let file = MemoryFileLayout::new(&layout);
        assert_eq!(file.bytes(), 30 * PAGE_SIZE);
        let parts = |start, count| {
            let parts = file.parts(FrameRun { start: Gfn(start), count });
            parts.map(|(run, at)| (run.start.0, run.count, at / PAGE_SIZE)).collect::<Vec<_>>()
        };
        assert_eq!(parts(5, 30), [(5, 5, 5), (10, 10, 10), (30, 5, 20)]);
        assert_eq!(parts(0, 10), [(0, 10, 0)]);
        assert_eq!(parts(39, 100), [(39, 1, 29)]);
        assert_eq!(parts(20, 10), []);
    }
}
