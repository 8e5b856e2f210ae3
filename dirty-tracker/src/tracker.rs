//! The tracker: one layout, any number of subscribers, one tree for each subscriber.
//!
//! Sources and the VMM *mark* frames. Each subscriber *drains* its own tree into dirty sets and is
//! independent of the other subscribers.
//!
//! # The cost of a mark
//! Devices mark one frame at a time, so such a mark must cost little. Without a subscriber it costs
//! a fence and two loads. With subscribers it takes a lock, if that is free, and adds a bit to a
//! batch of up to 64 words. A full batch is inserted into all trees in one call. Every read of a
//! tree inserts the batch first. The lock also orders the write before the mark and the read after
//! the drain, so that no fence is needed. A mark that finds the lock taken, and one of more than a
//! few words, goes to the trees directly. `cargo bench -p driftline-dirty-tracker --all-features --
//! marks` has the figures.
//!
//! # Locks
//! They are taken in this order: the batch, the state, a subscriber's tree. No thread waits for
//! others (of a rayon pool) while it holds one. Threads that wait for the batch yield to the
//! scheduler, so they must not have a real-time priority above the threads that mark.

use crate::batch::{self, WordBatch};
use crate::subscriber::Subscriber;
use crate::sync::{
    self, Arc, AtomicU64, AtomicUsize, BriefMutex, Ordering, RwLock, RwLockReadGuard,
};
use crate::tree::{NoMemory, Tree, masks, ones};
use crate::{FrameRun, Gfn, Layout, OutOfSlot, PageSize, SlotId};

/// All subscribers' trees. Any number of threads can mark frames in them.
///
/// Nothing is marked, and nothing is checked, while there is no subscriber.
///
/// ```
/// use std::sync::Arc;
/// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tracker};
///
/// let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0x100), frames: 1000 }])?;
/// let tracker = Arc::new(Tracker::new(layout));
/// tracker.mark_offset(SlotId(0), 1)?; // no subscriber yet: not recorded
/// let mut migration = tracker.subscribe("migration")?;
/// tracker.mark_offset(SlotId(0), 2)?;
/// tracker.mark(FrameRun { start: Gfn(0x110), count: 4 })?;
/// assert_eq!(tracker.absorb_bitmap(SlotId(0), &[0b101])?, 2);
/// assert!(tracker.contains(Gfn(0x113)) && !tracker.contains(Gfn(0x101)));
/// let runs: Vec<String> = migration.drain().runs().map(|run| run.to_string()).collect();
/// assert_eq!(runs, ["gfn 0x100..0x101", "gfn 0x102..0x103", "gfn 0x110..0x114"]);
///
/// tracker.mark_all(); // the source may have missed a write
/// assert_eq!(migration.drain().frames(), tracker.layout().frames());
/// let stats = tracker.stats();
/// assert_eq!((stats.marked_frames, stats.marked_all), (1 + 4 + 2 + 1000, 1));
/// drop(migration);
/// assert_eq!((tracker.subscribers(), tracker.stats().tree_bytes), (0, 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Tracker {
    state: RwLock<TrackerState>,
    /// The number of subscribers, so that a mark costs little while there is none.
    active: AtomicUsize,
    gathered: BriefMutex<GatheredMarks>,
    stats: TrackerCounters,
}

/// The layout and the subscribers. `change` replaces both together.
#[derive(Debug, Clone)]
pub(crate) struct TrackerState {
    pub(crate) layout: Arc<Layout>,
    pub(crate) members: Arc<[SubscriberTree]>,
}

/// A subscriber, and its tree for the layout of the state.
#[derive(Debug, Clone)]
pub(crate) struct SubscriberTree {
    pub(crate) subscriber: Arc<Subscriber>,
    pub(crate) tree: Arc<Tree>,
}

impl TrackerState {
    fn trees(&self) -> impl Iterator<Item = &Arc<Tree>> {
        self.members.iter().map(|member| &member.tree)
    }
}

