//! Hooks for measurements. `driftline-compare` measures machines that no operator runs. Their dirty
//! frames may go into other sets than the tracker's trees, and their memory may be larger than the
//! host's. The machine's methods for measurements are in `machine/measured.rs`.
//!
//! The other sets are a list in the order in which the rings return the frames, and a flat bitmap
//! that is scanned, as in VMMs without a tree.

use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, OutOfSlot, SlotId};
use parking_lot::{Mutex, MutexGuard};

/// Options of a machine that exists to be measured and then discarded.
#[derive(Debug, Default)]
pub struct MeasureOptions {
    /// Receives the dirty frames in place of the tracker's trees.
    pub sink: Option<SharedSink>,
    /// The guest touches little memory, so the memory may exceed what the host has.
    pub sparse: bool,
}

/// A set of frames that a source fills and another thread drains.
#[derive(Clone, Debug)]
pub struct SharedSink(Arc<Mutex<FrameSink>>);

impl SharedSink {
    /// Shares `sink`.
    pub fn new(sink: FrameSink) -> Self {
        Self(Arc::new(Mutex::new(sink)))
    }

    /// Locks the set for the lifetime of the guard.
    pub fn lock(&self) -> MutexGuard<'_, FrameSink> {
        self.0.lock()
    }
}

/// One of the two sets. An enum and not a trait, because inserting is the inner loop.
#[derive(Debug)]
pub enum FrameSink {
    /// A list.
    List(ListSet),
    /// A flat bitmap.
    Flat(FlatSet),
}

impl FrameSink {
    /// Inserts the bits set in a slot's KVM bitmap. Returns how many frames those are.
    ///
    /// # Errors
    ///
    /// The slot is unknown, or a bit lies past its end.
    pub(crate) fn insert_bitmap(&mut self, slot: SlotId, bitmap: &[u64]) -> Result<u64, OutOfSlot> {
        match self {
            Self::List(list) => list.insert_bitmap(slot, bitmap),
            Self::Flat(flat) => flat.insert_bitmap(slot, bitmap),
        }
    }

    /// Inserts every frame of every slot (I6).
    pub fn insert_all(&mut self) {
        match self {
            Self::List(list) => list.insert_all(),
            Self::Flat(flat) => flat.insert_all(),
        }
    }

    /// Drains the set into `runs`, ascending and without repetitions. Returns the number of frames.
    pub fn drain(&mut self, runs: &mut Vec<FrameRun>) -> u64 {
        runs.clear();
        match self {
            Self::List(list) => list.drain(runs),
            Self::Flat(flat) => flat.drain(runs),
        }
    }

    /// Returns the bytes that the set has reserved.
    pub fn reserved_bytes(&self) -> u64 {
        match self {
            Self::List(list) => (list.frames.capacity() * size_of::<u64>()) as u64,
            Self::Flat(flat) => (flat.words.len() * size_of::<u64>()) as u64,
        }
    }
}

/// A slot, with the index of its first word in a flat bitmap.
#[derive(Clone, Copy, Debug)]
struct IndexedSlot {
    slot: SlotId,
    base: u64,
    frames: u64,
    first_word: usize,
}

fn places(layout: &Layout) -> Vec<IndexedSlot> {
    let mut first_word = 0;
    let place = |slot: &driftline_dirty_tracker::Slot| {
        let place =
            IndexedSlot { slot: slot.id, base: slot.base.0, frames: slot.frames, first_word };
        first_word += slot.frames.div_ceil(64) as usize;
        place
    };
    layout.slots().map(place).collect()
}

fn find(places: &[IndexedSlot], slot: SlotId, offset: u64) -> Option<&IndexedSlot> {
    places.iter().find(|p| p.slot == slot && offset < p.frames)
}

