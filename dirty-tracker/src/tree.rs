//! The packed 64-ary radix tree of dirty bits.
//!
//! ```text
//! level 2                 [ 1 word  ]      bit i: word i of level 1 is not zero
//! level 1          [ word | word | .. ]    bit i: word i of level 0 is not zero
//! level 0   [ word | word | word | .. ]    the KVM dirty bitmap of every slot, each on its own word
//! ```
//!
//! *Leaf*: a word of level 0. *Summary*: a word above. All levels lie in one zeroed allocation, so
//! parts that were never dirty are never backed by memory. Every place is found by arithmetic.
//!
//! # Ordering
//! Insert writes the leaf, then looks at each summary from the bottom up; drain clears each summary
//! before it looks below, from the top down. Both are store-then-load on two words, so all accesses
//! are SeqCst: either the inserter sees the summary cleared and sets it again, or the drainer, going
//! down after its clear, sees the leaf. Summaries are looked at even when the bit was already there:
//! the other inserter may not have got to them yet (I1).
//!
//! Source: Radim Krcmar, KVM list, 5 May 2016, with bytes as nodes; here with 64-bit words.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use zerocopy::FromZeros;

use crate::{FrameRun, Gfn, Layout};

/// log2 of the arity.
const SHIFT: u32 = 6;
/// 64^6 leaf bits are 2^36 words of 64 frames: more than any x86-64 guest has.
const MAX_LEVELS: usize = 7;

/// A set of the frames of a [`Layout`], as one allocation of packed levels.
#[derive(Debug)]
pub struct Tree {
    words: Vec<AtomicU64>,
    /// First word of each level, and its length; level 0 first.
    levels: Vec<(usize, usize)>,
}

impl Tree {
    /// An empty tree over `layout`. One zeroed allocation: memory is used as frames get dirty.
    pub fn new(layout: &Layout) -> Self {
        let mut levels = Vec::with_capacity(MAX_LEVELS);
        let mut len = layout.leaf_words() as usize;
        let mut total = 0;
        loop {
            levels.push((total, len));
            total += len;
            if len == 1 {
                break;
            }
            len = len.div_ceil(64);
        }
        let words = AtomicU64::new_vec_zeroed(total).unwrap_or_default();
        assert_eq!(words.len(), total, "no memory for a dirty tree of {total} words");
        Self { words, levels }
    }

    /// Bytes reserved by the tree; only what was ever dirty is backed by memory.
    pub fn reserved_bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    /// Sets leaf bits `first .. first + count`. The bits must lie in one slot of the layout.
    pub(crate) fn insert(&self, first: u64, count: u64) {
        if count == 0 {
            return;
        }
        // Leaves with whole-word masks, then each summary level over the words below it.
        let (mut lo, mut hi) = (first, first + count - 1);
        for &(start, _) in &self.levels {
            self.set_bits(start, lo, hi);
            (lo, hi) = (lo >> SHIFT, hi >> SHIFT);
        }
    }

    /// Sets bits `lo..=hi` of the level that starts at word `start`, skipping words that have them.
    fn set_bits(&self, start: usize, lo: u64, hi: u64) {
        let (first, last) = (lo >> SHIFT, hi >> SHIFT);
        for w in first..=last {
            let from = if w == first { lo & 63 } else { 0 };
            let to = if w == last { hi & 63 } else { 63 };
            let mask = (u64::MAX << from) & (u64::MAX >> (63 - to));
            let word = &self.words[start + w as usize];
            if word.load(SeqCst) & mask != mask {
                word.fetch_or(mask, SeqCst);
            }
        }
    }

    /// Whether leaf bit `bit` is set.
    pub(crate) fn contains(&self, bit: u64) -> bool {
        self.leaf(bit >> SHIFT) & (1 << (bit & 63)) != 0
    }

    fn leaf(&self, word: u64) -> u64 {
        self.words[word as usize].load(SeqCst)
    }

    /// Empties the tree and appends what was in it to `runs`, ascending, adjacent frames of a slot
    /// joined. Runs while others insert: an insert that returned before this call is in the result;
    /// one that overlaps it is in the result or still in the tree. Returns the number of frames.
    ///
    /// Costs a few loads and stores for each dirty word, wherever in the tree it is.
    pub fn drain(&self, layout: &Layout, runs: &mut Vec<FrameRun>) -> u64 {
        let mut out = RunBuilder::new(layout, runs);
        self.drain_word(self.levels.len() - 1, 0, &mut out);
        out.frames
    }

    fn drain_word(&self, level: usize, index: u64, out: &mut RunBuilder<'_>) {
        let (start, _) = self.levels[level];
        let word = &self.words[start + index as usize];
        if word.load(SeqCst) == 0 {
            return;
        }
        let mut bits = word.swap(0, SeqCst);
        if level == 0 {
            out.push_word(index, bits);
            return;
        }
        while bits != 0 {
            let bit = bits.trailing_zeros();
            bits &= bits - 1;
            self.drain_word(level - 1, (index << SHIFT) | u64::from(bit), out);
        }
    }

    /// The leaves of the slot placed at `first_word`: its KVM dirty bitmap, word by word.
    pub(crate) fn leaves(&self, first_word: u64, words: u64) -> impl Iterator<Item = u64> {
        (first_word..first_word + words).map(|w| self.leaf(w))
    }
}

/// Turns ascending leaf words into runs of frames.
struct RunBuilder<'a> {
    layout: &'a Layout,
    runs: &'a mut Vec<FrameRun>,
    /// The slot of the last word: index into the layout's placed slots.
    slot: usize,
    frames: u64,
    /// Runs that were there before are not touched.
    floor: usize,
}

impl<'a> RunBuilder<'a> {
    fn new(layout: &'a Layout, runs: &'a mut Vec<FrameRun>) -> Self {
        let floor = runs.len();
        Self { layout, runs, slot: 0, frames: 0, floor }
    }

    fn push_word(&mut self, word: u64, mut bits: u64) {
        let placed = self.layout.placed();
        let mut new_slot = false;
        while word >= placed[self.slot].first_word + placed[self.slot].words() {
            self.slot += 1;
            new_slot = true;
        }
        let p = &placed[self.slot];
        let base = p.slot.base.0 + (word - p.first_word) * 64;
        self.frames += u64::from(bits.count_ones());
        while bits != 0 {
            let from = bits.trailing_zeros();
            let count = (bits >> from).trailing_ones();
            bits &= !((u64::MAX >> (64 - count)) << from);
            let start = base + u64::from(from);
            match self.runs[self.floor..].last_mut() {
                Some(last) if !new_slot && last.end().0 == start => last.count += u64::from(count),
                _ => self.runs.push(FrameRun { start: Gfn(start), count: u64::from(count) }),
            }
            new_slot = false;
        }
    }
}