/// Marks that are not in the trees yet, and a copy of the state.
#[derive(Debug)]
struct GatheredMarks {
    state: TrackerState,
    batch: WordBatch<QUEUE_WORDS>,
    marked: u64,
}

/// Number of words that a device marks in turn: those of a queue's rings and of a buffer.
const QUEUE_WORDS: usize = 3;

/// Frames of the longest run that is gathered.
const MAX_GATHERED_RUN: u64 = 4 * 64;

impl GatheredMarks {
    /// Adds a frame to the batch, if there is room and the frame lies in the slot of the last mark.
    /// Returns whether it did.
    #[inline]
    fn gather(&mut self, gfn: Gfn) -> bool {
        let bit = self.batch.placed.as_ref().and_then(|placed| placed.bit_in(gfn));
        let added = bit.is_some_and(|bit| self.batch.add(bit >> 6, 1 << (bit & 63)));
        self.marked += u64::from(added);
        added
    }

    fn mark(&mut self, run: FrameRun, stats: &TrackerCounters) -> Result<(), OutOfSlot> {
        let placed = match self.batch.placed {
            Some(placed) if placed.has(run) => placed,
            _ => {
                let placed = *self.state.layout.placed_around(run)?;
                self.batch.placed = Some(placed);
                placed
            }
        };
        self.marked += run.count;
        let first = placed.bit_of(run.start);
        masks(first, first + run.count - 1).for_each(|(word, bits)| self.add(word, bits, stats));
        Ok(())
    }

    fn add(&mut self, word: u64, bits: u64, stats: &TrackerCounters) {
        if !self.batch.add(word, bits) {
            self.flush(stats);
            self.batch.add(word, bits);
        }
    }

    /// Inserts the gathered marks into all trees.
    fn flush(&mut self, stats: &TrackerCounters) {
        let words = self.batch.take();
        if !words.is_empty() {
            let marked = std::mem::take(&mut self.marked);
            stats.marked_frames.fetch_add(marked, Ordering::Relaxed);
            batch::insert_into(words, self.state.trees()).for_each(drop);
        }
    }
}

#[derive(Debug, Default)]
struct TrackerCounters {
    marked_frames: AtomicU64,
    marked_all: AtomicU64,
    outside: AtomicU64,
}

/// Counters of a tracker since its creation. Example at [`Tracker`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TrackerStats {
    /// Current number of subscribers.
    pub subscribers: u64,
    /// Frames marked by sources and by the VMM while there was a subscriber. A frame that is marked
    /// twice counts twice, unless one word of a batch has both marks.
    pub marked_frames: u64,
    /// Number of times that all memory was marked together: overruns and requests.
    pub marked_all: u64,
    /// Number of marks by the VMM outside the layout, each of which marked all memory instead. Any
    /// is a bug in the VMM.
    pub marks_outside: u64,
    /// Bytes reserved for trees, see [`Tree::reserved_bytes`](crate::Tree::reserved_bytes).
    pub tree_bytes: u64,
}

impl Tracker {
    /// Creates a tracker over `layout` without subscribers. It has no trees, so this is O(1).
    pub fn new(layout: impl Into<Arc<Layout>>) -> Self {
        let state = TrackerState { layout: layout.into(), members: Arc::new([]) };
        Self {
            gathered: BriefMutex::new(GatheredMarks {
                state: state.clone(),
                batch: WordBatch::EMPTY,
                marked: 0,
            }),
            state: RwLock::new(state),
            active: AtomicUsize::new(0),
            stats: TrackerCounters::default(),
        }
    }

    /// Returns the layout of the tracked memory.
    pub fn layout(&self) -> Arc<Layout> {
        sync::read(&self.state).layout.clone()
    }

