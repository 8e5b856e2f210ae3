//! The order in which pages are visited, and the arithmetic of generations.

use super::page::{GENERATOR_STEP, mix};

/// Number of page visits for each page that the sweep re-reads, in a loop without a rate or in
/// ring 0.
pub const SWEEP_EVERY: u32 = 32;
/// The same for a loop with a rate in ring 3, which has time to spare.
pub const SWEEP_EVERY_PACED: u32 = 8;

/// The order in which a share's pages are visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Pattern {
    /// One page after the other, repeatedly.
    Seq,
    /// Any page, all equally likely.
    Random,
    /// Few pages often, many rarely: the n-th most popular page about n times less often than the
    /// first.
    Zipf,
    /// Only every k-th page, in order: no two dirty frames are adjacent.
    Stride(u32),
    /// Each page once, in order; afterwards pages are only re-read.
    Once,
}

impl Pattern {
    /// Default step of `stride`.
    pub const DEFAULT_STRIDE: u32 = 16;

    /// Returns whether generations do not follow from the position alone and need a table, one
    /// `u32` for each page.
    pub fn needs_table(self) -> bool {
        matches!(self, Pattern::Random | Pattern::Zipf)
    }

    /// Returns how many of `pages` pages the pattern ever writes.
    pub fn reach(self, pages: u64) -> u64 {
        match self {
            Pattern::Stride(step) => pages.div_ceil(u64::from(step)),
            _ => pages,
        }
    }
}

/// Returns the generation of a page after `writes` writes. It counts up and skips 0, which means
/// never written.
#[inline(always)]
pub fn generation_after(writes: u64) -> u32 {
    match writes.checked_sub(1) {
        None => 0,
        // The remainder is below u32::MAX, so neither the cast nor the addition overflows.
        Some(earlier) => (earlier % u64::from(u32::MAX)) as u32 + 1,
    }
}

/// Returns the generation that follows `generation`.
#[inline(always)]
pub(super) fn next_generation(generation: u32) -> u32 {
    generation.wrapping_add(1).max(1)
}

/// A small generator of uniformly distributed numbers. Its state is one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct Generator(u64);

impl Generator {
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        Generator(mix(seed.wrapping_add(mix(stream.wrapping_add(GENERATOR_STEP)))))
    }

    #[inline(always)]
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GENERATOR_STEP);
        mix(self.0)
    }

    /// Returns the result of [`Generator::below`] after `ahead` further calls.
    #[inline(always)]
    pub(super) fn peek(&self, ahead: u64, bound: u64) -> u64 {
        scale(mix(self.0.wrapping_add(GENERATOR_STEP.wrapping_mul(ahead + 1))), bound)
    }

    /// Returns a number below `bound`, which is not 0.
    #[inline(always)]
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        scale(self.next(), bound)
    }
}

/// Returns `value` as a fraction of 2^64, times `bound`.
#[inline(always)]
fn scale(value: u64, bound: u64) -> u64 {
    ((u128::from(value) * u128::from(bound)) >> 64) as u64
}

/// A skewed distribution in integer arithmetic. Each octave of ranks (1, 2-3, 4-7, ...) is equally
/// likely, and so is each rank within its octave, so rank r has a probability of about 1/r. Ranks
/// are then scattered over the share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct Zipf {
    pages: u64,
    octaves: u64,
    /// Coprime to `pages`, so multiplying by it only permutes the pages.
    scatter: u64,
}

impl Zipf {
    pub(super) fn new(pages: u64) -> Self {
        let pages = pages.max(1);
        // About the golden ratio of the share, which spreads ranks without clusters.
        let mut scatter = (scale(GENERATOR_STEP, pages) | 1).max(1);
        while common_divisor(scatter, pages) != 1 {
            scatter += 2;
        }
        Zipf { pages, octaves: u64::from(u64::BITS - pages.leading_zeros()), scatter }
    }

    #[inline(always)]
    pub(super) fn draw(&self, generator: &mut Generator) -> u64 {
        loop {
            let octave = generator.below(self.octaves);
            let rank = (1u64 << octave) + generator.below(1u64 << octave) - 1;
            // The last octave is cut off where the share ends.
            if rank < self.pages {
                return self.scattered(rank);
            }
        }
    }

    #[inline(always)]
    fn scattered(&self, rank: u64) -> u64 {
        // A working set has fewer than 2^31 pages, so the product stays in 64 bits.
        rank.wrapping_mul(self.scatter) % self.pages
    }
}

fn common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
