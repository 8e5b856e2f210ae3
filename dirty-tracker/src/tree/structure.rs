//! The tree itself: its levels, the scratch memory of walks, look-ups of single words, and the
//! fences.

use super::simd::SimdLevel;
use super::sink::Stages;
use super::split;
use super::walk::LevelBuffer;
use super::word_list::WordList;
use super::words::SHIFT;
use crate::sync::{self, Arc, AtomicU64, Mutex, Ordering::SeqCst};
use crate::{FrameRun, Gfn, Layout, OutOfSlot, SlotId};

/// 64^8 = 2^48 frames is more than the 2^40 of a guest, even if every slot pads its last word.
const MAX_LEVELS: usize = 8;

/// The system refused the address space of a tree, see [`Tree::new`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the system refuses {bytes} bytes of address space for the dirty bits of {frames} pages: raise \
     the limit of the process (ulimit -v), or set vm.overcommit_memory to 1"
)]
pub struct NoMemory {
    /// Number of frames in the layout.
    pub frames: u64,
    /// Bytes that the tree would have reserved, see [`Tree::reserved_bytes`].
    pub bytes: u64,
}

/// A set of frames of a [`Layout`], in one allocation of packed levels: see the [documentation of
/// the crate](crate#the-structure).
///
/// All methods take `&self` and may be called from many threads at the same time. The only owner of
/// a tree marks and drains it without atomic operations through [`exclusive`](Self::exclusive).
///
/// ```
/// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
///
/// let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?; // 4 GiB
/// let run = |start, count| FrameRun { start: Gfn(start), count };
/// let tree = Tree::new(layout)?;
/// assert!(tree.mark(run(5, 1 << 20)).is_err(), "past the slot's end");
/// std::thread::scope(|threads| {
///     threads.spawn(|| tree.mark(run(600, 100)).unwrap());
///     threads.spawn(|| tree.mark(run(500, 100)).unwrap());
/// });
/// tree.mark(run(7, 1))?;
/// assert!(tree.contains(Gfn(7)) && !tree.contains(Gfn(8)) && tree.count() == 201);
/// assert!(tree.iter().eq([run(7, 1), run(500, 200)]));
/// assert!(tree.drain().eq([run(7, 1), run(500, 200)]));
/// assert!(tree.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Tree {
    pub(super) layout: Arc<Layout>,
    pub(super) words: Vec<AtomicU64>,
    /// First word and length of each level; level 0 first.
    pub(super) levels: Vec<(usize, usize)>,
    pub(super) simd: SimdLevel,
    pub(super) scratch: Mutex<WalkScratch>,
    pub(super) word_list: WordList,
    /// Smallest number of leaf words for which a thread is worthwhile.
    pub(super) grain: usize,
}

/// Scratch memory of a walk. It is allocated with the tree, so that a drain allocates nothing.
#[derive(Debug)]
pub(super) struct WalkScratch {
    pub(super) pending: Vec<LevelBuffer>,
    pub(super) stages: Box<Stages>,
}

impl WalkScratch {
    pub(super) fn new(levels: usize) -> Self {
        let stages = Box::new(Stages::new());
        Self { pending: vec![LevelBuffer::EMPTY; levels], stages }
    }
}

impl Tree {
    /// Returns an empty tree over `layout`. It is one zeroed allocation, which the system backs as
    /// frames become dirty, and some 40 KiB for walks.
    ///
    /// # Errors
    ///
    /// Returns an error if the system refuses the address space.
    pub fn new(layout: impl Into<Arc<Layout>>) -> Result<Self, NoMemory> {
        let layout = layout.into();
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
        let scratch = Mutex::new(WalkScratch::new(levels.len()));
        let (simd, word_list) = (SimdLevel::best(), WordList::new());
        Ok(Self { layout, words, levels, simd, scratch, word_list, grain: split::GRAIN })
    }

