//! Where the leaf words of a walk go: into runs of frames, or into single frames.

use std::ops::Range;

use super::kernel::Kernel;
use super::walk::Words;
use crate::{FrameRun, Gfn, Layout};

/// Takes ascending leaf words.
pub(super) trait Sink {
    /// Takes the words `base` plus each offset, some of which may be zero.
    fn take(&mut self, kernel: impl Kernel, words: &mut impl Words, base: u64, offsets: &[u32]);

    /// No word follows.
    fn finish(self, kernel: impl Kernel);
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
    #[inline(always)]
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

/// Frames gathered before they are appended to a list, a part of the first cache.
pub(super) const STAGE: usize = 2048;
/// Places of a stage that must be free for a word, and for an end before it.
const ROOM: usize = 65;

/// Frame numbers on their way into a list, less a base.
pub(super) type Stage = [u32; STAGE];

/// Writes `base` plus the number of each set bit to `stage` from `len` on; the new length.
#[inline(always)]
fn expand(k: impl Kernel, stage: &mut Stage, len: usize, bits: u64, base: u32) -> usize {
    // There is room: see `ROOM`.
    let Some(room) = stage[len..].first_chunk_mut() else { return len };
    len + k.expand(bits, base, room)
}

/// The distance of `frame` from `base`, if a word there and one before it are in reach of 32 bits.
#[inline(always)]
fn reach(base: u64, frame: u64) -> Option<u32> {
    let offset = frame.wrapping_sub(base);
    (offset <= u64::from(u32::MAX) - 128).then_some(offset as u32)
}

/// Appends single frames to a list.
pub(super) struct Frames<'a> {
    place: Place<'a>,
    out: &'a mut Vec<Gfn>,
    stage: &'a mut Stage,
    len: usize,
    base: u64,
    /// Frames of whole words that follow those of the stage.
    whole: Range<u64>,
}

impl<'a> Frames<'a> {
    pub(super) fn new(layout: &'a Layout, out: &'a mut Vec<Gfn>, stage: &'a mut Stage) -> Self {
        Self { place: Place::new(layout), out, stage, len: 0, base: 0, whole: 0..0 }
    }

    #[inline(always)]
    fn flush(&mut self, kernel: impl Kernel) {
        kernel.append(self.out, self.base, &self.stage[..self.len]);
        self.len = 0;
    }

    #[inline(always)]
    fn flush_whole(&mut self, kernel: impl Kernel) {
        kernel.append_range(self.out, std::mem::take(&mut self.whole));
    }
}

impl Sink for Frames<'_> {
    #[inline(always)]
    fn take(&mut self, kernel: impl Kernel, words: &mut impl Words, base: u64, offsets: &[u32]) {
        for offset in offsets {
            let index = base + u64::from(*offset);
            let bits = words.take(index as usize);
            let (frame, _) = self.place.frame(index);
            if bits == u64::MAX {
                if frame != self.whole.end {
                    self.flush(kernel);
                    self.flush_whole(kernel);
                    self.whole.start = frame;
                }
                self.whole.end = frame + 64;
                continue;
            }
            if !self.whole.is_empty() {
                self.flush_whole(kernel);
            }
            let offset = match reach(self.base, frame) {
                Some(offset) if self.len <= STAGE - ROOM => offset,
                _ => {
                    self.flush(kernel);
                    self.base = frame;
                    0
                }
            };
            self.len = expand(kernel, self.stage, self.len, bits, offset);
        }
    }

    #[inline(always)]
    fn finish(mut self, kernel: impl Kernel) {
        self.flush(kernel);
        self.flush_whole(kernel);
    }
}

/// Joins what touches within a slot to runs, and appends them to a list.
///
/// Where runs begin and where they end are found apart, a word at a time and without a branch for
/// each: the n-th end belongs to the n-th beginning.
pub(super) struct Runs<'a> {
    place: Place<'a>,
    runs: &'a mut Vec<FrameRun>,
    /// Frames of all runs.
    frames: &'a mut u64,
    count: u64,
    starts: &'a mut Stage,
    ends: &'a mut Stage,
    starts_len: usize,
    ends_len: usize,
    base: u64,
    /// Where a run began whose end was not found before the stages were emptied.
    open: Option<u64>,
    /// 1 if the last word's last bit was set: the run goes on if the next word follows it.
    carry: u64,
    /// The word after the last one, and its first frame.
    next: u64,
    next_frame: u64,
}

impl<'a> Runs<'a> {
    /// `frames` will be the frames of all runs.
    pub(super) fn new(
        layout: &'a Layout,
        runs: &'a mut Vec<FrameRun>,
        frames: &'a mut u64,
        stages: &'a mut [Stage; 2],
    ) -> Self {
        let [starts, ends] = stages;
        Self {
            place: Place::new(layout),
            runs,
            frames,
            count: 0,
            starts,
            ends,
            starts_len: 0,
            ends_len: 0,
            base: 0,
            open: None,
            carry: 0,
            next: 0,
            next_frame: 0,
        }
    }

    /// Ends the run that the last word left open.
    #[inline(always)]
    fn end_run(&mut self) {
        self.ends[self.ends_len] = (self.next_frame - self.base) as u32;
        self.ends_len += 1;
        self.carry = 0;
    }

    #[inline(always)]
    fn flush(&mut self) {
        let (mut starts, mut ends) = (&self.starts[..self.starts_len], &self.ends[..self.ends_len]);
        if let (Some(start), Some((end, rest))) = (self.open, ends.split_first()) {
            let count = self.base + u64::from(*end) - start;
            self.runs.push(FrameRun { start: Gfn(start), count });
            (self.open, ends) = (None, rest);
        }
        if starts.len() > ends.len() {
            self.open = starts.last().map(|start| self.base + u64::from(*start));
            starts = &starts[..ends.len()];
        }
        let base = self.base;
        self.runs.extend(starts.iter().zip(ends).map(|(start, end)| FrameRun {
            start: Gfn(base + u64::from(*start)),
            count: u64::from(end - start),
        }));
        (self.starts_len, self.ends_len) = (0, 0);
    }
}

impl Sink for Runs<'_> {
    #[inline(always)]
    fn take(&mut self, kernel: impl Kernel, words: &mut impl Words, base: u64, offsets: &[u32]) {
        for offset in offsets {
            let index = base + u64::from(*offset);
            let bits = words.take(index as usize);
            if bits == 0 {
                continue;
            }
            let (frame, new_slot) = self.place.frame(index);
            if self.carry != 0 && (new_slot || index != self.next) {
                self.end_run();
            }
            let room = self.starts_len.max(self.ends_len) <= STAGE - ROOM;
            let offset = match reach(self.base, frame) {
                Some(offset) if room => offset,
                _ => {
                    self.flush();
                    self.base = frame;
                    0
                }
            };
            self.count += u64::from(bits.count_ones());
            (self.next, self.next_frame) = (index + 1, frame + 64);
            let before = bits << 1 | self.carry;
            let (starts, ends) = (bits & !before, before & !bits);
            self.carry = bits >> 63;
            if starts | ends == 0 {
                continue;
            }
            self.starts_len = expand(kernel, self.starts, self.starts_len, starts, offset);
            self.ends_len = expand(kernel, self.ends, self.ends_len, ends, offset);
        }
    }

    #[inline(always)]
    fn finish(mut self, _: impl Kernel) {
        if self.carry != 0 {
            self.end_run();
        }
        self.flush();
        *self.frames += self.count;
    }
}
