//! The outputs of a walk: leaf words become runs of frames, or single frames.

use super::simd::{Simd, SpareRoom};
use super::words::{PREFETCH_DISTANCE, SHIFT, Sparsity, Words};
use crate::{FrameRun, Gfn, Layout};

/// A consumer of ascending leaf words.
pub(super) trait WordSink {
    /// Takes the words `base` plus each offset. Some may be zero.
    fn take(&mut self, simd: impl Simd, words: &mut impl Words, base: u64, offsets: &[u32]);

    /// Ends the walk.
    fn finish(self, simd: impl Simd);
}

/// Translates leaf words to frames. Remembers the last slot.
struct SlotPosition<'a> {
    layout: &'a Layout,
    /// Slot of the last word: an index into the layout's placed slots.
    slot: usize,
    /// The words of that slot.
    first: u64,
    end: u64,
    base: u64,
}

impl<'a> SlotPosition<'a> {
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

    /// Splits off the leading words that lie in one slot and within 32 bits of each other. The
    /// words are `base` plus each offset.
    #[inline(always)]
    fn split<'o>(&mut self, base: u64, offsets: &'o [u32]) -> Option<(WordSegment<'o>, &'o [u32])> {
        let (first, last) = (*offsets.first()?, *offsets.last()?);
        let new_slot = base + u64::from(first) >= self.end;
        if new_slot {
            self.find(base + u64::from(first));
        }
        let limit = (self.end - base).min(u64::from(first) + MAX_SEGMENT_WORDS);
        let at = match u64::from(last) < limit {
            true => offsets.len(),
            false => offsets.partition_point(|offset| u64::from(*offset) < limit),
        };
        let (offsets, rest) = offsets.split_at(at);
        let frame = self.base.wrapping_add(base.wrapping_sub(self.first) << SHIFT);
        let last = offsets.last().map_or(0, |last| frame.wrapping_add(u64::from(*last) << SHIFT));
        Some((WordSegment { frame, offsets, last, new_slot }, rest))
    }

    #[cold]
    fn find(&mut self, index: u64) {
        let after = self.layout.placed()[self.slot..].partition_point(|p| p.first_word <= index);
        self.enter(self.slot + after - 1);
    }
}

/// Largest distance of a staged frame from its base. Small in tests, so that they exceed it.
const MAX_DISTANCE: u64 = if cfg!(test) { 1 << 14 } else { u32::MAX as u64 - 64 };

/// Largest number of leaf words in a segment, so that their frames are near its first frame.
const MAX_SEGMENT_WORDS: u64 = MAX_DISTANCE >> (SHIFT + 1);

/// Leaf words that lie in one slot.
struct WordSegment<'o> {
    /// First frame of the word at offset 0, as if that word lay in the slot.
    frame: u64,
    offsets: &'o [u32],
    /// First frame of the last word.
    last: u64,
    /// Whether the slot differs from that of the previous segment.
    new_slot: bool,
}

impl WordSegment<'_> {
    /// Returns the first frame of the word at `offset`.
    #[inline(always)]
    fn frame(&self, offset: u64) -> u64 {
        self.frame.wrapping_add(offset << SHIFT)
    }

    /// Returns whether every frame, and the first frame of a word after them, is within 32 bits of
    /// `base`.
    #[inline(always)]
    fn is_near(&self, base: u64) -> bool {
        // Walks ascend, so no frame lies below the base.
        self.last - base <= MAX_DISTANCE
    }
}

/// Number of frames that are gathered before they are appended to a list: a part of the first-level
/// cache.
const STAGE: usize = 2048;
/// A stage longer than this is emptied before the next word, which may end a run and add 64 frames.
const STAGE_LIMIT: usize = STAGE - 65;

/// Frame numbers on their way into a list, minus a base.
type StageBuffer = [u32; STAGE];

/// Buffers in which frames are gathered before they are appended to a list: some 32 KiB, allocated
/// with the tree.
#[derive(Debug)]
pub(super) struct Stages {
    starts: StageBuffer,
    ends: StageBuffer,
    frames: Vec<Gfn>,
}

impl Stages {
    pub(super) fn new() -> Self {
        Self { starts: [0; STAGE], ends: [0; STAGE], frames: Vec::with_capacity(STAGE) }
    }
}

