//! Which slots are needed, and until when.
//!
//! A slot that was written in epoch a and is superseded in epoch b holds a frame of all epochs from
//! a to b - 1. Epochs are dropped oldest first, so slots become free in the order in which they are
//! superseded: those of b once the oldest epoch that is kept is b or a later one, and that is
//! durable.

use std::collections::VecDeque;

use driftline_dirty_tracker::Layout;
use driftline_guest::Section;

use crate::address::MEMORY;
use crate::alloc::{SlotRun, Slots};
use crate::block_map::BlockMap;
use crate::epoch_reader::Record;
use crate::error::{Damage, StoreError};
use crate::extents::{Entries, joined};
use crate::frame_map::{FrameMap, runs_of};
use crate::limits::NO_SLOT;
use crate::log::LogFile;
use crate::records::Placed;

/// Slots that durable epochs need.
#[derive(Debug, Default)]
pub(crate) struct Space {
    /// Where each frame of the latest epoch is, slot after slot of the guest's memory; [`NO_SLOT`]
    /// where it is zeros.
    map: Vec<u32>,
    /// Each memory slot's first frame, its end, and where it begins in `map`.
    places: Vec<(u64, u64, usize)>,
    /// As `map`, of drives.
    blocks: BlockMap,
    /// Slots of the latest epoch that are not in `map`: it was another process's.
    before: Vec<SlotRun>,
    /// By the epoch in which they were superseded, ascending.
    superseded: VecDeque<(u64, Vec<SlotRun>)>,
    /// Frames of the latest epoch that are not zeros.
    stored: u64,
    /// Nothing is dropped, and `superseded` would grow for ever: the log has it, should it be
    /// needed.
    untracked: bool,
}

impl Space {
    /// No epochs yet. Takes 4 bytes for each frame of the guest, and later for blocks of drives
    /// what a [`BlockMap`] does.
    pub(crate) fn new(layout: &Layout) -> Self {
        let mut at = 0;
        let place = |slot: &driftline_dirty_tracker::Slot| {
            let place = (slot.base.0, slot.run().end().0, at);
            at += slot.frames as usize;
            place
        };
        let places = layout.slots().map(place).collect();
        Self { map: vec![NO_SLOT; at], places, ..Self::default() }
    }

    /// What the epochs of `log` need, and as many slots of its page file, which has `total`, as
    /// they reach to.
    pub(crate) fn of_log(
        layout: &Layout,
        log: &mut LogFile,
        total: u32,
    ) -> Result<(Self, Slots), StoreError> {
        let mut space = Self::new(layout);
        let mut slots = Slots::new(1);
        slots.allocate(1, 1);
        let map = space.walk(log, |log, index, used| {
            let end = used.last().map_or(0, |run| run.end());
            slots.grow_to(u32::try_from(end).unwrap_or(u32::MAX).min(total));
            let marked = used.iter().try_for_each(|run| slots.mark(*run));
            marked.map_err(|cause| {
                let epoch = log.groups[index].info.epoch;
                log.damaged(index, Damage::Used { epoch, cause })
            })
        })?;
        space.before = map.slots();
        space.stored = space.before.iter().map(|run| u64::from(run.count)).sum();
        Ok((space, slots))
    }

    /// From now on it is known which slots become free when; `log` says it of the epochs that are
    /// kept.
    pub(crate) fn track(&mut self, log: &mut LogFile) -> Result<(), StoreError> {
        self.superseded.clear();
        self.walk(log, |_, _, _| Ok(()))?;
        self.untracked = false;
        Ok(())
    }

    /// Goes through the epochs that `log` keeps and notes what each has superseded; `on_epoch`
    /// hears of the slots, ascending, that each has brought, the oldest of all that it has. Returns
    /// where the frames of the latest are.
    fn walk(
        &mut self,
        log: &mut LogFile,
        mut on_epoch: impl FnMut(&LogFile, usize, &[SlotRun]) -> Result<(), StoreError>,
    ) -> Result<FrameMap, StoreError> {
        let mut map = FrameMap::default();
        let count = log.groups.len();
        let first = count - log.kept().len();
        if count == 0 {
            return Ok(map);
        }
        for index in log.base_of(first)..count {
            let Applied { superseded, new } = apply_noting(log, index, &mut map)?;
            if index == first {
                on_epoch(log, index, &map.slots())?;
            } else if index > first {
                on_epoch(log, index, &new)?;
                if !superseded.is_empty() {
                    self.superseded.push_back((log.groups[index].info.epoch, superseded));
                }
            }
        }
        Ok(map)
    }

    /// Whether it is known which slots become free when.
    pub(crate) fn is_tracked(&self) -> bool {
        !self.untracked
    }

