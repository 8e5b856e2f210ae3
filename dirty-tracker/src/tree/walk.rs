//! The walk that empties a tree: top down, one visit to each word that is not zero, by one thread
//! that shares the words or owns them.
//!
//! A walk proceeds level by level, one full buffer of words at a time, and not branch by branch.
//! The loads of a buffer overlap, and the loops are long enough for branch prediction.

use super::simd::{Simd, SimdJob};
use super::sink::WordSink;
use super::words::{PREFETCH_DISTANCE, SHIFT, Sparsity, Words};

/// Capacity of a level's buffer: words that were found and not yet visited. It has room for the
/// children of eight full words. The buffers of the six levels of 12 TiB take 12 KiB, so that they
/// stay in a first-level cache of 32 KiB.
pub(super) const LEVEL_WORDS: usize = 512;

/// The words of one level that a walk has found, ascending.
#[derive(Debug, Clone)]
pub(super) struct LevelBuffer {
    /// Indices of the words, minus `base`.
    words: [u32; LEVEL_WORDS],
    base: u64,
    next: usize,
    len: usize,
}

impl LevelBuffer {
    pub(super) const EMPTY: Self = Self { words: [0; LEVEL_WORDS], base: 0, next: 0, len: 0 };
}

/// As [`Simd::expand`], but with plain instructions if there are at most two bits.
#[inline(always)]
fn expand_two(simd: impl Simd, bits: u64, base: u32, room: &mut [u32; 64]) -> usize {
    let second = bits & bits.wrapping_sub(1);
    if second & second.wrapping_sub(1) != 0 {
        return simd.expand(bits, base, room);
    }
    room[0] = base.wrapping_add(bits.trailing_zeros());
    room[1] = base.wrapping_add(second.trailing_zeros());
    bits.count_ones() as usize
}

/// Takes listed leaf words, ascending. Leaves their summaries as they are.
pub(super) struct ListedWords<'a, W, S> {
    pub(super) words: W,
    pub(super) list: &'a [u64],
    pub(super) pending: &'a mut LevelBuffer,
    pub(super) sink: S,
}

impl<W: Words, S: WordSink> SimdJob for ListedWords<'_, W, S> {
    #[inline(always)]
    fn run<K: Simd>(self, simd: K) {
        let Self { mut words, mut list, pending, mut sink } = self;
        while let Some(base) = list.first() {
            let mut len = 0;
            for (place, word) in pending.words.iter_mut().zip(list) {
                let Ok(offset) = u32::try_from(word - base) else { break };
                *place = offset;
                len += 1;
            }
            sink.take(simd, &mut words, *base, &pending.words[..len]);
            list = &list[len..];
        }
        sink.finish(simd);
    }
}

/// A sink that discards all words.
pub(super) struct Discard;

impl WordSink for Discard {
    #[inline(always)]
    fn take(&mut self, _: impl Simd, words: &mut impl Words, base: u64, offsets: &[u32]) {
        for offset in offsets {
            words.take(base as usize + *offset as usize);
        }
    }

    #[inline(always)]
    fn finish(self, _: impl Simd) {}
}

/// A walk over everything below the words `roots` of the highest of `levels`, ascending.
pub(super) struct TreeWalk<'a, W, S> {
    pub(super) words: W,
    /// First word and length of each level, level 0 first. The level of the roots is the last.
    pub(super) levels: &'a [(usize, usize)],
    /// Ascending, at most [`LEVEL_WORDS`], and all within 32 bits of the first.
    pub(super) roots: &'a [u64],
    /// One buffer for each level.
    pub(super) pending: &'a mut [LevelBuffer],
    pub(super) sink: S,
}

impl<W: Words, S: WordSink> SimdJob for TreeWalk<'_, W, S> {
    /// Clears a summary before it loads anything below. If an insert adds a word below it
    /// meanwhile, that insert sets the summary again (see Ordering in the module above).
    #[inline(always)]
    fn run<K: Simd>(self, simd: K) {
        // Separate variables, so that they can live in registers.
        let Self { mut words, levels, roots, pending, mut sink } = self;
        let top = levels.len() - 1;
        let first = &mut pending[top];
        (first.base, first.next, first.len) = (roots.first().copied().unwrap_or(0), 0, roots.len());
        for (word, root) in first.words.iter_mut().zip(roots) {
            *word = (root - first.base) as u32;
        }
        let mut level = top;
        loop {
            if level == 0 {
                let leaves = &mut pending[0];
                // Leaf words lie at the start of the allocation: their index is their position.
                sink.take(simd, &mut words, leaves.base, &leaves.words[..leaves.len]);
                leaves.next = leaves.len;
            }
            let (below, here) = pending.split_at_mut(level);
            let here = &mut here[0];
            if here.next == here.len {
                if level == top {
                    break;
                }
                level += 1;
                continue;
            }
            let Some(below) = below.last_mut() else { break };
            expand_words(simd, &mut words, levels[level].0, here, below);
            level -= 1;
        }
        sink.finish(simd);
    }
}

/// Takes words of `here`, a level whose first word is `level_start`, until `below` is full or a
/// word below would be out of its reach. Fills `below` with the words that are not zero.
#[inline(always)]
fn expand_words<K: Simd>(
    simd: K,
    words: &mut impl Words,
    level_start: usize,
    here: &mut LevelBuffer,
    below: &mut LevelBuffer,
) {
    let start = level_start + here.base as usize;
    let found = &here.words[here.next..here.len];
    let first = found[0];
    let (mut visited, mut len) = (0, 0);
    let mut sparsity = Sparsity::of(simd, found);
    // Words below must be within 32 bits.
    let in_reach = |offset: u32| offset < 1 << (32 - SHIFT);
    while let Some(word) = found.get(visited) {
        let eight =
            sparsity.eight(found, visited).filter(|eight| in_reach(eight[7].wrapping_sub(first)));
        if let (Some(eight), Some(words), Some(room)) =
            (eight, words.owned(), below.words[len..].first_chunk_mut())
        {
            let expanded = simd.expand_eight(words, start, eight, first, room);
            sparsity.tried(visited, expanded.is_some());
            if let Some(found) = expanded {
                (visited, len) = (visited + 8, len + found);
                continue;
            }
        }
        if let Some(ahead) = found.get(visited + PREFETCH_DISTANCE) {
            words.prefetch(simd, start + *ahead as usize);
        }
        let Some(room) = below.words[len..].first_chunk_mut() else { break };
        let offset = word - first;
        if !in_reach(offset) {
            break;
        }
        let bits = words.take(start + *word as usize);
        len += match sparsity.two {
            true => expand_two(simd, bits, offset << SHIFT, room),
            false => simd.expand(bits, offset << SHIFT, room),
        };
        visited += 1;
    }
    here.next += visited;
    (below.base, below.next, below.len) = ((here.base + u64::from(first)) << SHIFT, 0, len);
}