/// Writes `base` plus the number of each set bit to `stage` from `len` on. Returns the new length.
#[inline(always)]
fn expand(simd: impl Simd, stage: &mut StageBuffer, len: usize, bits: u64, base: u32) -> usize {
    // There is room, see `STAGE_LIMIT`.
    let Some(room) = stage[len..].first_chunk_mut() else { return len };
    len + simd.expand(bits, base, room)
}

/// Number of consecutive full words from which on they are appended as a range, bypassing the
/// stage. For fewer words the switch costs more than it saves.
const MIN_RANGE_WORDS: usize = 16;

/// Appends single frames to a list. Writes directly after the end of the list where it has room and
/// the SIMD level prefers it, and otherwise through a stage.
pub(super) struct FrameWriter<'a> {
    place: SlotPosition<'a>,
    out: &'a mut Vec<Gfn>,
    /// Frames that follow those in `out`.
    stage: &'a mut Vec<Gfn>,
}

impl<'a> FrameWriter<'a> {
    pub(super) fn new(layout: &'a Layout, out: &'a mut Vec<Gfn>, stages: &'a mut Stages) -> Self {
        let stage = &mut stages.frames;
        stage.clear();
        Self { place: SlotPosition::new(layout), out, stage }
    }

    #[inline(always)]
    fn flush(&mut self, simd: impl Simd) {
        simd.append(self.out, self.stage);
        self.stage.clear();
    }

    /// Returns room for `needed` frames, at most 64, and whether it is the list's own.
    #[inline(always)]
    fn room<K: Simd>(&mut self, simd: K, needed: usize) -> (SpareRoom<'_>, bool) {
        if self.stage.len() > STAGE - 64 {
            self.flush(simd);
        }
        let len = self.out.len();
        let spare = (self.out.capacity() - len).min(K::IN_PLACE.saturating_sub(len));
        let in_place = self.stage.is_empty() && spare >= needed;
        let list = if in_place { &mut *self.out } else { &mut *self.stage };
        (SpareRoom::new(list, if in_place { spare } else { STAGE }), in_place)
    }

    /// Takes words of a segment from `at` on. `carried` holds the bits of the previous word that
    /// found no room. Returns the position where it stopped, and the bits of the last word that
    /// found no room.
    #[inline(always)]
    fn take_some(
        &mut self,
        simd: impl Simd,
        segment: &WordSegment<'_>,
        words: &mut impl Words,
        base: usize,
        mut at: usize,
        mut carried: u64,
    ) -> (usize, u64) {
        let offsets = segment.offsets;
        let frame = |at: usize| segment.frame(u64::from(offsets[at]));
        let mut sparsity = Sparsity::of(simd, offsets);
        let start = (offsets[0], frame(0));
        let needed = if carried == 0 { sparsity.needed() } else { 64 };
        let (mut room, in_place) = self.room(simd, needed);
        if carried != 0 {
            room.write(simd, carried, frame(at - 1));
            carried = 0;
        }
        let (mut first, mut full) = (0, 0);
        while at < offsets.len() && room.left() >= needed {
            if let (Some(eight), Some(words)) = (sparsity.eight(offsets, at), words.owned()) {
                let written = room.write_eight(simd, words, base, eight, start);
                sparsity.tried(at, written);
                if written {
                    at += 8;
                    continue;
                }
            }
            let bits = take_ahead(simd, words, base, offsets, at);
            (first, at) = (at, at + 1);
            if sparsity.two && room.write_two(bits, frame(first)) {
                continue;
            }
            carried = bits;
            if bits == u64::MAX {
                let most = if in_place { room.left() / 64 } else { offsets.len() };
                (full, at, carried) = count_full(simd, words, base, offsets, first, most);
                if full * 64 > room.left() || full >= MIN_RANGE_WORDS && !in_place {
                    break;
                }
                room.write_range(simd, frame(first), full * 64);
                full = 0;
                if carried == 0 {
                    continue;
                }
            }
            if room.left() < 64 {
                break;
            }
            room.write(simd, carried, frame(at - 1));
            carried = 0;
        }
        room.commit();
        if full > 0 {
            self.flush(simd);
            simd.append_range(self.out, frame(first), full * 64);
        }
        (at, carried)
    }
}

/// Takes the word at `at`, and prefetches a later one.
#[inline(always)]
fn take_ahead(
    simd: impl Simd,
    words: &mut impl Words,
    base: usize,
    offsets: &[u32],
    at: usize,
) -> u64 {
    if let Some(ahead) = offsets.get(at + PREFETCH_DISTANCE) {
        words.prefetch(simd, base + *ahead as usize);
    }
    words.take(base + offsets[at] as usize)
}

