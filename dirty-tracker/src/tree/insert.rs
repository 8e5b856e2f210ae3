//! Inserts a frame, a run, or the bits of a word, into a shared tree or by its only owner.

use super::structure::{Tree, fence_prior_writes};
use super::words::{SHIFT, masks};
use crate::sync::{self, Ordering::SeqCst};
use crate::{FrameRun, Layout, OutOfSlot};

/// Runs over fewer leaf words are inserted word by word, and listed.
const MAX_LISTED_RUN: u64 = 4;

impl Tree {
    /// Inserts a run of frames, which must lie in one slot. Many threads may insert at once. A
    /// thread that drains the frames sees what the caller wrote to them before. An empty run
    /// inserts nothing.
    ///
    /// Costs a load for each word of 64 frames and its summaries, an atomic OR for each word that
    /// changes, and one access to the list of small epochs.
    ///
    /// # Errors
    /// Returns an error that names the run if it does not lie in one slot. Nothing changes.
    pub fn mark(&self, layout: &Layout, run: FrameRun) -> Result<(), OutOfSlot> {
        self.assert_same_layout(layout);
        if run.count > 0 {
            self.insert(layout.bit_of_run(run)?, run.count);
        }
        Ok(())
    }

    /// As [`mark`](Self::mark), without atomic operations. It stops at the first level in which the
    /// words were not zero, so it usually costs O(words of 64 frames).
    ///
    /// # Errors
    /// Returns an error that names the run if it does not lie in one slot. Nothing changes.
    pub fn mark_mut(&mut self, layout: &Layout, run: FrameRun) -> Result<(), OutOfSlot> {
        self.assert_same_layout(layout);
        if run.count == 0 {
            return Ok(());
        }
        let first = layout.bit_of_run(run)?;
        if run.count == 1 {
            self.insert_bit_mut(first);
            return Ok(());
        }
        self.word_list.mark_incomplete();
        let (mut lo, mut hi) = (first, first + run.count - 1);
        for &(start, _) in &self.levels {
            let mut was_there = true;
            for (word, mask) in masks(lo, hi) {
                was_there &= sync::or_mut(&mut self.words[start + word as usize], mask) != 0;
            }
            // By I1 a word that was not zero has its summaries, and no other thread is about to set
            // them.
            if was_there {
                break;
            }
            (lo, hi) = (lo >> SHIFT, hi >> SHIFT);
        }
        Ok(())
    }

    fn insert_bit_mut(&mut self, mut bit: u64) {
        self.word_list.mark_incomplete();
        for &(start, _) in &self.levels {
            let word = &mut self.words[start + (bit >> SHIFT) as usize];
            if sync::or_mut(word, 1 << (bit & 63)) != 0 {
                break;
            }
            bit >>= SHIFT;
        }
    }

    /// Sets leaf bits `first .. first + count`, which must lie in one slot of the layout.
    pub(crate) fn insert(&self, first: u64, count: u64) {
        if count <= 1 {
            self.insert_word(first >> SHIFT, count << (first & 63));
            return;
        }
        let (mut lo, mut hi) = (first, first + count - 1);
        if (hi >> SHIFT) - (lo >> SHIFT) < MAX_LISTED_RUN {
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

    /// Sets the leaf bits `bits` of word `word`, which must lie in one slot of the layout. Returns
    /// the bits that were new.
    pub(crate) fn insert_word(&self, word: u64, bits: u64) -> u64 {
        if bits == 0 {
            return 0;
        }
        let new;
        if let Some(mut list) = self.word_list.try_list() {
            new = self.insert_word_unlisted(word, bits);
            if list.add(word) {
                return new;
            }
        } else {
            new = self.insert_word_unlisted(word, bits);
        }
        self.word_list.mark_incomplete();
        new
    }

    /// As [`insert_word`](Self::insert_word) for each word, with one access to the list for all.
    /// Returns the number of bits that were new.
    pub(crate) fn insert_words(&self, words: &[(u64, u64)]) -> u64 {
        let mut list = self.word_list.try_list();
        let mut listed = list.is_some();
        let mut new = 0;
        for (word, bits) in words {
            new += u64::from(self.insert_word_unlisted(*word, *bits).count_ones());
            listed = listed && list.as_mut().is_some_and(|list| list.add(*word));
        }
        drop(list);
        if !listed {
            self.word_list.mark_incomplete();
        }
        new
    }

    fn insert_word_unlisted(&self, word: u64, bits: u64) -> u64 {
        let leaf = &self.words[word as usize];
        let mut there = leaf.load(SeqCst);
        if there & bits == bits {
            // If the bits are still set after the fence, a drain that takes them later sees the
            // caller's writes, and nothing has to change.
            fence_prior_writes();
            there = leaf.load(SeqCst);
        }
        if there & bits != bits {
            there = leaf.fetch_or(bits, SeqCst);
        }
        self.insert_summary((word >> SHIFT) as usize, 1 << (word & 63));
        bits & !there
    }

    /// Sets the bits `bits` of word `word` of level 1, if there is one, and the summaries above it.
    /// The words below have been written: see Ordering in the module above.
    pub(super) fn insert_summary(&self, mut word: usize, mut bits: u64) {
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