/// Returns the place of `slot`, after checking that no bit of the bitmap lies past the slot's end.
fn checked<'p>(
    places: &'p [IndexedSlot],
    slot: SlotId,
    bitmap: &[u64],
) -> Result<&'p IndexedSlot, OutOfSlot> {
    let place = places.iter().find(|p| p.slot == slot);
    let place = place.ok_or(OutOfSlot::NoSlot { slot, offset: 0 })?;
    let frames = place.frames;
    // Only words at and past the end are checked: the rest need not be read twice.
    for (word, first) in bitmap.iter().zip((0u64..).step_by(64)).skip((frames / 64) as usize) {
        let valid = frames.saturating_sub(first).min(63);
        let stray = word >> valid << valid;
        if stray != 0 {
            let offset = first + u64::from(stray.trailing_zeros());
            return Err(OutOfSlot::PastSlot { slot, offset, count: 1, frames });
        }
    }
    Ok(place)
}

/// A list of frames in the order of their insertion, with repetitions until it is drained.
#[derive(Debug)]
pub struct ListSet {
    places: Vec<IndexedSlot>,
    frames: Vec<u64>,
}

impl ListSet {
    /// Returns an empty list with `room` entries reserved, as many as the rings hold together.
    pub fn new(layout: &Layout, room: usize) -> Self {
        Self { places: places(layout), frames: Vec::with_capacity(room) }
    }

    /// Appends a frame. Returns whether it lies in a slot.
    pub fn insert(&mut self, slot: SlotId, offset: u64) -> bool {
        let place = find(&self.places, slot, offset);
        place.is_some_and(|place| {
            self.frames.push(place.base + offset);
            true
        })
    }

    fn insert_bitmap(&mut self, slot: SlotId, bitmap: &[u64]) -> Result<u64, OutOfSlot> {
        let base = checked(&self.places, slot, bitmap)?.base;
        let before = self.frames.len();
        for (word, first) in bitmap.iter().zip((base..).step_by(64)) {
            let mut bits = *word;
            while bits != 0 {
                self.frames.push(first + u64::from(bits.trailing_zeros()));
                bits &= bits - 1;
            }
        }
        Ok((self.frames.len() - before) as u64)
    }

    fn insert_all(&mut self) {
        let all = self.places.iter().flat_map(|p| p.base..p.base + p.frames);
        self.frames.extend(all);
    }

    fn drain(&mut self, runs: &mut Vec<FrameRun>) -> u64 {
        self.frames.sort_unstable();
        let mut frames = 0;
        let mut last = None;
        for gfn in self.frames.drain(..).filter(|gfn| last.replace(*gfn) != Some(*gfn)) {
            append(runs, gfn, 1);
            frames += 1;
        }
        frames
    }
}

/// A bitmap with one bit per frame of guest memory. A drain scans it word by word, eight words at a
/// time.
#[derive(Debug)]
pub struct FlatSet {
    places: Vec<IndexedSlot>,
    words: Vec<u64>,
}

impl FlatSet {
    /// Returns an empty set over all memory of `layout`.
    pub fn new(layout: &Layout) -> Self {
        let places = places(layout);
        let words = places.iter().map(|p| p.frames.div_ceil(64) as usize).sum();
        Self { places, words: vec![0; words] }
    }

    /// Sets a frame's bit. Returns whether the frame lies in a slot.
    pub fn insert(&mut self, slot: SlotId, offset: u64) -> bool {
        let word = find(&self.places, slot, offset)
            .and_then(|p| self.words.get_mut(p.first_word + (offset / 64) as usize));
        word.is_some_and(|word| {
            *word |= 1 << (offset % 64);
            true
        })
    }

    fn insert_bitmap(&mut self, slot: SlotId, bitmap: &[u64]) -> Result<u64, OutOfSlot> {
        let first = checked(&self.places, slot, bitmap)?.first_word;
        let words = self.words.get_mut(first..).unwrap_or_default();
        let mut frames = 0;
        for (word, new) in words.iter_mut().zip(bitmap) {
            *word |= *new;
            frames += u64::from(new.count_ones());
        }
        Ok(frames)
    }

    fn insert_all(&mut self) {
        for p in &self.places {
            for offset in (0..p.frames).step_by(64) {
                let bits = (p.frames - offset).min(64);
                let at = p.first_word + (offset / 64) as usize;
                if let Some(word) = self.words.get_mut(at) {
                    *word = u64::MAX >> (64 - bits);
                }
            }
        }
    }