    /// Changes the layout: memory was added, removed or moved to another slot. Every subscriber
    /// keeps what is dirty, by frame number. Frames that the new layout does not have are
    /// discarded, also from dirty sets that are given back later. Frames that are new are clean: a
    /// caller that needs their content marks them.
    ///
    /// Other threads may mark and drain meanwhile. But KVM names frames by slot, so the caller
    /// inserts what it has [harvested](crate::ring::Harvester) before it changes the meaning of a
    /// slot's number. Costs a drain of each tree and an insert for each run of dirty frames.
    ///
    /// # Errors
    ///
    /// Returns an error if the size of a frame differs, or if the system refuses the address space
    /// of a tree. Nothing changes.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tracker};
    /// let slot = |id, base, frames| Slot { id: SlotId(id), base: Gfn(base), frames };
    /// let (ram, dimm) = (slot(0, 0, 1000), slot(1, 4096, 1000));
    /// let tracker = Arc::new(Tracker::new(Layout::new([ram])?));
    /// let mut migration = tracker.subscribe("migration")?;
    /// tracker.mark(FrameRun { start: Gfn(7), count: 1 })?;
    ///
    /// tracker.relayout(Layout::new([ram, dimm])?)?; // memory was plugged
    /// tracker.mark(FrameRun { start: Gfn(4096), count: 2 })?;
    /// assert_eq!(migration.count(), 1 + 2);
    ///
    /// tracker.relayout(Layout::new([ram])?)?; // and unplugged
    /// assert_eq!(migration.drain().runs().last(), Some(FrameRun { start: Gfn(7), count: 1 }));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn relayout(&self, layout: impl Into<Arc<Layout>>) -> Result<(), RelayoutError> {
        let layout = layout.into();
        self.change(|state| {
            let (from, to) = (state.layout.page_size(), layout.page_size());
            if from != to {
                return Err(RelayoutError::PageSize { from, to });
            }
            let trees = state.members.iter().map(|_| Tree::new(layout.clone()).map(Arc::new));
            let trees = trees.collect::<Result<Vec<_>, _>>()?;
            let moved = state.members.iter().zip(trees).map(|(member, tree)| {
                // Marks and drains that have the old tree find the new one when this is released.
                let mut current = member.subscriber.lock_tree();
                tree.mark_parts(current.drain());
                *current = tree.clone();
                SubscriberTree { subscriber: member.subscriber.clone(), tree }
            });
            *state = TrackerState { members: moved.collect(), layout };
            Ok(())
        })
    }

    /// Changes the state while no mark is gathered and no batch is open.
    pub(crate) fn change<R, E>(
        &self,
        change: impl FnOnce(&mut TrackerState) -> Result<R, E>,
    ) -> Result<R, E> {
        let mut gathered = sync::lock_brief(&self.gathered);
        gathered.flush(&self.stats);
        let mut state = sync::write(&self.state);
        let result = change(&mut state)?;
        self.active.store(state.members.len(), Ordering::SeqCst);
        gathered.state = state.clone();
        gathered.batch = WordBatch::EMPTY;
        Ok(result)
    }

    /// Returns the number of subscribers. Costs one load.
    pub fn subscribers(&self) -> usize {
        self.active.load(Ordering::SeqCst)
    }

    /// Returns whether there is a subscriber, so that a mark must be recorded.
    #[inline]
    fn is_watched(&self) -> bool {
        // A mark that sees a subscriber takes a lock that `subscribe` takes, too. One that sees
        // none is ordered after the caller's writes by the fence: pairs with that of `subscribe`.
        self.active.load(Ordering::SeqCst) != 0 || {
            sync::fence(Ordering::SeqCst);
            self.active.load(Ordering::SeqCst) != 0
        }
    }

    /// Marks a run of frames, which must lie in one slot. An empty run marks nothing. Costs some
    /// nanoseconds for a frame, and O(words of 64 frames) in each tree for a long run.
    ///
    /// # Errors
    ///
    /// Returns an error that names the run if it does not lie in one slot. Nothing is marked.
    #[inline]
    pub fn mark(&self, run: FrameRun) -> Result<(), OutOfSlot> {
        // Only these checks are inlined: most guests have no subscriber most of the time.
        if run.count == 0 || !self.is_watched() || run.count == 1 && self.gather(run.start) {
            return Ok(());
        }
        self.mark_watched(run)
    }

    /// Gathers the mark of a frame, if that needs neither the layout nor the trees. Returns whether
    /// it did.
    fn gather(&self, gfn: Gfn) -> bool {
        sync::try_lock_brief(&self.gathered).is_some_and(|mut gathered| gathered.gather(gfn))
    }

    fn mark_watched(&self, run: FrameRun) -> Result<(), OutOfSlot> {
        if run.count <= MAX_GATHERED_RUN {
            if let Some(mut gathered) = sync::try_lock_brief(&self.gathered) {
                return gathered.mark(run, &self.stats);
            }
        }
        self.mark_now(&sync::read(&self.state), run)
    }

    fn mark_now(&self, state: &TrackerState, run: FrameRun) -> Result<(), OutOfSlot> {
        let bit = state.layout.bit_of_run(run)?;
        self.stats.marked_frames.fetch_add(run.count, Ordering::Relaxed);
        state.trees().for_each(|tree| tree.insert(bit, run.count));
        Ok(())
    }

    /// Marks a frame in KVM's terms, slot and offset in frames, as the iterators of other crates
    /// over a dirty ring return it. Costs O(log slots) and one insert in each tree. A
    /// [`Harvester`](crate::ring::Harvester) marks many frames in one call, and costs less.
    ///
    /// # Errors
    ///
    /// Returns an error that names slot and offset if there is no such slot, or if the slot is
    /// shorter.
    pub fn mark_offset(&self, slot: SlotId, offset: u64) -> Result<(), OutOfSlot> {
        if !self.is_watched() {
            return Ok(());
        }
        let state = sync::read(&self.state);
        let base = state.layout.placed_with(slot, offset)?.slot.base;
        self.mark_now(&state, FrameRun { start: Gfn(base.0 + offset), count: 1 })
    }

    /// Inserts the gathered marks into all trees, so that they are complete.
    pub(crate) fn flush(&self) {
        sync::lock_brief(&self.gathered).flush(&self.stats);
    }

    /// Marks every frame of every slot (I6). Writes every leaf of each tree: 1/32,768 of guest
    /// memory.
    pub fn mark_all(&self) {
        self.stats.marked_all.fetch_add(1, Ordering::Relaxed);
        if self.is_watched() {
            let state = sync::read(&self.state);
            for slot in state.layout.slots() {
                // Cannot fail: the run is that of a slot.
                let _ = self.mark_now(&state, slot.run());
            }
        }
    }

    /// Marks every frame instead of one that the layout does not have. Returns how often this
    /// happened before.
    #[cfg(feature = "vm-memory")]
    pub(crate) fn mark_outside(&self) -> u64 {
        self.mark_all();
        self.stats.outside.fetch_add(1, Ordering::Relaxed)
    }

    /// Marks the frames of a KVM dirty bitmap of `slot`: bit `i` of word `w` is frame `64 * w + i`.
    /// Returns the number of frames. Several threads share the work on a large bitmap (see
    /// [`Tree::absorb_bitmap`](crate::Tree::absorb_bitmap)).
    ///
    /// # Errors
    ///
    /// Returns an error if there is no such slot, or if the bitmap has bits past the slot's end.
    /// Nothing is marked.
    pub fn absorb_bitmap(&self, slot: SlotId, bitmap: &[u64]) -> Result<u64, OutOfSlot> {
        let state = sync::read(&self.state).clone();
        let (placed, bitmap) = state.layout.checked_bitmap(slot, bitmap)?;
        let mut absorbed = None;
        for member in state.members.iter() {
            member.subscriber.with_tree(|tree| {
                if Arc::ptr_eq(tree.layout(), &state.layout) {
                    absorbed = Some(tree.absorb(placed.first_word as usize, bitmap));
                } else {
                    // The layout has changed meanwhile, and with it perhaps the slot.
                    tree.mark_bitmap_of(placed.slot, bitmap);
                }
            });
        }
        let frames = absorbed.unwrap_or_else(|| ones(bitmap));
        if !state.members.is_empty() {
            self.stats.marked_frames.fetch_add(frames, Ordering::Relaxed);
        }
        Ok(frames)
    }

    /// Returns whether `gfn` is marked in any subscriber's tree; false for a frame of no slot.
    /// Costs a lock and one load for each subscriber.
    pub fn contains(&self, gfn: Gfn) -> bool {
        self.flush();
        sync::read(&self.state).trees().any(|tree| tree.contains(gfn))
    }

    /// Returns the counters since the creation of the tracker. Costs a few loads.
    pub fn stats(&self) -> TrackerStats {
        self.flush();
        let state = sync::read(&self.state);
        TrackerStats {
            subscribers: state.members.len() as u64,
            marked_frames: self.stats.marked_frames.load(Ordering::Relaxed),
            marked_all: self.stats.marked_all.load(Ordering::Relaxed),
            marks_outside: self.stats.outside.load(Ordering::Relaxed),
            tree_bytes: state.trees().map(|tree| tree.reserved_bytes()).sum(),
        }
    }

    /// Starts a batch of marks under one lock.
    pub(crate) fn marking(&self) -> MarkBatch<'_> {
        self.flush();
        let state = sync::read(&self.state);
        MarkBatch { tracker: self, state, batch: WordBatch::EMPTY, new: 0 }
    }
}