/// Counts the full words from `first` on, which is one, up to `most`. Also takes the word after
/// them, if it is the next one of the tree. Returns the number, the position where it stopped, and
/// the bits of that word, or 0.
#[inline(always)]
fn count_full(
    simd: impl Simd,
    words: &mut impl Words,
    base: usize,
    offsets: &[u32],
    first: usize,
    most: usize,
) -> (usize, usize, u64) {
    let (mut full, mut at) = (1, first + 1);
    while full < most && offsets.get(at) == Some(&offsets[first].wrapping_add(full as u32)) {
        let bits = take_ahead(simd, words, base, offsets, at);
        at += 1;
        if bits != u64::MAX {
            return (full, at, bits);
        }
        full += 1;
    }
    (full, at, 0)
}

impl WordSink for FrameWriter<'_> {
    #[inline(always)]
    fn take(&mut self, simd: impl Simd, words: &mut impl Words, base: u64, mut offsets: &[u32]) {
        while let Some((segment, rest)) = self.place.split(base, offsets) {
            offsets = rest;
            let (mut at, mut carried) = (0, 0);
            while at < segment.offsets.len() || carried != 0 {
                (at, carried) = self.take_some(simd, &segment, words, base as usize, at, carried);
            }
        }
    }

    #[inline(always)]
    fn finish(mut self, simd: impl Simd) {
        self.flush(simd);
    }
}

/// Joins touching frames of a slot to runs, and appends the runs to a list.
///
/// The starts and the ends of runs are found separately, one word at a time and without a branch
/// for each: the n-th end belongs to the n-th start.
pub(super) struct RunWriter<'a> {
    place: SlotPosition<'a>,
    out: RunList<'a>,
    /// Number of frames in all runs.
    frames: &'a mut u64,
    starts: &'a mut StageBuffer,
    ends: &'a mut StageBuffer,
    base: u64,
    at: RunProgress,
}

/// The state of the runs.
#[derive(Clone, Copy, Default)]
struct RunProgress {
    /// Number of staged starts and ends.
    starts: usize,
    ends: usize,
    frames: u64,
    /// 1 if the last bit of the last word was set: the run continues if the next word follows it.
    carry: u64,
    /// First frame after the last word.
    next: u64,
}

impl RunProgress {
    /// Ends the run that the last word left open.
    #[inline(always)]
    fn end_run(&mut self, stage: &mut StageBuffer, base: u64) {
        stage[self.ends] = (self.next - base) as u32;
        self.ends += 1;
        self.carry = 0;
    }
}

struct RunList<'a> {
    runs: &'a mut Vec<FrameRun>,
    /// Start of a run whose end was not found before the stages were emptied.
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

impl<'a> RunWriter<'a> {
    /// Creates a sink that adds the number of frames in all runs to `frames`.
    pub(super) fn new(
        layout: &'a Layout,
        runs: &'a mut Vec<FrameRun>,
        frames: &'a mut u64,
        stages: &'a mut Stages,
    ) -> Self {
        let Stages { starts, ends, .. } = stages;
        let (place, out) = (SlotPosition::new(layout), RunList { runs, open: None });
        Self { place, out, frames, starts, ends, base: 0, at: RunProgress::default() }
    }
}

impl WordSink for RunWriter<'_> {
    #[inline(always)]
    fn take(&mut self, simd: impl Simd, words: &mut impl Words, base: u64, mut offsets: &[u32]) {
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
                if let Some(ahead) = segment.offsets.get(i + PREFETCH_DISTANCE) {
                    words.prefetch(simd, base as usize + *ahead as usize);
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
                if at.starts.max(at.ends) > STAGE_LIMIT {
                    self.out.append(self.base, &self.starts[..at.starts], &self.ends[..at.ends]);
                    (at.starts, at.ends) = (0, 0);
                }
                let first = distance.wrapping_add(offset << SHIFT);
                at.starts = expand(simd, self.starts, at.starts, starts, first);
                at.ends = expand(simd, self.ends, at.ends, ends, first);
            }
        }
        self.at = at;
    }

    #[inline(always)]
    fn finish(mut self, _: impl Simd) {
        if self.at.carry != 0 {
            self.at.end_run(self.ends, self.base);
        }
        let (starts, ends) = (&self.starts[..self.at.starts], &self.ends[..self.at.ends]);
        self.out.append(self.base, starts, ends);
        *self.frames += self.at.frames;
    }
}