    fn drain(&mut self, runs: &mut Vec<FrameRun>) -> u64 {
        let mut frames = 0;
        for p in &self.places {
            let end = p.first_word + p.frames.div_ceil(64) as usize;
            let words = self.words.get_mut(p.first_word..end).unwrap_or_default();
            for (group, at) in words.chunks_mut(8).zip((p.base..).step_by(512)) {
                // One branch per eight words: nearly all of them are zero.
                if group.iter().fold(0, |any, word| any | word) == 0 {
                    continue;
                }
                for (word, first) in group.iter_mut().zip((at..).step_by(64)) {
                    let mut bits = std::mem::take(word);
                    frames += u64::from(bits.count_ones());
                    while bits != 0 {
                        let start = bits.trailing_zeros();
                        let count = (!(bits >> start)).trailing_zeros();
                        append(runs, first + u64::from(start), u64::from(count));
                        bits &= u64::MAX.checked_shl(start + count).unwrap_or(0);
                    }
                }
            }
        }
        frames
    }
}

/// Extends the last run, or starts a new one.
fn append(runs: &mut Vec<FrameRun>, start: u64, count: u64) {
    match runs.last_mut() {
        Some(last) if last.end().0 == start => last.count += count,
        _ => runs.push(FrameRun { start: Gfn(start), count }),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use driftline_dirty_tracker::Slot;
    use proptest::prelude::*;

    use super::*;

    fn layout() -> Layout {
        let slot = |id, base, frames| Slot { id: SlotId(id), base: Gfn(base), frames };
        Layout::new([slot(0, 0, 700), slot(1, 4096, 1000)]).unwrap()
    }

    fn both() -> [FrameSink; 2] {
        let layout = layout();
        [FrameSink::List(ListSet::new(&layout, 4)), FrameSink::Flat(FlatSet::new(&layout))]
    }

    fn insert(sink: &mut FrameSink, slot: u32, offset: u64) -> bool {
        match sink {
            FrameSink::List(list) => list.insert(SlotId(slot), offset),
            FrameSink::Flat(flat) => flat.insert(SlotId(slot), offset),
        }
    }

    proptest! {
        #[test]
        fn drain_returns_each_frame_once_in_ascending_runs(
            frames in prop::collection::vec((0u32..2, 0u64..1000), 0..300),
            dense in 0u64..600,
            bitmap: bool,
        ) {
            for mut sink in both() {
                let mut model = BTreeSet::new();
                for (slot, offset) in frames.iter().copied().chain((0..dense).map(|o| (1, o))) {
                    let fits = slot == 1 || offset < 700;
                    if bitmap && fits {
                        let mut words = vec![0; 16];
                        words[(offset / 64) as usize] = 1 << (offset % 64);
                        prop_assert_eq!(sink.insert_bitmap(SlotId(slot), &words), Ok(1));
                    } else {
                        prop_assert_eq!(insert(&mut sink, slot, offset), fits);
                    }
                    if fits {
                        model.insert(u64::from(slot) * 4096 + offset);
                    }
                }
                let mut runs = vec![FrameRun { start: Gfn(1), count: 1 }];
                prop_assert_eq!(sink.drain(&mut runs), model.len() as u64);
                let found: Vec<u64> = runs.iter().flat_map(|r| r.start.0..r.end().0).collect();
                prop_assert_eq!(found, model.into_iter().collect::<Vec<_>>());
                prop_assert!(runs.windows(2).all(|w| w[0].end() < w[1].start));
                prop_assert_eq!((sink.drain(&mut runs), runs.len()), (0, 0), "it is empty now");
            }
        }
    }

    #[test]
    fn insert_all_covers_every_slot_and_no_more() {
        for mut sink in both() {
            sink.insert_all();
            let mut runs = Vec::new();
            assert_eq!(sink.drain(&mut runs), 1700);
            assert_eq!(runs, layout().slots().map(|s| s.run()).collect::<Vec<_>>());
            let mut past = [0; 11];
            past[10] = 1 << 60;
            let past_the_end =
                OutOfSlot::PastSlot { slot: SlotId(0), offset: 700, count: 1, frames: 700 };
            assert_eq!(sink.insert_bitmap(SlotId(0), &past), Err(past_the_end));
            assert_eq!(sink.drain(&mut runs), 0);
            assert!(sink.reserved_bytes() > 0);
        }
    }
}
