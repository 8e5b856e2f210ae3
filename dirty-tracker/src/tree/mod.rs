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
//! are SeqCst: either the inserter sees the summary cleared and sets it again, or the drainer,
//! going down after its clear, sees the leaf. Summaries are looked at even when the bit was already
//! there: the other inserter may not have got to them yet (I1).
//!
//! The frames themselves are plain memory beside the tree. A caller writes to a frame, then marks
//! it; a drainer takes the mark, then reads the frame. A mark that finds its bit set stores nothing
//! that the drainer could acquire, so each side has a fence: a mark fences, then looks at the bit
//! (`fence_prior_writes`); every kind of drain fences after its last exchange
//! (`fence_later_reads`). Either the mark sees the bit cleared and sets it again, or the drainer's
//! reads see the write. SeqCst on the exchange alone does not order a later plain read: AArch64 may
//! do that read before the store of the exchange.
//!
//! Source: Radim Krcmar, KVM list, 5 May 2016, with bytes as nodes; here with 64-bit words.

mod cursor;
mod kernel;
#[cfg(not(any(driftline_loom, driftline_shuttle)))]
mod leaves;
mod parallel;
mod recent;
mod runs;
mod share;
mod sink;
mod slices;
#[cfg(test)]
mod tests;
mod walk;

use crate::sync::{self, AtomicU64, Mutex, Ordering::SeqCst};
use crate::{FrameRun, Gfn, Layout, OutOfSlot, SlotId};
pub use cursor::Cursor;
use kernel::Choice;
use recent::Recent;
pub use runs::RunLists;
use sink::{Frames, Runs, Sink, Stages};
pub use slices::Slices;
use walk::{Listed, Nowhere, Owned, Pending, Shared, Walk};

/// log2 of the arity.
const SHIFT: u32 = 6;
/// Runs over fewer leaf words are inserted word by word, and listed.
const FEW: u64 = 4;
/// 64^8 = 2^48 frames: more than the 2^40 of a guest, even if every slot pads its last word.
const MAX_LEVELS: usize = 8;

/// A word that is not zero and whose summary bit is not set, which I1 forbids: [`Tree::check`]
/// found a mistake in this crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("word {index} of tree level {level} is not zero, but its summary bit is not set")]
pub struct MissingSummary {
    /// The word's level; 0 are the leaves.
    pub level: usize,
    /// The word's number in its level.
    pub index: usize,
}

/// The system refused the address space of a tree: see [`Tree::new`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the system refuses {bytes} bytes of address space for the dirty bits of {frames} pages: raise \
     the limit of the process (ulimit -v), or set vm.overcommit_memory to 1"
)]
pub struct NoMemory {
    /// The frames of the layout.
    pub frames: u64,
    /// What [`Tree::reserved_bytes`] would have been.
    pub bytes: u64,
}

/// A set of the frames of a [`Layout`], as one allocation of packed levels: see the
/// [first page](crate#the-structure). Each call must get the layout that the tree was made for.
///
/// What takes `&self` may be called from many threads at once. What takes `&mut self` does the same
/// without atomic operations.
///
/// # Panics
/// A tree is made for a layout. Methods panic if they are given one with another number of leaf
/// words.
///
/// ```
/// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
///
/// let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?; // 4 GiB
/// let run = |start, count| FrameRun { start: Gfn(start), count };
/// let mut tree = Tree::new(&layout)?;
/// assert!(tree.mark(&layout, run(5, 1 << 20)).is_err(), "past the slot's end");
/// std::thread::scope(|threads| {
///     threads.spawn(|| tree.mark(&layout, run(600, 100)).unwrap());
///     threads.spawn(|| tree.mark(&layout, run(500, 100)).unwrap());
/// });
/// tree.mark_mut(&layout, run(7, 1))?;
/// assert_eq!(tree.count(), 201);
/// let mut runs = Vec::new();
/// assert_eq!(tree.drain(&layout, &mut runs), 201);
/// assert_eq!(runs, [run(7, 1), run(500, 200)]);
/// assert_eq!((tree.count(), tree.check()), (0, Ok(())));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Tree {
    words: Vec<AtomicU64>,
    /// First word of each level, and its length; level 0 first.
    levels: Vec<(usize, usize)>,
    kernel: Choice,
    scratch: Mutex<Scratch>,
    recent: Recent,
    /// Leaf words that are worth a thread of their own.
    share: usize,
}

/// What a walk needs besides the words; allocated with the tree, so that a drain allocates nothing.
#[derive(Debug)]
struct Scratch {
    pending: Vec<Pending>,
    stages: Box<Stages>,
}

