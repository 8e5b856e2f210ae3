//! Where the leaf words of a walk go: into runs of frames, or into single frames.

use super::SHIFT;
use super::kernel::Kernel;
use super::walk::{AHEAD, Words};
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

    /// Splits off the first of the words `base` plus each offset that lie in one slot and in reach of 32 bits.
    #[inline(always)]
    fn split<'o>(&mut self, base: u64, offsets: &'o [u32]) -> Option<(Segment<'o>, &'o [u32])> {
        let (first, last) = (*offsets.first()?, *offsets.last()?);
        let new_slot = base + u64::from(first) >= self.end;
        if new_slot {
            self.find(base + u64::from(first));
        }
        let limit = (self.end - base).min(u64::from(first) + REACH);
        let at = match u64::from(last) < limit {
            true => offsets.len(),
            false => offsets.partition_point(|offset| u64::from(*offset) < limit),
        };
        let (offsets, rest) = offsets.split_at(at);
        let frame = self.base.wrapping_add(base.wrapping_sub(self.first) << SHIFT);
        let last = offsets.last().map_or(0, |last| frame.wrapping_add(u64::from(*last) << SHIFT));
        Some((Segment { frame, offsets, last, new_slot }, rest))
    }

    #[cold]
    fn find(&mut self, index: u64) {
        let after = self.layout.placed()[self.slot..].partition_point(|p| p.first_word <= index);
        self.enter(self.slot + after - 1);
    }
}

/// Frames so far from a base are staged with it. Tests use few, so that they get past it.
const NEAR: u64 = if cfg!(test) { 1 << 14 } else { u32::MAX as u64 - 64 };

/// Leaf words of a segment: their frames are near its first one.
const REACH: u64 = NEAR >> (SHIFT + 1);

/// Leaf words that lie in one slot.
struct Segment<'o> {
    /// The first frame of the word at offset 0, were it in the slot.
    frame: u64,
    offsets: &'o [u32],
    /// The first frame of the last word.
    last: u64,
    /// The slot is another than that of the segment before.
    new_slot: bool,
}

impl Segment<'_> {
    /// The first frame of the word at `offset`.
    #[inline(always)]
    fn frame(&self, offset: u64) -> u64 {
        self.frame.wrapping_add(offset << SHIFT)
    }

    /// Whether every frame is in reach of 32 bits from `base`, and the first of a word after them.
    #[inline(always)]
    fn is_near(&self, base: u64) -> bool {
        // Walks ascend: no frame lies below the base.
        self.last - base <= NEAR
    }
}

/// Frames gathered before they are appended to a list, a part of the first cache.
pub(super) const STAGE: usize = 2048;
/// A stage longer than that is emptied before the next word, which may end a run and add 64 frames.
const FULL: usize = STAGE - 65;

/// After so many full words more are appended as a range. Fewer are staged like others: changing between the two
/// costs more than it saves.
const STREAK: u32 = 4;

/// Frame numbers on their way into a list, less a base.
pub(super) type Stage = [u32; STAGE];

/// Writes `base` plus the number of each set bit to `stage` from `len` on; the new length.
#[inline(always)]
fn expand(k: impl Kernel, stage: &mut Stage, len: usize, bits: u64, base: u32) -> usize {
    // There is room: see `FULL`.
    let Some(room) = stage[len..].first_chunk_mut() else { return len };
    len + k.expand(bits, base, room)
}

/// Appends single frames to a list.
pub(super) struct Frames<'a> {
    place: Place<'a>,
    out: &'a mut Vec<Gfn>,
    stage: &'a mut Stage,
    len: usize,
    base: u64,
    /// Full words in a row, the last word's included.
    streak: u32,
}

impl<'a> Frames<'a> {
    pub(super) fn new(layout: &'a Layout, out: &'a mut Vec<Gfn>, stage: &'a mut Stage) -> Self {
        Self { place: Place::new(layout), out, stage, len: 0, base: 0, streak: 0 }
    }
}

impl Sink for Frames<'_> {
    #[inline(always)]
    fn take(
        &mut self,
        kernel: impl Kernel,
        words: &mut impl Words,
        base: u64,
        mut offsets: &[u32],
    ) {
        // In registers, not behind `self`: each word needs them of the one before.
        let (mut len, mut streak) = (self.len, self.streak);
        while let Some((segment, rest)) = self.place.split(base, offsets) {
            offsets = rest;
            if !segment.is_near(self.base) {
                kernel.append(self.out, self.base, &self.stage[..len]);
                len = 0;
                self.base = segment.frame(u64::from(segment.offsets[0]));
            }
            let distance = segment.frame.wrapping_sub(self.base) as u32;
            // Full words that follow one another, and those of the stage.
            let (mut from, mut to) = (0, 0);
            for (i, offset) in segment.offsets.iter().enumerate() {
                if let Some(ahead) = segment.offsets.get(i + AHEAD) {
                    words.announce(kernel, base as usize + *ahead as usize);
                }
                let bits = words.take(base as usize + *offset as usize);
                streak = if bits == u64::MAX { streak + 1 } else { 0 };
                if streak > STREAK {
                    let here = u64::from(*offset);
                    if here != to || from == to {
                        kernel.append(self.out, self.base, &self.stage[..len]);
                        kernel.append_range(self.out, segment.frame(from)..segment.frame(to));
                        (len, from) = (0, here);
                    }
                    to = here + 1;
                    continue;
                }
                if from != to {
                    kernel.append_range(self.out, segment.frame(from)..segment.frame(to));
                    (from, to) = (0, 0);
                }
                if len > FULL {
                    kernel.append(self.out, self.base, &self.stage[..len]);
                    len = 0;
                }
                len = expand(kernel, self.stage, len, bits, distance.wrapping_add(offset << SHIFT));
            }
            if from != to {
                kernel.append_range(self.out, segment.frame(from)..segment.frame(to));
            }
        }
        (self.len, self.streak) = (len, streak);
    }

    #[inline(always)]
    fn finish(self, kernel: impl Kernel) {
        kernel.append(self.out, self.base, &self.stage[..self.len]);
    }
}

