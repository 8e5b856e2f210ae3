//! Divides guest memory into ranges of equal size (bins), and counts frames per bin.
//!
//! Bins divide memory, not addresses: where memory has a hole, a bin continues after it.

use driftline_dirty_tracker::{FrameRun, Layout, PAGE_SIZE};

use crate::model::MemoryRange;

/// See the module documentation.
pub(super) struct Bins {
    /// The frames of each memory slot, and the number of frames of memory before them.
    slots: Vec<(FrameRun, u64)>,
    /// Binary logarithm of the number of frames in a bin.
    shift: u32,
    count: usize,
}

impl Bins {
    /// Divides all of `layout` into at most `most` bins (at least one). A bin's frames are the
    /// smallest power of two with which that many bins suffice.
    pub(super) fn new(layout: &Layout, most: u32) -> Self {
        let mut frames = 0;
        let place = |run: FrameRun| {
            let before = frames;
            frames += run.count;
            (run, before)
        };
        let slots = layout.slots().map(|slot| slot.run()).map(place).collect();
        let bin = frames.div_ceil(u64::from(most.max(1))).next_power_of_two();
        // At most `most`, which is a u32.
        let count = usize::try_from(frames.div_ceil(bin)).unwrap_or(usize::MAX);
        Self { slots, shift: bin.trailing_zeros(), count }
    }

    /// Returns the bytes of a bin; the last bin may have fewer.
    pub(super) fn bytes(&self) -> u64 {
        PAGE_SIZE << self.shift
    }

    /// Returns the ranges of guest memory, in the order of the bins.
    pub(super) fn memory(&self) -> Vec<MemoryRange> {
        let range = |(run, _): &(FrameRun, u64)| MemoryRange {
            gpa: run.start.gpa(),
            bytes: run.count * PAGE_SIZE,
        };
        self.slots.iter().map(range).collect()
    }

    /// Counts the frames of `runs`, which ascend, in each bin. O(runs + bins + slots).
    pub(super) fn count(&self, runs: impl Iterator<Item = FrameRun>) -> Vec<u64> {
        let mut bins = vec![0; self.count];
        let mut slots = self.slots.iter().peekable();
        for run in runs {
            while slots.next_if(|(slot, _)| slot.end() <= run.start).is_some() {}
            let Some((slot, before)) = slots.peek() else { break };
            let mut at = before + run.start.0.saturating_sub(slot.start.0);
            let end = at + run.count;
            while at < end {
                let next = (((at >> self.shift) + 1) << self.shift).min(end);
                if let Some(bin) = bins.get_mut((at >> self.shift) as usize) {
                    *bin += next - at;
                }
                at = next;
            }
        }
        bins
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftline_dirty_tracker::{Gfn, Slot, SlotId};
    use proptest::prelude::*;

    fn layout() -> Layout {
        let slot = |id, base, frames| Slot { id: SlotId(id), base: Gfn(base), frames };
        Layout::new([slot(0, 0, 100), slot(1, 0x1000, 60)]).unwrap()
    }

    fn run(start: u64, count: u64) -> FrameRun {
        FrameRun { start: Gfn(start), count }
    }

    #[test]
    fn bins_continue_after_a_hole() {
        let bins = Bins::new(&layout(), 10);
        assert_eq!((bins.bytes(), bins.count), (16 * 4096, 10), "160 frames, 16 in each");
        let expected = [(0, 100), (0x1000, 60)].map(|(gfn, n)| (gfn * 4096, n * 4096));
        let expected = expected.map(|(gpa, bytes)| MemoryRange { gpa, bytes });
        assert_eq!(bins.memory(), expected);
        // The seventh bin has the end of the first slot and the first 12 frames of the second.
        let counted = bins.count([run(15, 2), run(96, 4), run(0x1000, 13)].into_iter());
        assert_eq!(counted, [1, 1, 0, 0, 0, 0, 16, 1, 0, 0]);
        for (most, bytes) in [(1, 256), (0, 256), (159, 2), (160, 1), (u32::MAX, 1)] {
            assert_eq!(Bins::new(&layout(), most).bytes(), bytes * 4096, "{most}");
        }
    }

    proptest! {
        #[test]
        fn each_frame_counts_in_exactly_one_bin(
            marked in proptest::collection::btree_set(0u64..160, 0..160),
            most in 1u32..200,
        ) {
            let gfn = |at: u64| if at < 100 { at } else { 0x1000 + at - 100 };
            let bins = Bins::new(&layout(), most);
            let counted = bins.count(marked.iter().map(|at| run(gfn(*at), 1)));
            let mut expected = vec![0u64; bins.count];
            for at in &marked {
                expected[(at >> bins.shift) as usize] += 1;
            }
            prop_assert!(counted.len() <= most as usize);
            prop_assert_eq!(counted, expected);
        }
    }
}
