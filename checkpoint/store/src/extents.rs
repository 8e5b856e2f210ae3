//! The places of the frames of an epoch that is being written, as stretches of frames in stretches
//! of slots. It takes memory for each stretch, and 4 bytes for the checksum of each frame that is
//! not zeros. A run of zeros takes one stretch and no checksums, however long it is.

use std::collections::BinaryHeap;

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};

use crate::alloc::SlotRun;
use crate::epoch_encoder::StoredFrame;
use crate::limits::NO_SLOT;

/// A stretch: adjacent frames in adjacent slots, or frames of zeros. 24 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stretch {
    start: u64,
    /// Index of the first checksum; for zeros, the index at which the checksums of the next stretch
    /// would begin. No later stretch has a lower index.
    crcs: usize,
    count: u32,
    /// First slot; [`NO_SLOT`] for zeros.
    slot: u32,
}

impl Stretch {
    fn end(&self) -> u64 {
        self.start + u64::from(self.count)
    }

    fn is_stored(&self) -> bool {
        self.slot != NO_SLOT
    }

    /// Returns a key that is higher for the later of two stretches with a common frame. Two of
    /// zeros are equal.
    fn age(&self) -> (usize, bool) {
        (self.crcs, self.is_stored())
    }

    /// Returns the part with the frames `from` to `end`.
    fn part(self, from: u64, end: u64) -> Self {
        let (skip, count) = ((from - self.start) as u32, (end - from) as u32);
        match self.is_stored() {
            true => {
                Self { start: from, crcs: self.crcs + skip as usize, count, slot: self.slot + skip }
            }
            false => Self { start: from, count, ..self },
        }
    }

    /// Returns whether `next` continues where this one ends.
    fn leads_to(&self, next: &Self) -> bool {
        let joined = match (self.is_stored(), next.is_stored()) {
            (true, true) => {
                u64::from(self.slot) + u64::from(self.count) == u64::from(next.slot)
                    && self.crcs + self.count as usize == next.crcs
            }
            (stored, other) => stored == other,
        };
        joined && self.end() == next.start && self.count.checked_add(next.count).is_some()
    }
}

/// The frames of an epoch, and their places.
#[derive(Default)]
pub(crate) struct Entries {
    /// Stretches in the order in which they were added. After `keep_latest`, they ascend, and each
    /// frame is in one of them.
    stretches: Vec<Stretch>,
    crcs: Vec<u32>,
}

impl Entries {
    /// Adds a frame that is in `slot`, which no other frame is in.
    pub(crate) fn push(&mut self, frame: Gfn, slot: u32, crc: u32) {
        let stretch = Stretch { start: frame.0, crcs: self.crcs.len(), count: 1, slot };
        self.crcs.push(crc);
        self.add(stretch);
    }

    /// Adds frames of zeros.
    pub(crate) fn zeros(&mut self, run: FrameRun) {
        for FrameRun { start, count } in run.chunks(u64::from(u32::MAX)) {
            let (start, count) = (start.0, count as u32);
            self.add(Stretch { start, crcs: self.crcs.len(), count, slot: NO_SLOT });
        }
    }

    fn add(&mut self, stretch: Stretch) {
        match self.stretches.last_mut().filter(|last| last.leads_to(&stretch)) {
            Some(last) => last.count += stretch.count,
            None => self.stretches.push(stretch),
        }
    }

    /// Keeps the last entry of each frame; with `forget_zeros`, keeps no zeros. Returns the slots
    /// that are no longer needed. Nothing may be added after this.
    pub(crate) fn keep_latest(&mut self, forget_zeros: bool) -> Vec<SlotRun> {
        self.stretches.sort_unstable_by_key(|s| (s.start, s.age()));
        let mut old = Vec::new();
        // If any two stretches have a frame in common, so have two neighbours.
        if self.stretches.windows(2).any(|pair| pair[0].end() > pair[1].start) {
            let before = self.slots();
            self.stretches = latest(&self.stretches);
            let needed = self.slots().into_iter().map(frames_of).collect::<FrameSet>();
            let superseded = before.into_iter().flat_map(|run| needed.gaps(frames_of(run)));
            // They were slots, so the casts lose nothing.
            old.extend(
                superseded
                    .map(|run| SlotRun { start: run.start.0 as u32, count: run.count as u32 }),
            );
        }
        if forget_zeros {
            self.stretches.retain(Stretch::is_stored);
        }
        old
    }