/// Joins what touches within a slot to runs, and appends them to a list.
///
/// Where runs begin and where they end are found apart, a word at a time and without a branch for
/// each: the n-th end belongs to the n-th beginning.
pub(super) struct Runs<'a> {
    place: Place<'a>,
    out: RunList<'a>,
    /// Frames of all runs.
    frames: &'a mut u64,
    starts: &'a mut Stage,
    ends: &'a mut Stage,
    base: u64,
    at: Position,
}

/// How far the runs are.
#[derive(Clone, Copy, Default)]
struct Position {
    /// Beginnings and ends that are staged.
    starts: usize,
    ends: usize,
    frames: u64,
    /// 1 if the last word's last bit was set: the run goes on if the next word follows it.
    carry: u64,
    /// The first frame after the last word.
    next: u64,
}

impl Position {
    /// Ends the run that the last word left open.
    #[inline(always)]
    fn end_run(&mut self, stage: &mut Stage, base: u64) {
        stage[self.ends] = (self.next - base) as u32;
        self.ends += 1;
        self.carry = 0;
    }
}

struct RunList<'a> {
    runs: &'a mut Vec<FrameRun>,
    /// Where a run began whose end was not found before the stages were emptied.
    open: Option<u64>,
}

impl RunList<'_> {
    #[inline(always)]
    fn append(&mut self, base: u64, mut starts: &[u32], mut ends: &[u32]) {
        if let (Some(start), Some((end, rest))) = (self.open, ends.split_first()) {
            let count = base + u64::from(*end) - start;
            self.runs.push(FrameRun { start: Gfn(start), count });
            (self.open, ends) = (None, rest);
        }
        if starts.len() > ends.len() {
            self.open = starts.last().map(|start| base + u64::from(*start));
            starts = &starts[..ends.len()];
        }
        self.runs.extend(starts.iter().zip(ends).map(|(start, end)| FrameRun {
            start: Gfn(base + u64::from(*start)),
            count: u64::from(end - start),
        }));
    }
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
        let (place, out) = (Place::new(layout), RunList { runs, open: None });
        Self { place, out, frames, starts, ends, base: 0, at: Position::default() }
    }
}

impl Sink for Runs<'_> {
    #[inline(always)]
    fn take(
        &mut self,
        kernel: impl Kernel,
        words: &mut impl Words,
        base: u64,
        mut offsets: &[u32],
    ) {
        let mut at = self.at;
        while let Some((segment, rest)) = self.place.split(base, offsets) {
            offsets = rest;
            if segment.new_slot && at.carry != 0 {
                at.end_run(self.ends, self.base);
            }
            if !segment.is_near(self.base) {
                if at.carry != 0 && segment.frame(u64::from(segment.offsets[0])) != at.next {
                    at.end_run(self.ends, self.base);
                }
                self.out.append(self.base, &self.starts[..at.starts], &self.ends[..at.ends]);
                (at.starts, at.ends) = (0, 0);
                self.base = segment.frame(u64::from(segment.offsets[0]));
            }
            let distance = segment.frame.wrapping_sub(self.base) as u32;
            for (i, offset) in segment.offsets.iter().enumerate() {
                if let Some(ahead) = segment.offsets.get(i + AHEAD) {
                    words.announce(kernel, base as usize + *ahead as usize);
                }
                let bits = words.take(base as usize + *offset as usize);
                let frame = segment.frame(u64::from(*offset));
                if at.carry != 0 && frame != at.next {
                    at.end_run(self.ends, self.base);
                }
                if bits == 0 {
                    continue;
                }
                at.next = frame + 64;
                at.frames += u64::from(bits.count_ones());
                let before = bits << 1 | at.carry;
                let (starts, ends) = (bits & !before, before & !bits);
                at.carry = bits >> 63;
                if starts | ends == 0 {
                    continue;
                }
                if at.starts.max(at.ends) > FULL {
                    self.out.append(self.base, &self.starts[..at.starts], &self.ends[..at.ends]);
                    (at.starts, at.ends) = (0, 0);
                }
                let first = distance.wrapping_add(offset << SHIFT);
                at.starts = expand(kernel, self.starts, at.starts, starts, first);
                at.ends = expand(kernel, self.ends, at.ends, ends, first);
            }
        }
        self.at = at;
    }

    #[inline(always)]
    fn finish(mut self, _: impl Kernel) {
        if self.at.carry != 0 {
            self.at.end_run(self.ends, self.base);
        }
        let (starts, ends) = (&self.starts[..self.at.starts], &self.ends[..self.at.ends]);
        self.out.append(self.base, starts, ends);
        *self.frames += self.at.frames;
    }
}
