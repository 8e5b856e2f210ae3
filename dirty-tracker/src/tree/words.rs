//! The words of a tree: how bits are addressed, and how a walk takes words while others insert or as their only owner.

use super::simd::Simd;
use crate::sync::{self, AtomicU64, Ordering::SeqCst};

/// log2 of the arity.
pub(super) const SHIFT: u32 = 6;

/// How a walk takes the words of a tree.
pub(super) trait Words {
    /// Takes the word, leaving zero.
    fn take(&mut self, index: usize) -> u64;

    /// All words, if nobody else has them.
    fn owned(&mut self) -> Option<&mut [AtomicU64]> {
        None
    }

    /// The word will be taken soon.
    fn prefetch(&self, simd: impl Simd, index: usize);
}

/// How many words before it is taken a word is announced.
pub(super) const PREFETCH_DISTANCE: usize = 12;

/// While others insert: an exchange for each word that is not zero.
pub(super) struct Shared<'t>(pub(super) &'t [AtomicU64]);

impl Words for Shared<'_> {
    #[inline(always)]
    fn take(&mut self, index: usize) -> u64 {
        let word = &self.0[index];
        if word.load(SeqCst) == 0 { 0 } else { word.swap(0, SeqCst) }
    }

    /// An exchange lets no later load begin: without this, words out of the cache come one by one.
    #[inline(always)]
    fn prefetch(&self, simd: impl Simd, index: usize) {
        simd.prefetch(&self.0[index]);
    }
}

/// While nobody else can: plain loads and stores.
pub(super) struct Owned<'t>(pub(super) &'t mut [AtomicU64]);

impl Words for Owned<'_> {
    #[inline(always)]
    fn take(&mut self, index: usize) -> u64 {
        sync::take_mut(&mut self.0[index])
    }

    #[inline(always)]
    fn owned(&mut self) -> Option<&mut [AtomicU64]> {
        Some(self.0)
    }

    /// The processor looks ahead by itself.
    #[inline(always)]
    fn prefetch(&self, _: impl Simd, _: usize) {}
}

/// How words are best taken apart, by how far they are from one another: that says how many bits
/// each has, if those are where chance put them.
#[derive(Clone, Copy)]
pub(super) struct Sparsity {
    /// One by one; mostly a bit or two each.
    pub(super) two: bool,
    /// From this place on eight at once can be tried. Where that fails, which costs, it is tried
    /// less and less often.
    eights_from: usize,
    skip: usize,
}

impl Sparsity {
    #[inline(always)]
    pub(super) fn of<K: Simd>(_: K, offsets: &[u32]) -> Self {
        let (first, last) = (offsets.first().copied(), offsets.last().copied());
        let span = last.zip(first).map_or(0, |(last, first)| (last - first) as usize);
        // One of forty words has more than two bits at the most.
        let eights = K::EIGHTS && offsets.len() * 8 < span * 3;
        // One of seventeen at the most. A word alone counts as such, too.
        let two = !eights && offsets.len() * 2 < span + 3;
        Self { two, eights_from: if eights { 0 } else { usize::MAX }, skip: 8 }
    }

    /// For how many frames there should be room before a word is taken: those of words as they
    /// mostly are.
    #[inline(always)]
    pub(super) fn needed(self) -> usize {
        match (self.two, self.eights_from) {
            (true, _) => 2,
            (false, usize::MAX) => 64,
            _ => 16,
        }
    }

    /// The eight words from place `at` on, if they are to be tried.
    #[inline(always)]
    pub(super) fn eight(self, offsets: &[u32], at: usize) -> Option<&[u32; 8]> {
        if at < self.eights_from {
            return None;
        }
        offsets[at..].first_chunk()
    }

    /// Eight words from place `at` on were tried.
    #[inline(always)]
    pub(super) fn tried(&mut self, at: usize, success: bool) {
        if success {
            self.skip = 8;
        } else {
            (self.eights_from, self.skip) = (at + self.skip, self.skip * 2);
        }
    }
}

/// The words that hold bits `lo..=hi`, each with the mask of those bits.
pub(super) fn masks(lo: u64, hi: u64) -> impl Iterator<Item = (u64, u64)> {
    let (first, last) = (lo >> SHIFT, hi >> SHIFT);
    (first..=last).map(move |word| {
        let from = if word == first { lo & 63 } else { 0 };
        let to = if word == last { hi & 63 } else { 63 };
        (word, (u64::MAX << from) & (u64::MAX >> (63 - to)))
    })
}

/// Which of up to 64 words are not zero.
pub(super) fn nonzero(words: &[u64]) -> u64 {
    // Bytes of 0 or 1, which the compiler makes with vectors; the product gathers eight to one
    // byte.
    let eight = |words: &[u64]| {
        let mut flags = [0; 8];
        flags.iter_mut().zip(words).for_each(|(flag, word)| *flag = u8::from(*word != 0));
        u64::from_le_bytes(flags).wrapping_mul(0x0102_0408_1020_4080) >> 56
    };
    let bits = |words: &[u64]| {
        words.chunks(8).enumerate().fold(0, |bits, (i, words)| bits | eight(words) << (8 * i))
    };
    // All 64, as usual: a length that the compiler knows.
    <&[u64; 64]>::try_from(words).map_or_else(|_| bits(words), |words| bits(words))
}

/// How many bits are set.
pub(super) fn ones(words: &[u64]) -> u64 {
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}

/// The set bits, ascending.
pub(super) fn set_bits_of(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(bit)
    })
}
