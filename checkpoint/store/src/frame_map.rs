//! The place and the checksum of each frame of an epoch.
//!
//! The map is built from a log, whose memory layout may be forged. So it takes memory for frames
//! that are stored, not for frames that are only claimed to exist.

use std::collections::BTreeMap;

use driftline_dirty_tracker::{FrameRun, Gfn};

use crate::address::MEMORY;
use crate::alloc::SlotRun;
use crate::records::StoredRun;

/// Number of frames of a chunk.
const CHUNK: u64 = 64;

/// Location of a frame that is not zeros: its page slot, and the checksum of its content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameLocation {
    pub(crate) slot: u32,
    pub(crate) crc: u32,
}

/// The frames of a chunk that are not zeros.
#[derive(Debug, Default)]
struct FrameChunk {
    /// One bit for each such frame.
    mask: u64,
    /// One location for each bit of the mask, in their order.
    locations: Vec<FrameLocation>,
}

/// Returns bits 0 to `at` - 1, of 64.
fn below(at: u64) -> u64 {
    1_u64.checked_shl(at as u32).unwrap_or(0).wrapping_sub(1)
}

impl FrameChunk {
    /// Returns the index in `locations` at which frame `at`, at most 64, has its location or would
    /// have it.
    fn rank(&self, at: u64) -> usize {
        (self.mask & below(at)).count_ones() as usize
    }

    fn has(&self, at: u64) -> bool {
        self.mask >> at & 1 == 1
    }

    /// Puts a location, and returns the previous one.
    fn put(&mut self, at: u64, location: FrameLocation) -> Option<FrameLocation> {
        let rank = self.rank(at);
        if self.has(at) {
            return Some(std::mem::replace(&mut self.locations[rank], location));
        }
        self.locations.insert(rank, location);
        self.mask |= 1 << at;
        None
    }

    fn iter(&self) -> impl Iterator<Item = (u64, FrameLocation)> + Clone {
        let mut left = self.mask;
        let places = std::iter::from_fn(move || {
            let at = (left != 0).then(|| u64::from(left.trailing_zeros()));
            left &= left.wrapping_sub(1);
            at
        });
        places.zip(self.locations.iter().copied())
    }
}

/// All frames of an epoch that are not zeros. Takes 8 bytes for each, and some dozens of bytes for
/// each chunk that has one.
#[derive(Debug, Default)]
pub(crate) struct FrameMap {
    chunks: BTreeMap<u64, FrameChunk>,
}

impl FrameMap {
    pub(crate) fn clear(&mut self) {
        self.chunks.clear();
    }

    /// Notes the new places of frames. Calls `on_old` with each slot that one of them was in
    /// before.
    pub(crate) fn put(&mut self, runs: &[StoredRun], crcs: &[u32], mut on_old: impl FnMut(u32)) {
        let mut crcs = crcs.iter().copied();
        for StoredRun { frames, slot } in runs {
            let mut next = *slot;
            for part in pieces(*frames) {
                let chunk = self.chunks.entry(part.start.0 / CHUNK).or_default();
                if chunk.locations.is_empty() {
                    chunk.locations.reserve_exact(part.count as usize);
                }
                let at = part.start.0 % CHUNK;
                for at in at..at + part.count {
                    let location = FrameLocation { slot: next, crc: crcs.next().unwrap_or(0) };
                    if let Some(old) = chunk.put(at, location) {
                        on_old(old.slot);
                    }
                    next += 1;
                }
            }
        }
    }

    /// Notes that frames are zeros now, like [`put`](Self::put). The cost depends on the number of
    /// stored frames among them only.
    pub(crate) fn clear_frames(&mut self, runs: &[FrameRun], mut on_old: impl FnMut(u32)) {
        for run in runs.iter().filter(|run| run.count > 0) {
            let (first, last) = (run.start.0 / CHUNK, (run.end().0 - 1) / CHUNK);
            let emptied = self.chunks.extract_if(first..=last, |number, chunk| {
                let from = run.start.0.saturating_sub(number * CHUNK).min(CHUNK);
                let to = (run.end().0 - number * CHUNK).min(CHUNK);
                for at in (from..to).filter(|at| chunk.has(*at)) {
                    on_old(chunk.locations[chunk.rank(at)].slot);
                }
                let (low, high) = (chunk.rank(from), chunk.rank(to));
                chunk.locations.drain(low..high);
                chunk.mask &= below(from) | !below(to);
                chunk.mask == 0
            });
            emptied.for_each(drop);
        }
    }