/// The reason why a layout cannot replace another, see [`Tracker::relayout`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RelayoutError {
    /// The frames of the two layouts differ in size.
    #[error(
        "a layout of frames of {} bytes cannot replace one of frames of {} bytes",
        to.bytes(), from.bytes()
    )]
    PageSize {
        /// Size of the tracker's frames.
        from: PageSize,
        /// Size of the new layout's frames.
        to: PageSize,
    },
    /// The system refused the address space of a tree.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

/// A batch of marks. It locks the state once, remembers the last slot, merges frames of one word,
/// and gathers words before it inserts them. Dropping it inserts the remaining words.
pub(crate) struct MarkBatch<'t> {
    tracker: &'t Tracker,
    state: RwLockReadGuard<'t, TrackerState>,
    batch: WordBatch<1>,
    /// Frames that were new, see [`take_new`](Self::take_new).
    new: u64,
}

impl MarkBatch<'_> {
    /// As [`Tracker::mark_offset`].
    pub(crate) fn mark_offset(&mut self, slot: SlotId, offset: u64) -> Result<(), OutOfSlot> {
        let placed = match self.batch.placed {
            Some(placed) if placed.slot.id == slot && offset < placed.slot.frames => placed,
            _ => {
                let placed = *self.state.layout.placed_with(slot, offset)?;
                self.batch.placed = Some(placed);
                placed
            }
        };
        let bit = placed.first_word * 64 + offset;
        let (word, bits) = (bit >> 6, 1 << (bit & 63));
        if !self.batch.add(word, bits) {
            self.flush();
            self.batch.add(word, bits);
        }
        Ok(())
    }

    /// Inserts the gathered words. Returns how many frames since the last call were new to a
    /// subscriber. Each group of gathered words counts the frames of the subscriber to which most
    /// were new. Passive subscribers count only if there are no others.
    pub(crate) fn take_new(&mut self) -> u64 {
        self.flush();
        std::mem::take(&mut self.new)
    }

    fn flush(&mut self) {
        let words = self.batch.take();
        if self.state.members.is_empty() || words.is_empty() {
            return;
        }
        let count = words.iter().map(|(_, bits)| u64::from(bits.count_ones())).sum();
        self.tracker.stats.marked_frames.fetch_add(count, Ordering::Relaxed);
        let (mut new, mut new_to_passive) = (None, 0);
        let inserted = batch::insert_into(words, self.state.trees());
        for (member, inserted) in self.state.members.iter().zip(inserted) {
            match member.subscriber.passive.load(Ordering::Relaxed) {
                false => new = new.max(Some(inserted)),
                true => new_to_passive = new_to_passive.max(inserted),
            }
        }
        self.new += new.unwrap_or(new_to_passive);
    }
}

impl Drop for MarkBatch<'_> {
    fn drop(&mut self) {
        self.flush();
    }
}