    /// Returns the frames that are not zeros, ascending after `keep_latest`.
    pub(crate) fn stored(&self) -> impl Iterator<Item = StoredFrame> + Clone {
        let stored = self.stretches.iter().filter(|s| s.is_stored());
        stored.flat_map(|s| {
            let crcs = &self.crcs[s.crcs..s.crcs + s.count as usize];
            let places = (s.start..).zip(s.slot..);
            places.zip(crcs).map(|((frame, slot), crc)| StoredFrame { frame, slot, crc: *crc })
        })
    }

    /// Returns the frames of zeros, ascending after `keep_latest`.
    pub(crate) fn zero_runs(&self) -> impl Iterator<Item = FrameRun> + Clone {
        self.runs().filter(|(_, slot)| slot.is_none()).map(|(run, _)| run)
    }

    /// Returns the runs, each with its first slot if it is not zeros; ascending after
    /// `keep_latest`.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (FrameRun, Option<u32>)> + Clone {
        self.stretches.iter().map(|s| {
            let run = FrameRun { start: Gfn(s.start), count: s.count.into() };
            (run, s.is_stored().then_some(s.slot))
        })
    }

    /// Returns all slots, ascending.
    pub(crate) fn slots(&self) -> Vec<SlotRun> {
        let stored = self.stretches.iter().filter(|s| s.is_stored());
        joined(stored.map(|s| SlotRun { start: s.slot, count: s.count }).collect())
    }

    /// Returns the number of bytes of memory taken.
    #[cfg(test)]
    fn bytes(&self) -> usize {
        self.stretches.len() * size_of::<Stretch>() + self.crcs.len() * size_of::<u32>()
    }
}

/// Returns slots as frames, so that they can be in a set of frames.
fn frames_of(run: SlotRun) -> FrameRun {
    FrameRun { start: Gfn(run.start.into()), count: run.count.into() }
}

/// Reduces `all`, ascending, to the latest entry of each frame: ascending, each frame once.
fn latest(all: &[Stretch]) -> Vec<Stretch> {
    let (mut left, mut at): (Vec<Stretch>, u64) = (Vec::new(), 0);
    let mut coming = all.iter().copied().peekable();
    // The stretches that have begun; the latest first.
    let mut begun: BinaryHeap<((usize, bool), usize)> = BinaryHeap::new();
    let mut number = 0;
    loop {
        let next = coming.peek().map_or(u64::MAX, |s| s.start);
        match begun.peek().map(|(_, number)| all[*number]) {
            Some(top) if top.end() <= at => _ = begun.pop(),
            Some(top) if at < next => {
                let end = top.end().min(next);
                let part = top.part(at, end);
                match left.last_mut().filter(|last| last.leads_to(&part)) {
                    Some(last) => last.count += part.count,
                    None => left.push(part),
                }
                at = end;
            }
            _ => {
                let Some(new) = coming.next() else { return left };
                at = new.start;
                begun.push((new.age(), number));
                number += 1;
            }
        }
    }
}

