//! The words of a tree: the arithmetic of their bits, and the ways in which a walk takes words. A
//! module above `simd` and below `sink`, `walk` and the operations of the tree.

use super::simd::Simd;
use crate::sync::{self, AtomicU64, Ordering::SeqCst};

/// The base-2 logarithm of the arity: a word has 64 children.
pub(super) const SHIFT: u32 = 6;

/// The way in which a walk takes the words of a tree.
pub(super) trait Words {
    /// Takes the word and leaves zero.
    fn take(&mut self, index: usize) -> u64;

    /// Returns all words if the walk is their only owner.
    fn owned(&mut self) -> Option<&mut [AtomicU64]> {
        None
    }

    /// Prefetches a word that will be taken soon. A hint.
    fn prefetch(&self, simd: impl Simd, index: usize);
}

/// Distance, in words, between prefetching a word and taking it. The column "tree, shared" of
/// `cargo bench -p driftline-dirty-tracker -- 2016` measures it.
pub(super) const PREFETCH_DISTANCE: usize = 12;

/// Words that other threads insert into: one exchange for each word that is not zero.
pub(super) struct SharedWords<'t>(pub(super) &'t [AtomicU64]);

impl Words for SharedWords<'_> {
    #[inline(always)]
    fn take(&mut self, index: usize) -> u64 {
        let word = &self.0[index];
        if word.load(SeqCst) == 0 { 0 } else { word.swap(0, SeqCst) }
    }

    /// An exchange lets no later load begin. Without the prefetch, words outside the cache are
    /// loaded one after the other.
    #[inline(always)]
    fn prefetch(&self, simd: impl Simd, index: usize) {
        simd.prefetch(&self.0[index]);
    }
}

/// Words that only this walk can access: plain loads and stores.
pub(super) struct OwnedWords<'t>(pub(super) &'t mut [AtomicU64]);

impl Words for OwnedWords<'_> {
    #[inline(always)]
    fn take(&mut self, index: usize) -> u64 {
        sync::take_mut(&mut self.0[index])
    }

    #[inline(always)]
    fn owned(&mut self) -> Option<&mut [AtomicU64]> {
        Some(self.0)
    }

    /// No prefetch: the processor's own prefetching suffices.
    #[inline(always)]
    fn prefetch(&self, _: impl Simd, _: usize) {}
}

/// Picks the bit-extraction strategy from the density of non-zero words. The density gives the
/// number of bits in each word if bits are distributed uniformly. `cargo bench -p
/// driftline-dirty-tracker -- density` measures the strategies.
#[derive(Clone, Copy)]
pub(super) struct Sparsity {
    /// Words are taken one by one, and most have one or two bits.
    pub(super) two: bool,
    /// Position from which on groups of eight words are tried. A failed attempt is expensive, so
    /// after each failure the next attempt is farther away.
    eights_from: usize,
    skip: usize,
}

impl Sparsity {
    #[inline(always)]
    pub(super) fn of<K: Simd>(_: K, offsets: &[u32]) -> Self {
        let (first, last) = (offsets.first().copied(), offsets.last().copied());
        let span = last.zip(first).map_or(0, |(last, first)| (last - first) as usize);
        // At this density at most one word in forty has more than two bits.
        let eights = K::EIGHTS && offsets.len() * 8 < span * 3;
        // At this density at most one word in seventeen. A single word counts as sparse, too.
        let two = !eights && offsets.len() * 2 < span + 3;
        Self { two, eights_from: if eights { 0 } else { usize::MAX }, skip: 8 }
    }

    /// Room, in frames, that there should be before a word is taken: what most words need.
    #[inline(always)]
    pub(super) fn needed(self) -> usize {
        match (self.two, self.eights_from) {
            (true, _) => 2,
            (false, usize::MAX) => 64,
            _ => 16,
        }
    }

    /// Returns the eight words from position `at` on, if a group is to be tried there.
    #[inline(always)]
    pub(super) fn eight(self, offsets: &[u32], at: usize) -> Option<&[u32; 8]> {
        if at < self.eights_from {
            return None;
        }
        offsets[at..].first_chunk()
    }

    /// Records the result of trying eight words at position `at`.
    #[inline(always)]
    pub(super) fn tried(&mut self, at: usize, success: bool) {
        if success {
            self.skip = 8;
        } else {
            (self.eights_from, self.skip) = (at + self.skip, self.skip * 2);
        }
    }
}

/// Returns the words that hold bits `lo..=hi`, each with the mask of those bits.
pub(crate) fn masks(lo: u64, hi: u64) -> impl Iterator<Item = (u64, u64)> {
    let (first, last) = (lo >> SHIFT, hi >> SHIFT);
    (first..=last).map(move |word| {
        let from = if word == first { lo & 63 } else { 0 };
        let to = if word == last { hi & 63 } else { 63 };
        (word, (u64::MAX << from) & (u64::MAX >> (63 - to)))
    })
}

/// Returns a bit for each of up to 64 words: set if the word is not zero.
pub(super) fn nonzero(words: &[u64]) -> u64 {
    // The flags are bytes of 0 or 1, which the compiler computes with vector instructions. The
    // product gathers eight of them into one byte.
    let eight = |words: &[u64]| {
        let mut flags = [0; 8];
        flags.iter_mut().zip(words).for_each(|(flag, word)| *flag = u8::from(*word != 0));
        u64::from_le_bytes(flags).wrapping_mul(0x0102_0408_1020_4080) >> 56
    };
    let bits = |words: &[u64]| {
        words.chunks(8).enumerate().fold(0, |bits, (i, words)| bits | eight(words) << (8 * i))
    };
    // The usual case of 64 words has a length that the compiler knows.
    <&[u64; 64]>::try_from(words).map_or_else(|_| bits(words), |words| bits(words))
}

/// Returns the number of set bits.
pub(crate) fn ones(words: &[u64]) -> u64 {
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}

/// Returns the positions of the set bits, ascending.
pub(super) fn set_bits_of(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(bit)
    })
}