    /// Returns the number of bytes reserved for the levels. From 4,096 leaf words (1 GiB of guest
    /// memory) on these are the leaves and at most 2 % more. Only words that were ever dirty are
    /// backed by memory. O(1).
    ///
    /// ```
    /// # use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId, Tree};
    /// let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 3 << 30 }; // 12 TiB
    /// let layout = Layout::new([slot])?;
    /// let tree = Tree::new(layout)?; // backs no memory
    /// assert_eq!(tree.layout().frames() / 8, 402_653_184); // the leaves: a bit for each frame
    /// assert_eq!(tree.reserved_bytes(), 409_044_512);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reserved_bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    /// Returns the layout of the tree.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Returns whether `gfn` is in the tree; false for a frame of no slot. O(log slots). A
    /// [`Cursor`](crate::Cursor) tests frames near one another in O(1).
    pub fn contains(&self, gfn: Gfn) -> bool {
        self.layout.bit_of_run(FrameRun { start: gfn, count: 1 }).is_ok_and(|bit| self.has(bit))
    }

    /// Returns whether leaf bit `bit` is set.
    pub(super) fn has(&self, bit: u64) -> bool {
        self.leaf(bit >> SHIFT) & (1 << (bit & 63)) != 0
    }

    /// Returns the first word that is not zero while its summary bit is clear, as its level and its
    /// index there. I1 forbids this.
    #[cfg(test)]
    pub(super) fn missing_summary(&self) -> Option<(usize, usize)> {
        self.levels.windows(2).enumerate().find_map(|(level, pair)| {
            let ((start, len), (above, _)) = (pair[0], pair[1]);
            let is_missing = |index: &usize| {
                let summary = self.words[above + (index >> SHIFT)].load(SeqCst);
                self.words[start + index].load(SeqCst) != 0 && summary >> (index & 63) & 1 == 0
            };
            (0..len).find(is_missing).map(|index| (level, index))
        })
    }

    pub(super) fn leaf(&self, word: u64) -> u64 {
        self.words[word as usize].load(SeqCst)
    }

    /// Calls `f` with the scratch memory. If two drains run at the same time, the second allocates
    /// its own.
    pub(super) fn with_scratch(&self, f: impl FnOnce(&mut [LevelBuffer], &mut Stages)) {
        match sync::try_lock(&self.scratch) {
            Some(mut scratch) => {
                let WalkScratch { pending, stages } = &mut *scratch;
                f(pending, stages);
            }
            None => {
                let WalkScratch { mut pending, mut stages } = WalkScratch::new(self.levels.len());
                f(&mut pending, &mut stages);
            }
        }
    }

    /// Returns the slot's leaves, word by word: its dirty bitmap in the form of
    /// `KVM_GET_DIRTY_LOG`. Costs a load for each word.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no such slot.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
    /// # let layout = Layout::new([Slot { id: SlotId(3), base: Gfn(0x100), frames: 130 }])?;
    /// # let tree = Tree::new(layout)?;
    /// tree.mark(FrameRun { start: Gfn(0x100 + 63), count: 2 })?;
    /// assert!(tree.bitmap(SlotId(3))?.eq([1 << 63, 1, 0]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn bitmap(
        &self,
        slot: SlotId,
    ) -> Result<impl ExactSizeIterator<Item = u64> + use<'_>, OutOfSlot> {
        let words = self.layout.placed_of(slot)?.range();
        Ok(self.words[words].iter().map(|word| word.load(SeqCst)))
    }
}

/// Orders the caller's writes to frames before a load of the tree that may find their bits set and
/// change nothing. Pairs with [`fence_later_reads`]. An exchange needs no such fence, whether it
/// sets a bit or finds it set.
pub(super) fn fence_prior_writes() {
    sync::fence(SeqCst);
}

/// Orders the exchanges of a drain, by all of its threads, before the caller's reads of the frames
/// that it took. Pairs with [`fence_prior_writes`]; see Ordering in the module above.
pub(super) fn fence_later_reads() {
    sync::fence(SeqCst);
}
