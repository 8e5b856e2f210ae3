//! Where each frame of an epoch is, and what its contents' checksum is.
//!
//! Built from a log, whose memory layout may be a lie: memory is taken for frames that are stored, in chunks of 64, and not for
//! those that are said to exist.

use std::collections::BTreeMap;

use dirty_tracker::{FrameRun, Gfn};

use super::records::{NO_SLOT, Placed};
use crate::slots::SlotRun;

/// Frames of a chunk.
const CHUNK: u64 = 64;

/// Where one frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cell {
    /// [`NO_SLOT`] for zeros.
    pub(crate) slot: u32,
    pub(crate) crc: u32,
}

const EMPTY: Cell = Cell { slot: NO_SLOT, crc: 0 };

type Chunk = Box<[Cell; CHUNK as usize]>;

/// All frames of an epoch that are not zeros: 8 bytes for each, and little more.
#[derive(Debug, Default)]
pub(crate) struct FrameMap {
    chunks: BTreeMap<u64, Chunk>,
}

impl FrameMap {
    pub(crate) fn clear(&mut self) {
        self.chunks.clear();
    }

    /// Notes where frames are now; `on_old` hears of each slot that one of them was in before.
    pub(crate) fn put(&mut self, runs: &[Placed], crcs: &[u32], mut on_old: impl FnMut(u32)) {
        let mut crcs = crcs.iter().copied();
        for Placed { frames, slot } in runs {
            let mut next = *slot;
            for part in pieces(*frames) {
                let chunk = self
                    .chunks
                    .entry(part.start.0 / CHUNK)
                    .or_insert_with(|| Box::new([EMPTY; CHUNK as usize]));
                let at = (part.start.0 % CHUNK) as usize;
                for cell in &mut chunk[at..at + part.count as usize] {
                    let new = Cell { slot: next, crc: crcs.next().unwrap_or(0) };
                    let old = std::mem::replace(cell, new);
                    if old.slot != NO_SLOT {
                        on_old(old.slot);
                    }
                    next += 1;
                }
            }
        }
    }

    /// As [`put`](Self::put), of frames that are zeros now. Costs what is stored of them, however many they are.
    pub(crate) fn clear_frames(&mut self, runs: &[FrameRun], mut on_old: impl FnMut(u32)) {
        for run in runs.iter().filter(|run| run.count > 0) {
            let (first, last) = (run.start.0 / CHUNK, (run.end().0 - 1) / CHUNK);
            for (number, chunk) in self.chunks.range_mut(first..=last) {
                for (gfn, cell) in (number * CHUNK..).zip(chunk.iter_mut()) {
                    let inside = run.start.0 <= gfn && gfn < run.end().0;
                    if inside && cell.slot != NO_SLOT {
                        on_old(cell.slot);
                        *cell = EMPTY;
                    }
                }
            }
        }
    }

    /// All frames that are not zeros, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Gfn, Cell)> + Clone {
        let cells = |(number, chunk): (&u64, &Chunk)| {
            let first = number * CHUNK;
            let cells: Vec<(Gfn, Cell)> = (first..)
                .map(Gfn)
                .zip(chunk.iter().copied())
                .filter(|(_, c)| c.slot != NO_SLOT)
                .collect();
            cells
        };
        self.chunks.iter().flat_map(cells)
    }

    /// Where a frame is, if it is not zeros.
    pub(crate) fn get(&self, gfn: Gfn) -> Option<Cell> {
        let cell = self.chunks.get(&(gfn.0 / CHUNK))?[(gfn.0 % CHUNK) as usize];
        (cell.slot != NO_SLOT).then_some(cell)
    }

    /// The slots of all frames, as ascending runs.
    pub(crate) fn slots(&self) -> Vec<SlotRun> {
        runs_of(self.iter().map(|(_, cell)| cell.slot).collect())
    }
}

/// A run cut where chunks end.
fn pieces(run: FrameRun) -> impl Iterator<Item = FrameRun> {
    let (mut at, end) = (run.start.0, run.end().0);
    std::iter::from_fn(move || {
        let next = (at / CHUNK + 1).saturating_mul(CHUNK).min(end);
        let piece = FrameRun { start: Gfn(at), count: next - at };
        at = next;
        (piece.count > 0).then_some(piece)
    })
}

/// Slots in any order, each once, as ascending runs.
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
