//! The walk that empties a tree: top down, one visit to each word that is not zero, by one thread
//! that shares the words or owns them.
//!
//! It goes level by level, a buffer full of words at a time, and not branch by branch: the loads of
//! a buffer are under way at once, and its loops are long enough for the processor to foresee them.

use super::SHIFT;
use super::kernel::{Job, Kernel};
use super::sink::Sink;
use crate::sync::{self, AtomicU64, Ordering::SeqCst};

/// How a walk takes the words of a tree.
pub(super) trait Words {
    /// Takes the word, leaving zero.
    fn take(&mut self, index: usize) -> u64;

    /// All words, if nobody else has them.
    fn owned(&mut self) -> Option<&mut [AtomicU64]> {
        None
    }

    /// The word will be taken soon.
    fn announce(&self, kernel: impl Kernel, index: usize);
}

/// How many words before it is taken a word is announced.
pub(super) const AHEAD: usize = 12;

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
    fn announce(&self, kernel: impl Kernel, index: usize) {
        kernel.prefetch(&self.0[index]);
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
    fn announce(&self, _: impl Kernel, _: usize) {}
}

/// Words found at a level and not yet looked into.
pub(super) const PENDING: usize = 512;

/// The words of one level that a walk has found, ascending.
#[derive(Debug, Clone)]
pub(super) struct Pending {
    /// Their indices, less `base`.
    words: [u32; PENDING],
    base: u64,
    next: usize,
    len: usize,
}

impl Pending {
    pub(super) const EMPTY: Self = Self { words: [0; PENDING], base: 0, next: 0, len: 0 };
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
    pub(super) fn of<K: Kernel>(_: K, offsets: &[u32]) -> Self {
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

/// As [`Kernel::expand`], by plain instructions if it is of at most two bits.
#[inline(always)]
fn expand_two(kernel: impl Kernel, bits: u64, base: u32, room: &mut [u32; 64]) -> usize {
    let second = bits & bits.wrapping_sub(1);
    if second & second.wrapping_sub(1) != 0 {
        return kernel.expand(bits, base, room);
    }
    room[0] = base.wrapping_add(bits.trailing_zeros());
    room[1] = base.wrapping_add(second.trailing_zeros());
    bits.count_ones() as usize
}

/// Takes listed leaf words, ascending, and leaves their summaries as they are.
pub(super) struct Listed<'a, W, S> {
    pub(super) words: W,
    pub(super) list: &'a [u64],
    pub(super) pending: &'a mut Pending,
    pub(super) sink: S,
}

impl<W: Words, S: Sink> Job for Listed<'_, W, S> {
    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) {
        let Self { mut words, mut list, pending, mut sink } = self;
        while let Some(base) = list.first() {
            let mut len = 0;
            for (place, word) in pending.words.iter_mut().zip(list) {
                let Ok(offset) = u32::try_from(word - base) else { break };
                *place = offset;
                len += 1;
            }
            sink.take(kernel, &mut words, *base, &pending.words[..len]);
            list = &list[len..];
        }
        sink.finish(kernel);
    }
}

/// Empties a tree without saying of what.
pub(super) struct Nowhere;

impl Sink for Nowhere {
    #[inline(always)]
    fn take(&mut self, _: impl Kernel, words: &mut impl Words, base: u64, offsets: &[u32]) {
        for offset in offsets {
            words.take(base as usize + *offset as usize);
        }
    }

    #[inline(always)]
    fn finish(self, _: impl Kernel) {}
}

/// A walk over everything below the words `roots` of the highest of `levels`, ascending.
pub(super) struct Walk<'a, W, S> {
    pub(super) words: W,
    /// First word and length of each level, 0 first; the roots' level is the last.
    pub(super) levels: &'a [(usize, usize)],
    /// Ascending; at most [`PENDING`], and all in reach of 32 bits from the first.
    pub(super) roots: &'a [u64],
    /// As many as levels.
    pub(super) pending: &'a mut [Pending],
    pub(super) sink: S,
}

impl<W: Words, S: Sink> Job for Walk<'_, W, S> {
    /// A summary is cleared before anything below it is looked at: what an insert adds below it
    /// meanwhile has its summary set again by that insert (see the module above).
    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) {
        // Apart, so that they can live in registers.
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
                // Leaf words lie at the start: their index is their place.
                sink.take(kernel, &mut words, leaves.base, &leaves.words[..leaves.len]);
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
            let start = levels[level].0 + here.base as usize;
            let found = &here.words[here.next..here.len];
            let first = found[0];
            let (mut looked_into, mut len) = (0, 0);
            let mut sparsity = Sparsity::of(kernel, found);
            // What lies below must be in reach of 32 bits.
            let in_reach = |offset: u32| offset < 1 << (32 - SHIFT);
            while let Some(word) = found.get(looked_into) {
                if let Some(eight) = sparsity.eight(found, looked_into)
                    && let Some(words) = words.owned()
                    && let Some(room) = below.words[len..].first_chunk_mut()
                    && in_reach(eight[7].wrapping_sub(first))
                {
                    let expanded = kernel.expand_eight(words, start, eight, first, room);
                    sparsity.tried(looked_into, expanded.is_some());
                    if let Some(found) = expanded {
                        (looked_into, len) = (looked_into + 8, len + found);
                        continue;
                    }
                }
                if let Some(ahead) = found.get(looked_into + AHEAD) {
                    words.announce(kernel, start + *ahead as usize);
                }
                let Some(room) = below.words[len..].first_chunk_mut() else { break };
                let offset = word - first;
                if !in_reach(offset) {
                    break;
                }
                let bits = words.take(start + *word as usize);
                len += match sparsity.two {
                    true => expand_two(kernel, bits, offset << SHIFT, room),
                    false => kernel.expand(bits, offset << SHIFT, room),
                };
                looked_into += 1;
            }
            here.next += looked_into;
            (below.base, below.next, below.len) = ((here.base + u64::from(first)) << SHIFT, 0, len);
            level -= 1;
        }
        sink.finish(kernel);
    }
}