    /// Epoch `epoch` is durable and has `entries`; a full one has nothing else. Whether it will be
    /// asked for what becomes free: if not, only after [`track`](Self::track).
    pub(crate) fn append(&mut self, epoch: u64, full: bool, entries: &Entries, tracked: bool) {
        if !tracked {
            self.superseded = VecDeque::new();
            self.untracked = true;
        }
        let mut superseded = Vec::new();
        if full {
            let there = self.map.iter().filter(|slot| tracked && **slot != NO_SLOT);
            superseded.extend(there.map(|slot| SlotRun { start: *slot, count: 1 }));
            superseded.extend(self.blocks.slots().filter(|_| tracked));
            // Not filled: what no frame is noted in has no memory then. Zeros come from the system.
            self.map = vec![NO_SLOT; self.map.len()];
            self.blocks.clear();
            self.stored = 0;
        }
        let mut places = self.places.iter().copied().peekable();
        for (run, slot) in entries.runs() {
            let mut gone = 0;
            let mut on_old = |old: u32| {
                gone += 1;
                if tracked {
                    superseded.push(SlotRun { start: old, count: 1 });
                }
            };
            if !MEMORY.contains(&run.start.0) {
                self.blocks.put(run, slot, on_old);
            } else {
                for (frame, nth) in run.frames().zip(0..) {
                    while places.next_if(|(_, end, _)| *end <= frame.0).is_some() {}
                    // Every frame is in a memory slot of the guest.
                    let Some(&(start, _, at)) = places.peek() else { continue };
                    let index = at + frame.0.saturating_sub(start) as usize;
                    let Some(cell) = self.map.get_mut(index) else { continue };
                    let (old, new) = (*cell, slot.map_or(NO_SLOT, |slot| slot + nth));
                    // A write, even of what is there, would have the system give memory.
                    if old != new {
                        *cell = new;
                    }
                    if old != NO_SLOT {
                        on_old(old);
                    }
                }
            }
            self.stored = self.stored + slot.map_or(0, |_| run.count) - gone;
        }
        let mut superseded = joined(superseded);
        if full {
            superseded.append(&mut self.before);
        }
        if !superseded.is_empty() && tracked {
            self.superseded.push_back((epoch, superseded));
        }
    }

    /// The slots that nobody needs once `oldest` is the oldest epoch that is kept. They are the
    /// caller's.
    pub(crate) fn drop_before(&mut self, oldest: u64) -> Vec<SlotRun> {
        let count = self.superseded.partition_point(|(epoch, _)| *epoch <= oldest);
        self.superseded.drain(..count).flat_map(|(_, runs)| runs).collect()
    }

    /// Frames of the latest epoch that are stored.
    pub(crate) fn stored(&self) -> u64 {
        self.stored
    }
}

/// What an epoch does to those before it.
pub(crate) struct Applied {
    /// Slots that it does not have any more.
    pub(crate) superseded: Vec<SlotRun>,
    /// Slots that it brought, ascending.
    pub(crate) new: Vec<SlotRun>,
}

/// Makes of the map of the epoch before it that of group number `index`.
pub(crate) fn apply(log: &mut LogFile, index: usize, map: &mut FrameMap) -> Result<(), StoreError> {
    apply_telling(log, index, map, |_| {}, |_| {}, |_| {})
}

/// As [`apply`]. Returns the epoch's state.
pub(crate) fn apply_last(
    log: &mut LogFile,
    index: usize,
    map: &mut FrameMap,
) -> Result<Vec<Section>, StoreError> {
    let mut sections = Vec::new();
    apply_telling(log, index, map, |_| {}, |_| {}, |section| sections.push(section))?;
    Ok(sections)
}

/// As [`apply`], and says what became of slots.
fn apply_noting(
    log: &mut LogFile,
    index: usize,
    map: &mut FrameMap,
) -> Result<Applied, StoreError> {
    let (mut old, mut new) = (Vec::new(), Vec::new());
    if log.groups[index].front.is_whole() {
        old.extend(map.all().map(|(_, cell)| cell.slot));
    }
    apply_telling(log, index, map, |slot| old.push(slot), |run| new.push(run), |_| {})?;
    // Frames ascend in an epoch, slots need not.
    new.sort_unstable();
    Ok(Applied { superseded: runs_of(old), new })
}

/// Tells of each slot that a frame was in before and is not any more, unless the epoch is whole, of
/// those that it is in now, and of the epoch's state.
fn apply_telling(
    log: &mut LogFile,
    index: usize,
    map: &mut FrameMap,
    mut on_old: impl FnMut(u32),
    mut on_new: impl FnMut(SlotRun),
    mut on_section: impl FnMut(Section),
) -> Result<(), StoreError> {
    let mut group = log.group(index)?;
    if group.front.is_whole() {
        map.clear();
    }
    while let Some(record) = group.next()? {
        match record {
            Record::Frames(runs, crcs) => {
                map.put(runs, crcs, &mut on_old);
                runs.iter().map(Placed::slots).for_each(&mut on_new);
            }
            Record::Zeros(runs) => map.clear_frames(runs, &mut on_old),
            Record::Section(section) => on_section(section),
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::FileExt;

    use driftline_dirty_tracker::{FrameRun, Gfn, Slot, SlotId};

    use super::*;

    /// Pages of the map that have memory. Other tests' memory does not count.
    fn resident(space: &Space) -> usize {
        let first = space.map.as_ptr().addr() / 4096;
        let mut pages = vec![0; space.map.len() * 4 / 4096 * 8];
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        pagemap.read_exact_at(&mut pages, first as u64 * 8).unwrap();
        // The highest bit of a page's 64.
        pages.iter().skip(7).step_by(8).filter(|byte| **byte & 0x80 != 0).count()
    }

    #[test]
    fn a_full_epoch_of_sparse_memory_takes_none() {
        // 1 TiB, whose map has 1 GiB.
        const FRAMES: u64 = 1 << 28;
        let slot = Slot { id: SlotId(0), base: Gfn(0), frames: FRAMES };
        let mut space = Space::new(&Layout::new([slot]).unwrap());
        for epoch in 1..4 {
            let mut entries = Entries::default();
            entries.push(Gfn(7 + epoch), epoch as u32, 1);
            entries.push(Gfn(FRAMES - 9), epoch as u32 + 100, 2);
            entries.zeros(FrameRun { start: Gfn(1 << 20), count: 1 << 18 });
            entries.settle(false);
            space.append(epoch, true, &entries, epoch > 1);
            assert_eq!(space.stored(), 2);
            let pages = resident(&space);
            // Two are written to, as huge pages where the system likes those.
            assert!((2..=1024 + 2).contains(&pages), "{pages} pages have memory");
        }
    }
}