/// Returns runs of slots, given in any order and each slot once, as ascending runs.
pub(crate) fn joined(mut runs: Vec<SlotRun>) -> Vec<SlotRun> {
    runs.sort_unstable();
    runs.dedup_by(|next, last| {
        let joins = last.end() == u64::from(next.start);
        last.count += if joins { next.count } else { 0 };
        joins
    });
    runs
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum EntryStep {
        /// Frames from a number on, in adjacent slots or not.
        Stored(u64, u64, bool),
        Zeros(u64, u64),
    }

    fn step() -> impl Strategy<Value = EntryStep> {
        let run = (0u64..200, 1u64..40);
        prop_oneof![
            2 => (run.clone(), any::<bool>())
                .prop_map(|((at, n), tight)| EntryStep::Stored(at, n, tight)),
            1 => run.prop_map(|(at, n)| EntryStep::Zeros(at, n)),
        ]
    }

    proptest! {
        #[test]
        fn last_entry_of_a_frame_wins(
            steps in prop::collection::vec(step(), 0..40),
            forget in any::<bool>(),
        ) {
            let (mut entries, mut model) = (Entries::default(), BTreeMap::new());
            let (mut slot, mut slots) = (1u32, Vec::new());
            for step in steps {
                match step {
                    EntryStep::Stored(at, count, tight) => {
                        for frame in at..at + count {
                            slot += if tight { 1 } else { 3 };
                            slots.push(slot);
                            entries.push(Gfn(frame), slot, slot ^ 0x55);
                            model.insert(frame, Some((slot, slot ^ 0x55)));
                        }
                    }
                    EntryStep::Zeros(at, count) => {
                        entries.zeros(FrameRun { start: Gfn(at), count });
                        model.extend((at..at + count).map(|frame| (frame, None)));
                    }
                }
            }
            prop_assert_eq!(entries.slots(), crate::frame_map::runs_of(slots.clone()));
            let old = entries.keep_latest(forget);
            let stored = entries.stored().map(|e| (e.frame, (e.slot, e.crc)));
            let expected = model.iter().filter_map(|(frame, place)| Some((*frame, (*place)?)));
            prop_assert!(stored.eq(expected));
            let zeros = entries.zero_runs().flat_map(FrameRun::frames).map(|gfn| gfn.0);
            let expected = model.iter().filter(|(_, place)| place.is_none() && !forget);
            prop_assert!(zeros.eq(expected.map(|(frame, _)| *frame)));
            let runs = entries.runs().map(|(run, _)| run);
            prop_assert!(runs.is_sorted_by(|a, b| a.end() <= b.start));
            // Every slot is either needed or freed.
            let all = [old.clone(), entries.slots()].concat();
            prop_assert_eq!(joined(all.clone()), crate::frame_map::runs_of(slots));
            prop_assert_eq!(all.iter().map(|run| u64::from(run.count)).sum::<u64>(),
                joined(all).iter().map(|run| u64::from(run.count)).sum::<u64>());
        }
    }

    /// A drive of 1 TiB with 1 GiB in it, in pieces of 1 MiB; all of it was discarded, and some was
    /// written again.
    #[test]
    fn large_drive_costs_its_data() {
        const TIB: u64 = 1 << 28;
        let mut entries = Entries::default();
        entries.zeros(FrameRun { start: Gfn(0), count: TIB });
        let (mut slot, data) = (1, 1 << 18);
        for piece in 0..1024 {
            for block in piece * (TIB / 1024)..piece * (TIB / 1024) + 256 {
                entries.push(Gfn(block), slot, 7);
                slot += 1;
            }
        }
        assert!(entries.bytes() <= 4 * data + 1025 * 24, "{}", entries.bytes());
        let before = entries.bytes();
        for piece in 0..1000 {
            entries.push(Gfn(piece * 1024 * 1024 / 4 + 17), slot, 8);
            slot += 2;
        }
        let old: u64 = entries.keep_latest(false).iter().map(|run| u64::from(run.count)).sum();
        assert!(old > 0 && old <= 1000, "{old}");
        assert!(entries.bytes() < before + 1000 * (4 + 3 * 24) + 1025 * 24, "{}", entries.bytes());
        assert_eq!(entries.runs().map(|(run, _)| run.count).sum::<u64>(), TIB);
        assert_eq!(entries.stored().count() as u64, data as u64 + 1000 - old);
    }
}
