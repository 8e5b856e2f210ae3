//! Where the leaf words of a walk go: into runs of frames, or into single frames.

use crate::{FrameRun, Gfn, Layout};

/// Takes ascending leaf words. A word may be zero.
pub(super) trait Sink {
    fn word(&mut self, index: u64, bits: u64);
}

/// From a leaf word to its first frame, with the last slot remembered.
struct Place<'a> {
    layout: &'a Layout,
    /// The slot of the last word: index into the layout's placed slots.
    slot: usize,
    /// The words of that slot.
    first: u64,
    end: u64,
    base: u64,
}

impl<'a> Place<'a> {
    fn new(layout: &'a Layout) -> Self {
        let mut place = Self { layout, slot: 0, first: 0, end: 0, base: 0 };
        place.enter(0);
        place
    }

    fn enter(&mut self, slot: usize) {
        let p = &self.layout.placed()[slot];
        self.slot = slot;
        (self.first, self.end) = (p.first_word, p.first_word + p.words());
        self.base = p.slot.base.0;
    }

    /// The first frame of word `index`, and whether the word is in another slot than the last one.
    #[inline]
    fn frame(&mut self, index: u64) -> (u64, bool) {
        let new = index >= self.end;
        if new {
            self.find(index);
        }
        (self.base + (index - self.first) * 64, new)
    }

    #[cold]
    fn find(&mut self, index: u64) {
        let after = self.layout.placed()[self.slot..].partition_point(|p| p.first_word <= index);
        self.enter(self.slot + after - 1);
    }
}

/// Joins what touches within a slot to runs, and appends them to a list.
pub(super) struct Runs<'a> {
    place: Place<'a>,
    runs: &'a mut Vec<FrameRun>,
    /// The run that may still grow; empty before the first.
    start: u64,
    end: u64,
    frames: u64,
}

impl<'a> Runs<'a> {
    pub(super) fn new(layout: &'a Layout, runs: &'a mut Vec<FrameRun>) -> Self {
        Self { place: Place::new(layout), runs, start: 0, end: 0, frames: 0 }
    }

    /// Appends the last run; the frames of all.
    pub(super) fn finish(mut self) -> u64 {
        self.flush();
        self.frames
    }

    #[inline]
    fn flush(&mut self) {
        if self.end > self.start {
            let count = self.end - self.start;
            self.frames += count;
            self.runs.push(FrameRun { start: Gfn(self.start), count });
        }
    }
}

impl Sink for Runs<'_> {
    #[inline]
    fn word(&mut self, index: u64, mut bits: u64) {
        if bits == 0 {
            return;
        }
        let (base, new_slot) = self.place.frame(index);
        if new_slot {
            self.flush();
            (self.start, self.end) = (base, base);
        }
        if bits == u64::MAX && self.end == base {
            self.end = base + 64;
            return;
        }
        while bits != 0 {
            let from = bits.trailing_zeros();
            let count = (bits >> from).trailing_ones();
            bits &= u64::MAX.checked_shl(from + count).unwrap_or(0);
            let start = base + u64::from(from);
            if start != self.end {
                self.flush();
                self.start = start;
            }
            self.end = start + u64::from(count);
        }
    }
}

/// Appends single frames to a list.
pub(super) struct Frames<'a> {
    place: Place<'a>,
    out: &'a mut Vec<Gfn>,
    /// Frames in `out` that are real; the rest is room.
    len: usize,
}

/// Room is made for so many frames at once, a cache's worth.
const ROOM: usize = 1024;

impl<'a> Frames<'a> {
    pub(super) fn new(layout: &'a Layout, out: &'a mut Vec<Gfn>) -> Self {
        let len = out.len();
        Self { place: Place::new(layout), out, len }
    }

    /// Gives back the room that was not needed.
    pub(super) fn finish(self) {
        self.out.truncate(self.len);
    }
}

impl Sink for Frames<'_> {
    #[inline]
    fn word(&mut self, index: u64, mut bits: u64) {
        if bits == 0 {
            return;
        }
        let (base, _) = self.place.frame(index);
        if self.out.len() < self.len + 64 {
            self.out.resize(self.len + 64 + ROOM, Gfn(0));
        }
        let count = bits.count_ones() as usize;
        let room = &mut self.out[self.len..self.len + 64];
        self.len += count;
        if bits == u64::MAX {
            room.iter_mut().zip(base..).for_each(|(frame, gfn)| *frame = Gfn(gfn));
            return;
        }
        // Four or eight at a time, there or not, as the walk gathers indices.
        let mut next = |frame: &mut Gfn| {
            *frame = Gfn(base + u64::from(bits.trailing_zeros()));
            bits &= bits.wrapping_sub(1);
        };
        let (four, rest) = room.split_at_mut(4);
        four.iter_mut().for_each(&mut next);
        for (eight, done) in rest.chunks_mut(8).zip((4..).step_by(8)) {
            if count <= done {
                break;
            }
            eight.iter_mut().for_each(&mut next);
        }
    }
}