impl Scratch {
    fn new(levels: usize) -> Self {
        let stages = Box::new(Stages::new());
        Self { pending: vec![Pending::EMPTY; levels], stages }
    }
}

impl Tree {
    /// Returns an empty tree over `layout`. One zeroed allocation, backed by memory as frames get
    /// dirty, and some 40 KiB for walks.
    ///
    /// # Errors
    /// The system refuses the address space.
    pub fn new(layout: &Layout) -> Result<Self, NoMemory> {
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
        let words = sync::zeroed_words(total)
            .ok_or(NoMemory { frames: layout.frames(), bytes: total as u64 * 8 })?;
        let scratch = Mutex::new(Scratch::new(levels.len()));
        let (kernel, recent) = (Choice::best(), Recent::new());
        Ok(Self { words, levels, kernel, scratch, recent, share: share::SHARE })
    }

    /// Bytes reserved for the levels: the leaves and at most 2 % more, from 4,096 leaf words (1 GiB
    /// of guest) on. Only what was ever dirty is backed by memory. O(1).
    ///
    /// ```
    /// # use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId, Tree};
    /// let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 3 << 30 }])?; // 12 TiB
    /// let bytes = Tree::new(&layout)?.reserved_bytes(); // takes no time, and no memory
    /// assert_eq!((layout.leaf_words() * 8, bytes), (402_653_184, 409_044_512));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reserved_bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    /// Catches a caller's mistake that would show only in frames that do not exist.
    fn belongs(&self, layout: &Layout) {
        let ours = self.levels[0].1 as u64;
        assert_eq!(layout.leaf_words(), ours, "words of this layout's leaves, and of this tree's");
    }

    /// Inserts a run of frames, which must lie in one slot; otherwise the error names the run, and
    /// nothing changes. From many threads at once. What the caller wrote to the frames before is
    /// seen by whoever drains them. A run of no frames is none.
    ///
    /// Costs a load for each word of 64 frames and its summaries, an atomic OR for each word that
    /// changes, and a look at the list of small epochs.
    pub fn mark(&self, layout: &Layout, run: FrameRun) -> Result<(), OutOfSlot> {
        self.belongs(layout);
        if run.count > 0 {
            self.insert(layout.bit_of_run(run)?, run.count);
        }
        Ok(())
    }

    /// As [`mark`](Self::mark), without atomic operations; stops at the first level where the bits'
    /// words were not zero, so mostly O(words of 64 frames).
    pub fn mark_mut(&mut self, layout: &Layout, run: FrameRun) -> Result<(), OutOfSlot> {
        self.belongs(layout);
        if run.count == 0 {
            return Ok(());
        }
        let first = layout.bit_of_run(run)?;
        if run.count == 1 {
            self.insert_bit_mut(first);
            return Ok(());
        }
        self.recent.left_out();
        let (mut lo, mut hi) = (first, first + run.count - 1);
        for &(start, _) in &self.levels {
            let mut was_there = true;
            for (word, mask) in masks(lo, hi) {
                was_there &= sync::or_mut(&mut self.words[start + word as usize], mask) != 0;
            }
            // I1: what was not zero has its summaries, and nobody is just setting them.
            if was_there {
                break;
            }
            (lo, hi) = (lo >> SHIFT, hi >> SHIFT);
        }
        Ok(())
    }

    fn insert_bit_mut(&mut self, mut bit: u64) {
        self.recent.left_out();
        for &(start, _) in &self.levels {
            let word = &mut self.words[start + (bit >> SHIFT) as usize];
            if sync::or_mut(word, 1 << (bit & 63)) != 0 {
                break;
            }
            bit >>= SHIFT;
        }
    }

    /// Sets leaf bits `first .. first + count`. The bits must lie in one slot of the layout.
    pub(crate) fn insert(&self, first: u64, count: u64) {
        if count <= 1 {
            self.insert_word(first >> SHIFT, count << (first & 63));
            return;
        }
        let (mut lo, mut hi) = (first, first + count - 1);
        if (hi >> SHIFT) - (lo >> SHIFT) < FEW {
            masks(lo, hi).for_each(|(word, bits)| {
                self.insert_word(word, bits);
            });
            return;
        }
        // Leaves with whole-word masks, then each summary level over the words below it.
        fence_prior_writes();
        for &(start, _) in &self.levels {
            self.set_bits(start, lo, hi);
            (lo, hi) = (lo >> SHIFT, hi >> SHIFT);
        }
        self.recent.left_out();
    }

