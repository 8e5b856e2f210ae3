//! Inserts a frame, a run, or the bits of a word, into a tree that other threads use.

use super::structure::{Tree, fence_prior_writes};
use super::words::{SHIFT, masks, set_bits_of};
use crate::sync::Ordering::SeqCst;
use crate::{FrameRun, Gfn, OutOfSlot, Slot};

/// Leaf words of the longest run that is inserted word by word, and listed. 4, chosen: a run of up
/// to 193 frames fits wherever it begins; a longer one sets each summary once, not once a word.
const MAX_LISTED_WORDS: u64 = 4;

impl Tree {
    /// Inserts a run of frames, which must lie in one slot. Many threads may insert at the same
    /// time. A thread that drains the frames sees what the caller wrote to them before. An empty
    /// run inserts nothing.
    ///
    /// Costs a load for each word of 64 frames and its summaries, an atomic OR for each word that
    /// changes, and one access to the list of small epochs.
    ///
    /// # Errors
    ///
    /// Returns an error that names the run if it does not lie in one slot. Nothing changes.
    pub fn mark(&self, run: FrameRun) -> Result<(), OutOfSlot> {
        if run.count > 0 {
            self.insert(self.layout.bit_of_run(run)?, run.count);
        }
        Ok(())
    }

    /// Inserts the parts of the runs that lie in slots.
    pub(crate) fn mark_parts(&self, runs: impl Iterator<Item = FrameRun>) {
        for part in runs.flat_map(|run| self.layout.parts(run)) {
            if let Ok(first) = self.layout.bit_of_run(part) {
                self.insert(first, part.count);
            }
        }
    }

    /// Inserts the frames of a bitmap of `slot`, a slot of another layout, as far as this tree has
    /// them.
    pub(crate) fn mark_bitmap_of(&self, slot: Slot, bitmap: &[u64]) {
        let frames = bitmap.iter().zip(0u64..).flat_map(|(bits, word)| {
            let gfn = move |bit: usize| Gfn(slot.base.0 + (word << SHIFT) + bit as u64);
            set_bits_of(*bits).map(move |bit| FrameRun { start: gfn(bit), count: 1 })
        });
        self.mark_parts(frames);
    }

    /// Sets leaf bits `first .. first + count`, which must lie in one slot of the layout.
    pub(crate) fn insert(&self, first: u64, count: u64) {
        if count <= 1 {
            self.insert_word(first >> SHIFT, count << (first & 63));
            return;
        }
        let (mut lo, mut hi) = (first, first + count - 1);
        if (hi >> SHIFT) - (lo >> SHIFT) < MAX_LISTED_WORDS {
            masks(lo, hi).for_each(|(word, bits)| {
                self.insert_word(word, bits);
            });
            return;
        }
        // The leaves are set with whole-word masks, then each summary level over the words below
        // it.
        fence_prior_writes();
        for &(start, _) in &self.levels {
            self.set_bits(start, lo, hi);
            (lo, hi) = (lo >> SHIFT, hi >> SHIFT);
        }
        self.word_list.mark_incomplete();
    }

    /// Sets the leaf bits `bits` of word `word`, which must lie in one slot of the layout.
    fn insert_word(&self, word: u64, bits: u64) {
        if let Some(mut list) = self.word_list.try_list() {
            self.insert_word_unlisted(word, bits);
            if list.add(word) {
                return;
            }
        } else {
            self.insert_word_unlisted(word, bits);
        }
        self.word_list.mark_incomplete();
    }

    fn insert_word_unlisted(&self, word: u64, bits: u64) {
        if self.leaf(word) & bits == bits {
            // If the bits are still set after the fence, a drain that takes them later sees the
            // caller's writes, and nothing has to change.
            fence_prior_writes();
            self.set_leaf(word, bits);
        } else {
            // An exchange, even if another thread has set the bits by now: without a fence before
            // it, a load that finds them set does not order the caller's writes.
            self.words[word as usize].fetch_or(bits, SeqCst);
        }
        self.insert_summary((word >> SHIFT) as usize, 1 << (word & 63));
    }

    /// Sets the bits of each word, with one access to the list for all. Returns the number of bits
    /// that were new. The words must lie in slots of the layout.
    pub(crate) fn insert_words(&self, words: &[(u64, u64)]) -> u64 {
        // One fence for all of them.
        fence_prior_writes();
        let mut list = self.word_list.try_list();
        let mut listed = list.is_some();
        let mut new = 0;
        // Neighbouring words have one summary word, which is written once for all of them.
        let (mut summary, mut summary_bits) = (0, 0);
        for &(word, bits) in words {
            new += count(self.set_leaf(word, bits));
            let above = (word >> SHIFT) as usize;
            if above != summary {
                self.insert_summary(summary, summary_bits);
                (summary, summary_bits) = (above, 0);
            }
            summary_bits |= 1 << (word & 63);
            listed = listed && list.as_mut().is_some_and(|list| list.add(word));
        }
        self.insert_summary(summary, summary_bits);
        drop(list);
        if !listed {
            self.word_list.mark_incomplete();
        }
        new
    }

    /// Sets the leaf bits `bits` of word `word`, not its summaries. Returns the bits that were new.
    /// The caller has [fenced](fence_prior_writes) before.
    #[inline]
    fn set_leaf(&self, word: u64, bits: u64) -> u64 {
        let leaf = &self.words[word as usize];
        let mut present = leaf.load(SeqCst);
        if present & bits != bits {
            present = leaf.fetch_or(bits, SeqCst);
        }
        bits & !present
    }

    /// Sets the bits `bits` of word `word` of level 1, if there is one, and the summaries above it.
    /// The words below have been written: see Ordering in the module above. Sets nothing if `bits`
    /// is 0.
    pub(super) fn insert_summary(&self, mut word: usize, mut bits: u64) {
        if bits == 0 {
            return;
        }
        for &(start, _) in &self.levels[1..] {
            self.or(start + word, bits);
            (word, bits) = (word >> SHIFT, 1 << (word & 63));
        }
    }

    /// Sets the bits of `mask` in a word; costs one load if they are already set.
    fn or(&self, index: usize, mask: u64) {
        let word = &self.words[index];
        if word.load(SeqCst) & mask != mask {
            word.fetch_or(mask, SeqCst);
        }
    }

    /// Sets bits `lo..=hi` of the level that starts at word `start`. Skips words that already have
    /// them.
    fn set_bits(&self, start: usize, lo: u64, hi: u64) {
        for (word, mask) in masks(lo, hi) {
            self.or(start + word as usize, mask);
        }
    }
}

/// Returns the number of set bits. Most marks set one bit. The test for at most one bit takes fewer
/// instructions than a count that is compiled for processors without POPCNT.
#[inline]
fn count(bits: u64) -> u64 {
    if bits & bits.wrapping_sub(1) == 0 { u64::from(bits != 0) } else { bits.count_ones().into() }
}
