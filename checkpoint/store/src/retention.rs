//! Tracks which slots are needed, and until when.
//!
//! A slot that was written in epoch a and is superseded in epoch b holds a frame of all epochs from
//! a to b - 1. Epochs are dropped oldest first, so slots become free in the order in which they are
//! superseded. The slots superseded in b are free once it is durable that the oldest retained epoch
//! is b or a later one.

use std::collections::VecDeque;

use driftline_dirty_tracker::Layout;
use driftline_guest::Section;

use crate::address::MEMORY;
use crate::alloc::{SlotRun, Slots};
use crate::block_map::BlockMap;
use crate::damage::Damage;
use crate::epoch_reader::Record;
use crate::error::StoreError;
use crate::extents::{Entries, joined};
use crate::frame_map::{FrameMap, runs_of};
use crate::limits::NO_SLOT;
use crate::log::LogFile;
use crate::records::StoredRun;

/// The slots that durable epochs need.
#[derive(Debug, Default)]
pub(crate) struct Space {
    /// Slot of each frame of the latest epoch, for one memory slot of the guest after the other;
    /// [`NO_SLOT`] for zeros.
    map: Vec<u32>,
    /// First frame and end of each memory slot, and the index in `map` at which it begins.
    places: Vec<(u64, u64, usize)>,
    /// The same as `map`, for blocks of drives.
    blocks: BlockMap,
    /// Slots of the latest epoch that are not in `map`, because another process wrote it.
    before: Vec<SlotRun>,
    /// Superseded slots by the epoch that superseded them, ascending.
    superseded: VecDeque<(u64, Vec<SlotRun>)>,
    /// Number of frames of the latest epoch that are not zeros.
    stored: u64,
    /// Whether `superseded` is not maintained: without drops it would grow without limit. The log
    /// has the information if it is needed later.
    untracked: bool,
}

impl Space {
    /// Returns the space of a store without epochs. Takes 4 bytes for each frame of the guest, and
    /// for blocks of drives what a [`BlockMap`] takes.
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

    /// Returns what the epochs of `log` need, and the slots of its page file up to the last that
    /// they use. The page file has `total` slots.
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
                let epoch = log.epochs[index].info.epoch;
                log.damaged(index, Damage::Used { epoch, cause })
            })
        })?;
        space.before = map.slots();
        space.stored = space.before.iter().map(|run| u64::from(run.count)).sum();
        Ok((space, slots))
    }

    /// Begins to track when each slot becomes free, with the retained epochs in `log`.
    pub(crate) fn track(&mut self, log: &mut LogFile) -> Result<(), StoreError> {
        self.superseded.clear();
        self.walk(log, |_, _, _| Ok(()))?;
        self.untracked = false;
        Ok(())
    }

    /// Goes through the epochs that `log` retains and notes which slots each has superseded. Calls
    /// `on_epoch` with the slots that each epoch brought, ascending; for the oldest, with all slots
    /// that it has. Returns where the frames of the latest epoch are.
    fn walk(
        &mut self,
        log: &mut LogFile,
        mut on_epoch: impl FnMut(&LogFile, usize, &[SlotRun]) -> Result<(), StoreError>,
    ) -> Result<FrameMap, StoreError> {
        let mut map = FrameMap::default();
        let count = log.epochs.len();
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
                    self.superseded.push_back((log.epochs[index].info.epoch, superseded));
                }
            }
        }
        Ok(map)
    }

    /// Returns whether it is tracked when each slot becomes free.
    pub(crate) fn is_tracked(&self) -> bool {
        !self.untracked
    }

    /// Notes that epoch `epoch` is durable and has `entries`; a full epoch has nothing else. With
    /// `tracked` false, [`drop_before`](Self::drop_before) may be called again only after
    /// [`track`](Self::track).
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
            // A new vector, not a filled one: its zeros come from the system, so that parts without
            // a frame take no memory.
            self.map = vec![NO_SLOT; self.map.len()];
            self.blocks.clear();
            self.stored = 0;
        }
        let mut places = self.places.iter().copied().peekable();
        for (run, slot) in entries.runs() {
            let mut replaced = 0;
            let mut on_old = |old: u32| {
                replaced += 1;
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
                    let Some(entry) = self.map.get_mut(index) else { continue };
                    let (old, new) = (*entry, slot.map_or(NO_SLOT, |slot| slot + nth));
                    // Even a write of the same value would make the system allocate memory.
                    if old != new {
                        *entry = new;
                    }
                    if old != NO_SLOT {
                        on_old(old);
                    }
                }
            }
            self.stored = self.stored + slot.map_or(0, |_| run.count) - replaced;
        }
        let mut superseded = joined(superseded);
        if full {
            superseded.append(&mut self.before);
        }
        if !superseded.is_empty() && tracked {
            self.superseded.push_back((epoch, superseded));
        }
    }

    /// Returns the slots that no epoch needs once `oldest` is the oldest retained one. The caller
    /// owns them.
    pub(crate) fn drop_before(&mut self, oldest: u64) -> Vec<SlotRun> {
        let count = self.superseded.partition_point(|(epoch, _)| *epoch <= oldest);
        self.superseded.drain(..count).flat_map(|(_, runs)| runs).collect()
    }

    /// Returns the number of frames of the latest epoch that are stored.
    pub(crate) fn stored(&self) -> u64 {
        self.stored
    }
}