    /// Returns all frames of guest memory that are not zeros, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Gfn, FrameLocation)> + Clone {
        self.range(MEMORY)
    }

    /// Returns the frames of [`iter`](Self::iter) as a vector, with a single allocation.
    pub(crate) fn to_vec(&self) -> Vec<(Gfn, FrameLocation)> {
        let chunks = self.chunks.range(MEMORY.start / CHUNK..MEMORY.end / CHUNK);
        let mut locations =
            Vec::with_capacity(chunks.map(|(_, chunk)| chunk.locations.len()).sum());
        locations.extend(self.iter());
        locations
    }

    /// Returns all frames that are not zeros, including those of drives, ascending.
    pub(crate) fn all(&self) -> impl Iterator<Item = (Gfn, FrameLocation)> + Clone {
        self.range(0..u64::MAX)
    }

    /// Returns the frames of drives alone.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (Gfn, FrameLocation)> + Clone {
        self.range(MEMORY.end..u64::MAX)
    }

    /// Returns those of `frames`, which begin and end with a chunk.
    fn range(
        &self,
        frames: std::ops::Range<u64>,
    ) -> impl Iterator<Item = (Gfn, FrameLocation)> + Clone {
        let chunks = self.chunks.range(frames.start / CHUNK..frames.end / CHUNK);
        chunks.flat_map(|(number, chunk)| {
            let first = number * CHUNK;
            chunk.iter().map(move |(at, location)| (Gfn(first + at), location))
        })
    }

    /// Returns the place of a frame that is not zeros.
    pub(crate) fn get(&self, gfn: Gfn) -> Option<FrameLocation> {
        let (chunk, at) = (self.chunks.get(&(gfn.0 / CHUNK))?, gfn.0 % CHUNK);
        chunk.has(at).then(|| chunk.locations[chunk.rank(at)])
    }

    /// Returns the slots of all frames, as ascending runs.
    pub(crate) fn slots(&self) -> Vec<SlotRun> {
        runs_of(self.all().map(|(_, location)| location.slot).collect())
    }
}

/// Returns a run cut at the ends of chunks.
fn pieces(run: FrameRun) -> impl Iterator<Item = FrameRun> {
    let (mut at, end) = (run.start.0, run.end().0);
    std::iter::from_fn(move || {
        let next = (at / CHUNK + 1).saturating_mul(CHUNK).min(end);
        let piece = FrameRun { start: Gfn(at), count: next - at };
        at = next;
        (piece.count > 0).then_some(piece)
    })
}

/// Returns slots, given in any order and each once, as ascending runs.
pub(crate) fn runs_of(mut slots: Vec<u32>) -> Vec<SlotRun> {
    slots.sort_unstable();
    let mut runs: Vec<SlotRun> = Vec::new();
    for slot in slots {
        match runs.last_mut() {
            Some(last) if last.end() == u64::from(slot) => last.count += 1,
            _ => runs.push(SlotRun { start: slot, count: 1 }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_map_matches_a_plain_map() {
        let (mut map, mut model) = (FrameMap::default(), BTreeMap::new());
        let mut coin = 1_u64;
        for round in 0..4000_u32 {
            coin = coin.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            let frames =
                FrameRun { start: Gfn(coin >> 40 & 0x3ff), count: 1 + (coin >> 52 & 0xff) };
            let (mut replaced, mut expected) = (Vec::new(), Vec::new());
            if coin >> 33 & 1 == 0 {
                let slot = round * 1000 + 1;
                let crcs: Vec<u32> = (0..frames.count as u32).map(|n| n ^ round).collect();
                map.put(&[StoredRun { frames, slot }], &crcs, |old| replaced.push(old));
                for ((gfn, slot), crc) in frames.frames().zip(slot..).zip(crcs) {
                    expected.extend(
                        model
                            .insert(gfn, FrameLocation { slot, crc })
                            .map(|old: FrameLocation| old.slot),
                    );
                }
            } else {
                map.clear_frames(&[frames], |old| replaced.push(old));
                expected.extend(frames.frames().filter_map(|gfn| Some(model.remove(&gfn)?.slot)));
            }
            assert_eq!(replaced, expected);
            if round % 16 == 0 {
                assert_eq!(map.to_vec(), map.iter().collect::<Vec<_>>());
                assert!(map.iter().eq(model.iter().map(|(gfn, location)| (*gfn, *location))));
                assert_eq!(map.get(frames.start), model.get(&frames.start).copied());
                let chunks = model
                    .keys()
                    .map(|gfn| gfn.0 / CHUNK)
                    .collect::<std::collections::BTreeSet<_>>();
                assert_eq!(map.chunks.len(), chunks.len(), "chunks without a frame are removed");
            }
        }
    }
}
