//! Frames on their way into trees, gathered by words: one insertion for many marks.

use crate::layout::PlacedSlot;
use crate::sync::Arc;
use crate::tree::Tree;

/// Number of words that are inserted together, 1 KiB: each tree is accessed once for as many marks.
/// `cargo bench -p driftline-dirty-tracker --all-features -- marks` measures it, in the row "a page
/// in every word of 64".
const GATHERED: usize = 64;

/// Words and their bits, in the order of their marks. The last `RECENT` words may still receive
/// bits.
#[derive(Debug)]
pub(crate) struct WordBatch<const RECENT: usize> {
    words: [(u64, u64); GATHERED],
    len: usize,
    /// Slot of the last mark.
    pub(crate) placed: Option<PlacedSlot>,
}

impl<const RECENT: usize> WordBatch<RECENT> {
    pub(crate) const EMPTY: Self = Self { words: [(0, 0); GATHERED], len: 0, placed: None };

    /// Adds bits of a leaf word. Returns whether there was room. The caller empties a full batch
    /// with [`take`](Self::take) and adds the bits again.
    #[inline]
    pub(crate) fn add(&mut self, word: u64, bits: u64) -> bool {
        for (other, other_bits) in self.words[..self.len].iter_mut().rev().take(RECENT) {
            if *other == word {
                *other_bits |= bits;
                return true;
            }
        }
        let Some(free) = self.words.get_mut(self.len) else { return false };
        *free = (word, bits);
        self.len += 1;
        true
    }

    /// Returns the words, and leaves the batch empty.
    pub(crate) fn take(&mut self) -> &[(u64, u64)] {
        let len = std::mem::take(&mut self.len);
        &self.words[..len]
    }
}

/// Inserts words into each of the trees. Returns the number of bits that were new, in the order of
/// the trees.
pub(crate) fn insert_into<'t>(
    words: &'t [(u64, u64)],
    trees: impl Iterator<Item = &'t Arc<Tree>> + 't,
) -> impl Iterator<Item = u64> + 't {
    trees.map(|tree| tree.insert_words(words))
}
