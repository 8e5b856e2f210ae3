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

use crate::sync::{self, AtomicU64, Ordering::SeqCst};
use crate::{FrameRun, Gfn, Layout};

/// log2 of the arity.
const SHIFT: u32 = 6;
/// 64^8 = 2^48 frames: more than the 2^40 of a guest, even if every slot pads its last word.
const MAX_LEVELS: usize = 8;

/// A word that is not zero and whose summary bit is not set, which I1 forbids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("word {index} of tree level {level} is not zero, but its summary bit is not set")]
pub struct MissingSummary {
    /// The word's level; 0 are the leaves.
    pub level: usize,
    /// The word's number in its level.
    pub index: usize,
}

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
        let words = sync::zeroed_words(total).unwrap_or_default();
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

    /// Sets the leaf bits `bits` of word `word`, which must lie in one slot of the layout.
    pub(crate) fn insert_word(&self, word: u64, bits: u64) {
        if bits == 0 {
            return;
        }
        self.or(word as usize, bits);
        let mut below = word;
        for &(start, _) in &self.levels[1..] {
            self.or(start + (below >> SHIFT) as usize, 1 << (below & 63));
            below >>= SHIFT;
        }
    }

    /// Sets the bits of `mask` in a word; one load if they are set.
    fn or(&self, index: usize, mask: u64) {
        let word = &self.words[index];
        if word.load(SeqCst) & mask != mask {
            word.fetch_or(mask, SeqCst);
        }
    }

    /// Checks I1; exact only while nobody inserts.
    pub(crate) fn check(&self) -> Result<(), MissingSummary> {
        for (level, pair) in self.levels.windows(2).enumerate() {
            let ((start, len), (above, _)) = (pair[0], pair[1]);
            for index in 0..len {
                let summary = self.words[above + (index >> SHIFT)].load(SeqCst);
                if self.words[start + index].load(SeqCst) != 0 && summary >> (index & 63) & 1 == 0 {
                    return Err(MissingSummary { level, index });
                }
            }
        }
        Ok(())
    }

    /// Sets bits `lo..=hi` of the level that starts at word `start`, skipping words that have them.
    fn set_bits(&self, start: usize, lo: u64, hi: u64) {
        let (first, last) = (lo >> SHIFT, hi >> SHIFT);
        for w in first..=last {
            let from = if w == first { lo & 63 } else { 0 };
            let to = if w == last { hi & 63 } else { 63 };
            let mask = (u64::MAX << from) & (u64::MAX >> (63 - to));
            self.or(start + w as usize, mask);
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
