//! Operations on an entire tree by several threads while others insert: absorb a bitmap, drain,
//! count. Each thread has whole subtrees; `split.rs` splits the work.

use std::ops::Range;

use super::run_lists::RunLists;
use super::sink::RunWriter;
use super::split::{self, WorkSplit, distribute, sum};
use super::structure::{Tree, WalkScratch, fence_later_reads, fence_prior_writes};
use super::walk::{LEVEL_WORDS, ListedWords, TreeWalk};
use super::words::{SHIFT, SharedWords, nonzero, ones, set_bits_of};
use crate::sync::Ordering::SeqCst;
use crate::{OutOfSlot, SlotId};

/// The subtrees into which a tree is cut for a drain or a count.
struct Subtrees {
    level: usize,
    /// The words of that level that may not be zero, ascending.
    words: Vec<u64>,
    /// Ranges of consecutive words that a thread takes at a time, at most as many as a walk takes.
    /// Each range has about the same number of non-zero words one level below. Below one of those
    /// there may be up to 64 times as many words as below another.
    pieces: Vec<Range<usize>>,
    workers: usize,
}

impl Tree {
    /// Inserts the frames of a KVM dirty bitmap of `slot`: bit `i` of word `w` is frame `64 * w +
    /// i` of the slot. Returns the number of frames in the bitmap. Many threads may insert at the
    /// same time.
    ///
    /// Costs a load of each word, an atomic OR for each word that changes, and a load of the
    /// summaries for every 64 words. Several threads share bitmaps of at least 32 GiB of memory.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no such slot, or if the bitmap has bits past the slot's end; it
    /// names the first. Nothing is inserted.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId, Tree};
    /// let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0x100), frames: 100 }])?;
    /// let tree = Tree::new(layout)?;
    /// assert_eq!(tree.absorb_bitmap(SlotId(0), &[0b101, 1])?, 3);
    /// let past_the_end = tree.absorb_bitmap(SlotId(0), &[0, 1 << 36]).unwrap_err();
    /// let message = "frames 0x64..0x65 lie outside slot 0, which has 0x64 frames";
    /// assert_eq!(past_the_end.to_string(), message);
    /// assert!(tree.iter().map(|r| r.start.0).eq([0x100, 0x102, 0x140]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn absorb_bitmap(&self, slot: SlotId, bitmap: &[u64]) -> Result<u64, OutOfSlot> {
        let (placed, bitmap) = self.layout.checked_bitmap(slot, bitmap)?;
        Ok(self.absorb(placed.first_word as usize, bitmap))
    }

    /// As [`absorb_bitmap`](Self::absorb_bitmap), for words that were checked and that belong to
    /// the leaves from `first` on.
    pub(crate) fn absorb(&self, first: usize, bitmap: &[u64]) -> u64 {
        fence_prior_writes();
        let split = WorkSplit::of_leaves(bitmap.len(), self.grain);
        let pieces = aligned(first..first + bitmap.len(), split.piece);
        let frames = sum(split.workers, |counts| {
            distribute(counts, pieces, |frames, piece| {
                let groups = aligned(piece, 64);
                let absorb = |group: Range<usize>| {
                    self.absorb_group(group.start, &bitmap[group.start - first..group.end - first])
                };
                *frames += groups.map(absorb).sum::<u64>();
            });
        });
        if frames > 0 {
            self.word_list.mark_incomplete();
        }
        frames
    }

    /// Absorbs words below one summary.
    fn absorb_group(&self, first: usize, bits: &[u64]) -> u64 {
        let found = nonzero(bits);
        if found == 0 {
            return 0;
        }
        let leaves = &self.words[first..first + bits.len()];
        // First loads all words, without branches and without atomic operations that loads would
        // wait for.
        let new = leaves.iter().zip(bits).zip(0..).fold(0, |new, ((leaf, bits), place)| {
            new | u64::from(leaf.load(SeqCst) & bits != *bits) << place
        });
        set_bits_of(new).for_each(|word| {
            leaves[word].fetch_or(bits[word], SeqCst);
        });
        // All leaves are set before the first summary: see Ordering in the module above.
        self.insert_summary(first >> SHIFT, found << (first & 63));
        ones(bits)
    }

    /// As [`drain`](Self::drain), to lists that are presented as one. Their previous content is
    /// discarded, and their buffers are reused. Returns the number of frames.
    ///
    /// Several threads share the drain of a tree of at least two grains, if two grains of it are
    /// dirty: each has its own list. Such a tree allocates a list of its non-empty subtrees, and
    /// scratch memory for each thread, unless it drains a small epoch.
    pub(crate) fn drain_to_lists(&self, lists: &mut RunLists) -> u64 {
        if !split::CAN_SHARE || self.levels[0].1 < 2 * self.grain {
            lists.begin(1)[0].piece(0, |runs| self.drain_into(runs));
            return lists.finish(&self.layout);
        }
        let frames = self.drain_shared(lists);
        fence_later_reads();
        frames
    }

    fn drain_shared(&self, lists: &mut RunLists) -> u64 {
        let layout = &*self.layout;
        if let Some(mut list) = self.word_list.complete() {
            self.with_scratch(|pending, stages| {
                lists.begin(1)[0].piece(0, |runs| {
                    let mut frames = 0;
                    let sink = RunWriter::new(layout, runs, &mut frames, stages);
                    let (words, pending) = (SharedWords(&self.words), &mut pending[0]);
                    self.simd.run(ListedWords { words, list: list.words(), pending, sink });
                    frames
                });
            });
            list.drained();
            return lists.finish(layout);
        }
        // One thread clears the levels above the cut, from the top down, so before anything below
        // is loaded.
        let cut = self.cut(|word| match self.words[word].load(SeqCst) {
            0 => 0,
            _ => self.words[word].swap(0, SeqCst),
        });
        let levels = &self.levels[..=cut.level];
        let scratch = |list| (list, WalkScratch::new(levels.len()));
        let mut states: Vec<_> = lists.begin(cut.workers).iter_mut().map(scratch).collect();
        distribute(
            &mut states,
            cut.pieces.iter().enumerate(),
            |(list, scratch), (number, piece)| {
                list.piece(number, |runs| {
                    let mut frames = 0;
                    let WalkScratch { pending, stages } = scratch;
                    let sink = RunWriter::new(layout, runs, &mut frames, stages);
                    let (words, roots) = (SharedWords(&self.words), &cut.words[piece.clone()]);
                    self.simd.run(TreeWalk { words, levels, roots, pending, sink });
                    frames
                });
            },
        );
        lists.finish(layout)
    }

    /// Returns the number of frames in the tree. While other threads insert or drain, the result
    /// may be any number in between.
    ///
    /// Costs a load of each word that is not zero. Several threads share a large tree.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// # let tree = Tree::new(layout)?;
    /// tree.mark(FrameRun { start: Gfn(9), count: 500 })?;
    /// assert_eq!(tree.count(), 500);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn count(&self) -> u64 {
        let cut = self.cut(|word| self.words[word].load(SeqCst));
        let below = |word: &u64| self.count_below(cut.level, *word as usize);
        sum(cut.workers, |counts| {
            distribute(counts, cut.pieces.iter(), |frames, piece| {
                *frames += cut.words[piece.clone()].iter().map(below).sum::<u64>();
            });
        })
    }

    fn count_below(&self, level: usize, word: usize) -> u64 {
        let bits = self.words[self.levels[level].0 + word].load(SeqCst);
        let frames = |word: usize| u64::from(self.words[word].load(SeqCst).count_ones());
        match level {
            0 => u64::from(bits.count_ones()),
            // With many non-zero words, loading all 64 costs less than selecting them.
            1 if bits.count_ones() >= 16 => {
                let leaves = &self.words[word << SHIFT..self.levels[0].1];
                let mut row = [0; 64];
                row.iter_mut().zip(leaves).for_each(|(word, leaf)| *word = leaf.load(SeqCst));
                ones(&row)
            }
            1 => set_bits_of(bits).map(|bit| frames(word << SHIFT | bit)).sum(),
            _ => {
                set_bits_of(bits).map(|bit| self.count_below(level - 1, word << SHIFT | bit)).sum()
            }
        }
    }

    /// Cuts the tree at level 2, or lower if a grain is less than such a subtree. `read` loads or
    /// takes the summaries above the cut.
    fn cut(&self, read: impl Fn(usize) -> u64) -> Subtrees {
        let top = self.levels.len() - 1;
        let level = top.min((self.grain.ilog2() / SHIFT).min(2) as usize);
        let mut words = vec![0u64];
        for above in (level + 1..=top).rev() {
            let start = self.levels[above].0;
            let below = |&word: &u64| {
                set_bits_of(read(start + word as usize)).map(move |bit| word << SHIFT | bit as u64)
            };
            words = words.iter().flat_map(below).collect();
        }
        let start = self.levels[level].0;
        let bits = |word: &u64| self.words[start + *word as usize].load(SeqCst);
        let weight = |word: &u64| bits(word).count_ones() as usize;
        let split = WorkSplit::of(words.iter().map(weight).sum(), self.grain >> SHIFT);
        let (mut pieces, mut from, mut piece_weight) = (Vec::new(), 0, 0);
        for (at, word) in words.iter().enumerate() {
            let far = word - words[from] > u64::from(u32::MAX);
            if piece_weight >= split.piece || at - from == LEVEL_WORDS || far {
                pieces.push(std::mem::replace(&mut from, at)..at);
                piece_weight = 0;
            }
            piece_weight += weight(word);
        }
        if from < words.len() {
            pieces.push(from..words.len());
        }
        Subtrees { level, words, pieces, workers: split.workers }
    }
}

/// Splits `words` at every multiple of `size`.
fn aligned(words: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let mut at = words.start;
    std::iter::from_fn(move || {
        let end = ((at / size + 1) * size).min(words.end);
        (at < words.end).then(|| std::mem::replace(&mut at, end)..end)
    })
}

#[cfg(all(test, not(any(driftline_loom, driftline_shuttle))))]
mod tests;
