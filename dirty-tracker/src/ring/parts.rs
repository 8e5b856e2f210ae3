//! Slots of the layout that are registered with KVM in parts.

use crate::{Gfn, Layout, Slot, SlotId};

/// Most parts of one slot, so that switching the logging of a large guest on takes few calls.
const MAX_PARTS: u32 = 64;
/// Highest number of a KVM slot on x86-64. Rings have 16 bits for it.
const MAX_KVM_SLOT: u32 = 32_763;

/// The way in which large slots are registered with KVM: in parts, each of which is a KVM slot.
///
/// KVM creates the tables of a slot in one call, and write-protects a slot in one. On a host
/// without hardware virtualization these calls take half a millisecond a GiB, and a kernel without
/// preemption runs nothing else on that processor meanwhile. With parts, other threads run between
/// the calls.
///
/// Part `n` of slot `id` is KVM slot `id + n * stride`, where the stride is one more than the
/// highest slot number of the layout. So the layout must have every number that a slot will ever
/// have (see [`Tracker::relayout`](crate::Tracker::relayout)), and KVM slots that are not in it
/// must have numbers above those of all parts. A slot has at most 64 parts, and fewer, down to one,
/// if the numbers would be too high for KVM.
///
/// The [`Harvester`](super::Harvester::with_parts) translates the entries of rings. The bitmaps of
/// a slot's parts, side by side, are the bitmap of the slot.
///
/// ```
/// use driftline_dirty_tracker::ring::SlotParts;
/// use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId};
/// let slot = Slot { id: SlotId(1), base: Gfn(0x1000), frames: 300 };
/// let parts = SlotParts::new(&Layout::new([slot])?, 128);
/// let kvm_slots: Vec<Slot> = parts.of(&slot).collect();
/// assert_eq!(kvm_slots[0], Slot { id: SlotId(1), base: Gfn(0x1000), frames: 128 });
/// assert_eq!(kvm_slots[2], Slot { id: SlotId(5), base: Gfn(0x1100), frames: 44 });
/// assert_eq!(parts.locate(SlotId(5), 3), (SlotId(1), 256 + 3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotParts {
    /// Frames of each part but the last of a slot: a multiple of 64.
    frames: u64,
    stride: u32,
}

impl SlotParts {
    /// Divides the slots of `layout` into parts of `frames` frames. That is rounded up to whole
    /// words of a bitmap, and to a multiple of itself if a slot had too many parts. O(slots).
    pub fn new(layout: &Layout, frames: u64) -> Self {
        let last = layout.slots().map(|slot| slot.id.0).max().unwrap_or(0);
        let stride = last.saturating_add(1);
        let most = (1 + MAX_KVM_SLOT.saturating_sub(last) / stride).min(MAX_PARTS);
        let frames = frames.clamp(1, 1 << 52).next_multiple_of(64);
        let largest = layout.slots().map(|slot| slot.frames).max().unwrap_or(0);
        let frames = frames.max(largest.div_ceil(most.into()).next_multiple_of(frames));
        Self { frames, stride }
    }

    /// Returns the number of bitmap words of each part but the last of a slot.
    pub fn words(&self) -> u64 {
        self.frames / 64
    }

    /// Returns the parts of `slot`, which is of the layout, as KVM slots, ascending.
    pub fn of(&self, slot: &Slot) -> impl Iterator<Item = Slot> + use<> {
        let (Self { frames, stride }, slot) = (*self, *slot);
        (0..slot.frames.div_ceil(frames)).zip(0u32..).map(move |(n, number)| {
            let first = n * frames;
            Slot {
                id: SlotId(slot.id.0 + number * stride),
                base: Gfn(slot.base.0 + first),
                frames: frames.min(slot.frames - first),
            }
        })
    }

    /// Returns the slot of the layout, and the offset in it, of the frame that lies `offset` frames
    /// after the start of KVM slot `part`. O(1).
    pub fn locate(&self, part: SlotId, offset: u64) -> (SlotId, u64) {
        let before = u64::from(part.0 / self.stride) * self.frames;
        (SlotId(part.0 % self.stride), before.saturating_add(offset))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_of_parts_are_numbers_of_kvm_slots() {
        // A slot with number 600 could have 54 parts, but a part has whole words.
        for (id, count) in [(0, 64), (100, 64), (600, 32), (16_380, 2), (20_000, 1), (u32::MAX, 1)]
        {
            let slot = Slot { id: SlotId(id), base: Gfn(0), frames: 64 * 64 };
            let parts = SlotParts::new(&Layout::new([slot]).unwrap(), 64);
            let numbers: Vec<u32> = parts.of(&slot).map(|part| part.id.0).collect();
            assert_eq!(numbers.len(), count, "{id}: {numbers:?}");
            assert!(numbers.iter().all(|number| *number <= MAX_KVM_SLOT.max(id)), "{numbers:?}");
        }
    }

    fn config() -> ProptestConfig {
        let cases = if cfg!(miri) { 4 } else { 256 };
        ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
    }

    proptest! {
        #![proptest_config(config())]

        /// The parts of all slots have different numbers, lie side by side in their slot, and each
        /// frame of a part is found again.
        #[test]
        fn parts_are_the_slots(
            sizes in proptest::collection::vec(1u64..20_000, 1..4),
            ids in proptest::sample::subsequence((0u32..900).step_by(100).collect::<Vec<_>>(), 4),
            frames in 0u64..2_000,
            offset in 0u64..20_000,
        ) {
            let slot = |(nth, (frames, id)): (u64, (u64, u32))| {
                Slot { id: SlotId(id), base: Gfn(nth * 100_000), frames }
            };
            let slots: Vec<Slot> = (0..).zip(sizes.into_iter().zip(ids)).map(slot).collect();
            let layout = Layout::new(slots.clone()).unwrap();
            let parts = SlotParts::new(&layout, frames);
            prop_assert!(parts.words() * 64 >= frames);
            let mut numbers = Vec::new();
            for slot in &slots {
                let kvm_slots: Vec<Slot> = parts.of(slot).collect();
                prop_assert!(kvm_slots.len() as u32 <= MAX_PARTS);
                let mut end = slot.base;
                for part in kvm_slots {
                    prop_assert_eq!(part.base, end);
                    prop_assert!(part.frames > 0);
                    end = part.run().end();
                    let offset = offset % part.frames;
                    let (id, at) = parts.locate(part.id, offset);
                    prop_assert_eq!((id, slot.base.0 + at), (slot.id, part.base.0 + offset));
                    numbers.push(part.id);
                }
                prop_assert_eq!(end, slot.run().end());
            }
            numbers.sort();
            prop_assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }
}