    /// Sets the leaf bits `bits` of word `word`, which must lie in one slot of the layout. Returns
    /// those that were new.
    pub(crate) fn insert_word(&self, word: u64, bits: u64) -> u64 {
        if bits == 0 {
            return 0;
        }
        let new;
        if let Some(mut list) = self.recent.try_list() {
            new = self.insert_word_unlisted(word, bits);
            if list.add(word) {
                return new;
            }
        } else {
            new = self.insert_word_unlisted(word, bits);
        }
        self.recent.left_out();
        new
    }

    /// As [`insert_word`](Self::insert_word) of each, with one look at the list for all. Returns
    /// how many bits were new.
    pub(crate) fn insert_words(&self, words: &[(u64, u64)]) -> u64 {
        let mut list = self.recent.try_list();
        let mut listed = list.is_some();
        let mut new = 0;
        for (word, bits) in words {
            new += u64::from(self.insert_word_unlisted(*word, *bits).count_ones());
            listed = listed && list.as_mut().is_some_and(|list| list.add(*word));
        }
        drop(list);
        if !listed {
            self.recent.left_out();
        }
        new
    }

    fn insert_word_unlisted(&self, word: u64, bits: u64) -> u64 {
        let leaf = &self.words[word as usize];
        let mut there = leaf.load(SeqCst);
        if there & bits == bits {
            // Nothing to change, if it is still there for one who sees what the caller has written.
            fence_prior_writes();
            there = leaf.load(SeqCst);
        }
        if there & bits != bits {
            there = leaf.fetch_or(bits, SeqCst);
        }
        self.insert_summary((word >> SHIFT) as usize, 1 << (word & 63));
        bits & !there
    }

    /// Sets the bits `bits` of word `word` of level 1, if there is one, and the summaries above.
    /// What is below has been written: see Ordering above.
    fn insert_summary(&self, mut word: usize, mut bits: u64) {
        for &(start, _) in &self.levels[1..] {
            self.or(start + word, bits);
            (word, bits) = (word >> SHIFT, 1 << (word & 63));
        }
    }

    /// Sets the bits of `mask` in a word; one load if they are set.
    fn or(&self, index: usize, mask: u64) {
        let word = &self.words[index];
        if word.load(SeqCst) & mask != mask {
            word.fetch_or(mask, SeqCst);
        }
    }

    /// Checks I1 by walking the whole tree, and answers with the first word that breaks it. For
    /// tests; exact only while nobody inserts. O(words of the tree).
    pub fn check(&self) -> Result<(), MissingSummary> {
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
        for (word, mask) in masks(lo, hi) {
            self.or(start + word as usize, mask);
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
    /// one that overlaps it is in the result or still in the tree. Of two drains at once each frame
    /// is in one. Returns the number of frames.
    ///
    /// Costs a few loads and an exchange for each dirty word, wherever in the tree it is. Allocates
    /// only where `runs` has no more room, or two threads drain at once.
    pub fn drain(&self, layout: &Layout, runs: &mut Vec<FrameRun>) -> u64 {
        self.belongs(layout);
        let mut frames = 0;
        self.with_scratch(|pending, stages| {
            self.empty(pending, Runs::new(layout, runs, &mut frames, stages));
        });
        frames
    }

    /// As [`drain`](Self::drain), without atomic operations: several times as fast.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// let (mut tree, mut runs) = (Tree::new(&layout)?, Vec::new());
    /// tree.mark_mut(&layout, FrameRun { start: Gfn(9), count: 2 })?;
    /// assert_eq!(tree.drain_mut(&layout, &mut runs), 2);
    /// assert_eq!(runs, [FrameRun { start: Gfn(9), count: 2 }]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn drain_mut(&mut self, layout: &Layout, runs: &mut Vec<FrameRun>) -> u64 {
        self.belongs(layout);
        let mut frames = 0;
        let Scratch { pending, stages } = sync::get_mut(&mut self.scratch);
        let sink = Runs::new(layout, runs, &mut frames, stages);
        self.recent.begin();
        let words = Owned(&mut self.words);
        self.kernel.run(Walk { words, levels: &self.levels, roots: &[0], pending, sink });
        frames
    }

    /// As [`drain`](Self::drain), to single frames, ascending.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// # let mut tree = Tree::new(&layout)?;
    /// let mut frames = vec![Gfn(1)]; // stays
    /// tree.mark(&layout, FrameRun { start: Gfn(9), count: 2 })?;
    /// tree.drain_frames(&layout, &mut frames);
    /// assert_eq!(frames, [Gfn(1), Gfn(9), Gfn(10)]);
    /// tree.mark(&layout, FrameRun { start: Gfn(3), count: 1 })?;
    /// tree.drain_frames_mut(&layout, &mut frames);
    /// assert_eq!(frames.last(), Some(&Gfn(3)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn drain_frames(&self, layout: &Layout, frames: &mut Vec<Gfn>) {
        self.belongs(layout);
        self.with_scratch(|pending, stages| {
            self.empty(pending, Frames::new(layout, frames, stages));
        });
    }

