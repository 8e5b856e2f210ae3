//! The slots of the blocks of drives, which may be large and nearly empty. Takes about 50 bytes for
//! each group of 64 blocks of which at least one is stored, and 4 bytes for each block whose slot
//! does not directly follow its predecessor's.

use std::collections::BTreeMap;

use driftline_dirty_tracker::FrameRun;

use crate::alloc::SlotRun;
use crate::limits::NO_SLOT;

/// Number of blocks of a chunk.
const CHUNK: u64 = 64;

/// The stored blocks of a chunk.
#[derive(Debug, PartialEq, Eq)]
enum BlockChunk {
    /// Mask of the stored blocks, and the slot of the first; the others are in the slots that
    /// follow.
    Run(u64, u32),
    /// Mask of the stored blocks, and their slots.
    Each(u64, Box<[u32]>),
}

impl BlockChunk {
    fn of(slots: &[u32; CHUNK as usize]) -> Option<Self> {
        let there = slots.iter().filter(|slot| **slot != NO_SLOT);
        let first = *there.clone().next()?;
        let which = |mask: u64, (at, slot): (usize, &u32)| mask | u64::from(*slot != NO_SLOT) << at;
        let mask = slots.iter().enumerate().fold(0, which);
        match there.clone().zip(first..).all(|(is, slot)| *is == slot) {
            true => Some(Self::Run(mask, first)),
            false => Some(Self::Each(mask, there.copied().collect())),
        }
    }

    /// Returns the slot of each block.
    fn slots(&self) -> [u32; CHUNK as usize] {
        let mut slots = [NO_SLOT; CHUNK as usize];
        let (mask, mut next) = match self {
            Self::Run(mask, _) | Self::Each(mask, _) => (*mask, 0),
        };
        for (at, slot) in slots.iter_mut().enumerate().filter(|(at, _)| mask >> at & 1 == 1) {
            *slot = match self {
                Self::Run(_, first) => first + next,
                Self::Each(_, each) => each.get(next as usize).copied().unwrap_or(NO_SLOT),
            };
            debug_assert!(*slot != NO_SLOT, "{at}");
            next += 1;
        }
        slots
    }
}

/// The map; see the module.
#[derive(Debug, Default)]
pub(crate) struct BlockMap {
    chunks: BTreeMap<u64, BlockChunk>,
}

impl BlockMap {
    pub(crate) fn clear(&mut self) {
        self.chunks.clear();
    }

    /// Notes that the blocks of `run` are in slots from `slot` on, or, without one, are zeros.
    /// Calls `on_old` with each slot that one of them was in before. The cost of zeros depends on
    /// the number of stored blocks only.
    pub(crate) fn put(&mut self, run: FrameRun, slot: Option<u32>, mut on_old: impl FnMut(u32)) {
        let (from, end) = (run.start.0, run.end().0);
        let mut change = |number: u64, had: Option<&BlockChunk>| {
            let first = number * CHUNK;
            let mut slots = had.map_or([NO_SLOT; CHUNK as usize], BlockChunk::slots);
            for block in from.max(first)..end.min(first + CHUNK) {
                let new = slot.map_or(NO_SLOT, |slot| slot + (block - from) as u32);
                let old = std::mem::replace(&mut slots[(block - first) as usize], new);
                if old != NO_SLOT {
                    on_old(old);
                }
            }
            BlockChunk::of(&slots)
        };
        let numbers = from / CHUNK..end.div_ceil(CHUNK);
        if slot.is_some() {
            for number in numbers {
                if let Some(chunk) = change(number, self.chunks.get(&number)) {
                    self.chunks.insert(number, chunk);
                }
            }
            return;
        }
        let emptied = self.chunks.extract_if(numbers, |number, chunk| {
            let left = change(*number, Some(chunk));
            let is_empty = left.is_none();
            left.into_iter().for_each(|left| *chunk = left);
            is_empty
        });
        emptied.for_each(drop);
    }

    /// Returns the slots of all blocks, in the order of the blocks.
    pub(crate) fn slots(&self) -> impl Iterator<Item = SlotRun> {
        self.chunks.values().flat_map(|chunk| {
            let (run, each): (Option<SlotRun>, &[u32]) = match chunk {
                BlockChunk::Run(mask, start) => {
                    (Some(SlotRun { start: *start, count: mask.count_ones() }), &[])
                }
                BlockChunk::Each(_, each) => (None, each),
            };
            run.into_iter().chain(each.iter().map(|start| SlotRun { start: *start, count: 1 }))
        })
    }
}

#[cfg(test)]
mod tests {
    use driftline_dirty_tracker::Gfn;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn block_map_matches_a_plain_map(
            steps in prop::collection::vec((0u64..400, 1u64..150, 0u8..3), 0..60),
        ) {
            let (mut map, mut model) = (BlockMap::default(), BTreeMap::new());
            let mut next = 1u32;
            for (start, count, kind) in steps {
                let run = FrameRun { start: Gfn(start), count };
                let slot = (kind > 0).then_some(next);
                let (mut replaced, mut expected) = (Vec::new(), Vec::new());
                map.put(run, slot, |old| replaced.push(old));
                for (block, slot) in run.frames().zip(next..) {
                    expected.extend(match kind {
                        0 => model.remove(&block),
                        _ => model.insert(block, slot),
                    });
                }
                next += count as u32;
                prop_assert_eq!(replaced, expected);
                let slots = map.slots().flat_map(|run| run.start..run.end() as u32);
                prop_assert!(slots.eq(model.values().copied()));
                prop_assert!(map.chunks.len() <= model.len());
            }
        }
    }
}