/// Changes that an epoch makes to the one before it.
pub(crate) struct Applied {
    /// Slots that the epoch no longer has.
    pub(crate) superseded: Vec<SlotRun>,
    /// Slots that the epoch brought, ascending.
    pub(crate) new: Vec<SlotRun>,
}

/// Updates the map of the preceding epoch to that of epoch `index`.
pub(crate) fn apply(log: &mut LogFile, index: usize, map: &mut FrameMap) -> Result<(), StoreError> {
    apply_telling(log, index, map, |_| {}, |_| {}, |_| {})
}

/// Updates the map like [`apply`]. Returns the epoch's state.
pub(crate) fn apply_last(
    log: &mut LogFile,
    index: usize,
    map: &mut FrameMap,
) -> Result<Vec<Section>, StoreError> {
    let mut sections = Vec::new();
    apply_telling(log, index, map, |_| {}, |_| {}, |section| sections.push(section))?;
    Ok(sections)
}

/// Updates the map like [`apply`]. Returns the slots that were superseded and brought.
fn apply_noting(
    log: &mut LogFile,
    index: usize,
    map: &mut FrameMap,
) -> Result<Applied, StoreError> {
    let (mut old, mut new) = (Vec::new(), Vec::new());
    if log.epochs[index].front.is_whole() {
        old.extend(map.all().map(|(_, location)| location.slot));
    }
    apply_telling(log, index, map, |slot| old.push(slot), |run| new.push(run), |_| {})?;
    // Frames ascend in an epoch, but slots may not.
    new.sort_unstable();
    Ok(Applied { superseded: runs_of(old), new })
}

/// Updates the map like [`apply`]. Calls `on_old` with each slot that a frame was in before and is
/// no longer in, unless the epoch is whole, `on_new` with the slots of its frames, and `on_section`
/// with the epoch's state.
fn apply_telling(
    log: &mut LogFile,
    index: usize,
    map: &mut FrameMap,
    mut on_old: impl FnMut(u32),
    mut on_new: impl FnMut(SlotRun),
    mut on_section: impl FnMut(Section),
) -> Result<(), StoreError> {
    let mut reader = log.epoch(index)?;
    if reader.front.is_whole() {
        map.clear();
    }
    while let Some(record) = reader.next()? {
        match record {
            Record::Frames(runs, crcs) => {
                map.put(runs, crcs, &mut on_old);
                runs.iter().map(StoredRun::slots).for_each(&mut on_new);
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

    /// Returns the number of the map's pages that have memory. Memory of other tests does not
    /// count.
    fn resident(space: &Space) -> usize {
        let first = space.map.as_ptr().addr() / 4096;
        let mut pages = vec![0; space.map.len() * 4 / 4096 * 8];
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        pagemap.read_exact_at(&mut pages, first as u64 * 8).unwrap();
        // The highest of a page's 64 bits.
        pages.iter().skip(7).step_by(8).filter(|byte| **byte & 0x80 != 0).count()
    }

    #[test]
    fn full_epoch_of_sparse_memory_takes_no_memory() {
        // 1 TiB, whose map has 1 GiB.
        const FRAMES: u64 = 1 << 28;
        let slot = Slot { id: SlotId(0), base: Gfn(0), frames: FRAMES };
        let mut space = Space::new(&Layout::new([slot]).unwrap());
        for epoch in 1..4 {
            let mut entries = Entries::default();
            entries.push(Gfn(7 + epoch), epoch as u32, 1);
            entries.push(Gfn(FRAMES - 9), epoch as u32 + 100, 2);
            entries.zeros(FrameRun { start: Gfn(1 << 20), count: 1 << 18 });
            entries.keep_latest(false);
            space.append(epoch, true, &entries, epoch > 1);
            assert_eq!(space.stored(), 2);
            let pages = resident(&space);
            // Two pages are written to, as huge pages where the system prefers those.
            assert!((2..=1024 + 2).contains(&pages), "{pages} pages have memory");
        }
    }
}