    /// As [`drain_frames`](Self::drain_frames), without atomic operations.
    pub fn drain_frames_mut(&mut self, layout: &Layout, frames: &mut Vec<Gfn>) {
        self.belongs(layout);
        let Scratch { pending, stages } = sync::get_mut(&mut self.scratch);
        let sink = Frames::new(layout, frames, stages);
        self.recent.begin();
        let words = Owned(&mut self.words);
        self.kernel.run(Walk { words, levels: &self.levels, roots: &[0], pending, sink });
    }

    /// Empties the tree, as a drain to nowhere: costs what is in it, not what it could hold.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
    /// # let tree = Tree::new(&layout)?;
    /// tree.mark(&layout, FrameRun { start: Gfn(9), count: 2 })?;
    /// tree.clear();
    /// assert_eq!(tree.count(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn clear(&self) {
        self.with_scratch(|pending, _| self.empty(pending, Nowhere));
    }

    fn empty(&self, pending: &mut [Pending], sink: impl Sink) {
        let words = Shared(&self.words);
        match self.recent.complete() {
            Some(mut list) => {
                let pending = &mut pending[0];
                self.kernel.run(Listed { words, list: list.words(), pending, sink });
                list.drained();
            }
            None => {
                self.kernel.run(Walk { words, levels: &self.levels, roots: &[0], pending, sink })
            }
        }
        fence_later_reads();
    }

    /// Lends the scratch to `f`; of two drains at once the second makes its own.
    fn with_scratch(&self, f: impl FnOnce(&mut [Pending], &mut Stages)) {
        match sync::try_lock(&self.scratch) {
            Some(mut scratch) => {
                let Scratch { pending, stages } = &mut *scratch;
                f(pending, stages);
            }
            None => {
                let Scratch { mut pending, mut stages } = Scratch::new(self.levels.len());
                f(&mut pending, &mut stages);
            }
        }
    }

    /// The slot's leaves, word by word: its dirty bitmap as `KVM_GET_DIRTY_LOG` gives it. A load
    /// each; an error names a slot that does not exist.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0x100), frames: 130 }])?;
    /// # let tree = Tree::new(&layout)?;
    /// tree.mark(&layout, FrameRun { start: Gfn(0x100 + 63), count: 2 })?;
    /// assert_eq!(tree.leaves(&layout, SlotId(0))?.collect::<Vec<_>>(), [1 << 63, 1, 0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn leaves(
        &self,
        layout: &Layout,
        slot: SlotId,
    ) -> Result<impl ExactSizeIterator<Item = u64> + use<'_>, OutOfSlot> {
        let words = layout.placed_of(slot)?.range();
        Ok(self.words[words].iter().map(|word| word.load(SeqCst)))
    }
}

/// Orders the caller's writes to frames before a look at the tree that may find their bits set and
/// change nothing. Pairs with [`fence_later_reads`]. An exchange that sets a bit needs no such
/// fence.
fn fence_prior_writes() {
    sync::fence(SeqCst);
}

/// Orders the exchanges of a drain, by all of its threads, before the caller's reads of the frames
/// that it took. Pairs with [`fence_prior_writes`]; see Ordering above.
fn fence_later_reads() {
    sync::fence(SeqCst);
}

/// The words that hold bits `lo..=hi`, each with the mask of those bits.
fn masks(lo: u64, hi: u64) -> impl Iterator<Item = (u64, u64)> {
    let (first, last) = (lo >> SHIFT, hi >> SHIFT);
    (first..=last).map(move |word| {
        let from = if word == first { lo & 63 } else { 0 };
        let to = if word == last { hi & 63 } else { 63 };
        (word, (u64::MAX << from) & (u64::MAX >> (63 - to)))
    })
}

/// Which of up to 64 words are not zero.
fn nonzero(words: &[u64]) -> u64 {
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
fn ones(words: &[u64]) -> u64 {
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}
