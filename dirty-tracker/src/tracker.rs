//! The tracker: one layout, any number of subscribers, one tree for each subscriber.
//!
//! Sources and the VMM *mark* frames. Each subscriber *drains* its own tree into dirty sets and is
//! independent of the other subscribers. Without a subscriber a mark costs one load.

use crate::layout::Placed;
use crate::subscriber_tree::SubscriberTree;
use crate::sync::{self, Arc, AtomicU64, AtomicUsize, Ordering, RwLock, RwLockReadGuard};
use crate::{DirtySet, FrameRun, Gfn, Layout, MissingSummary, NoMemory, OutOfSlot, Slices, SlotId};

/// All subscribers' trees. Any number of threads can mark frames in them.
///
/// A mark takes a lock for reading, then costs one insert in each tree. Only subscribing and
/// unsubscribing take the lock for writing.
///
/// ```
/// use std::sync::Arc;
/// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tracker};
///
/// let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0x100), frames: 1000 }])?;
/// let tracker = Arc::new(Tracker::new(layout));
/// tracker.mark_offset(SlotId(0), 1)?; // no subscriber yet: forgotten
/// let mut migration = tracker.subscribe("migration")?;
/// tracker.mark_offset(SlotId(0), 2)?;
/// tracker.mark(FrameRun { start: Gfn(0x110), count: 4 })?;
/// assert_eq!(tracker.absorb_bitmap(SlotId(0), &[0b101])?, 2);
/// assert!(tracker.is_marked(Gfn(0x113)) && !tracker.is_marked(Gfn(0x101)));
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
    layout: Arc<Layout>,
    subscribers: RwLock<Arc<[Arc<SubscriberTree>]>>,
    /// The length of `subscribers`, so that a mark costs nothing while there is no subscriber.
    active: AtomicUsize,
    stats: Counters,
}

#[derive(Debug, Default)]
struct Counters {
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
    /// Number of times that all memory was marked at once: overruns and requests.
    pub marked_all: u64,
    /// Number of marks by the VMM outside the layout, each of which marked all memory instead. Any
    /// is a bug in the VMM.
    #[cfg_attr(feature = "serde", serde(default))]
    pub marks_outside: u64,
    /// Bytes reserved for trees, see [`Tree::reserved_bytes`](crate::Tree::reserved_bytes).
    pub tree_bytes: u64,
}

impl Tracker {
    /// Creates a tracker over `layout` without subscribers. It has no trees, so this is O(1).
    pub fn new(layout: Layout) -> Self {
        Self {
            layout: Arc::new(layout),
            subscribers: RwLock::new(Arc::new([])),
            active: AtomicUsize::new(0),
            stats: Counters::default(),
        }
    }

    /// Returns the layout of the tracked memory.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Adds a subscriber with an empty tree. `name` is for logs and statistics.
    ///
    /// Its first drain returns the frames marked from now on. The source must already track writes
    /// when the caller begins to read memory. Costs a [`Tree::new`](crate::Tree::new).
    ///
    /// # Errors
    /// Returns an error if [`Tree::new`](crate::Tree::new) does. The other subscribers are
    /// unaffected.
    pub fn subscribe(self: &Arc<Self>, name: impl Into<String>) -> Result<Subscription, NoMemory> {
        let subscriber = Arc::new(SubscriberTree::new(name.into(), self.layout.clone())?);
        let mut subscribers = sync::write(&self.subscribers);
        *subscribers = subscribers.iter().chain([&subscriber]).cloned().collect();
        self.active.store(subscribers.len(), Ordering::SeqCst);
        drop(subscribers);
        // Orders the caller's later reads of memory behind the store above: pairs with the fence of
        // `mark_bits`.
        sync::fence(Ordering::SeqCst);
        Ok(Subscription { subscriber, tracker: self.clone(), slices: Slices::default() })
    }

    /// Returns the number of subscribers. Costs one load.
    pub fn subscribers(&self) -> usize {
        self.active.load(Ordering::SeqCst)
    }

    /// Marks a run of frames, which must lie in one slot. An empty run marks nothing. Costs one
    /// insert in each tree, O(words of 64 frames).
    ///
    /// # Errors
    /// Returns an error that names the run if it does not lie in one slot. Nothing is marked.
    pub fn mark(&self, run: FrameRun) -> Result<(), OutOfSlot> {
        if run.count == 0 {
            return Ok(());
        }
        let bit = self.layout.bit_of_run(run)?;
        self.mark_bits(bit, run.count);
        Ok(())
    }

    /// Marks a frame in KVM's terms: slot, and offset in frames. Costs O(log slots) and one insert
    /// in each tree.
    ///
    /// # Errors
    /// Returns an error that names slot and offset if there is no such slot, or if the slot is
    /// shorter.
    pub fn mark_offset(&self, slot: SlotId, offset: u64) -> Result<(), OutOfSlot> {
        let bit = self.layout.bit_of_offset(slot, offset)?;
        self.mark_bits(bit, 1);
        Ok(())
    }

    /// Marks every frame of every slot (I6). Writes every leaf of each tree: 1/32,768 of guest
    /// memory.
    pub fn mark_all(&self) {
        self.stats.marked_all.fetch_add(1, Ordering::Relaxed);
        for p in self.layout.placed() {
            self.mark_bits(p.first_word * 64, p.slot.frames);
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
    /// Returns an error if there is no such slot, or if the bitmap has bits past the slot's end.
    /// Nothing is marked.
    pub fn absorb_bitmap(&self, slot: SlotId, bitmap: &[u64]) -> Result<u64, OutOfSlot> {
        let (placed, bitmap) = self.layout.checked_bitmap(slot, bitmap)?;
        // The lock is released first: a pool thread that waits for others may run a task that takes
        // it.
        let subscribers = sync::read(&self.subscribers).clone();
        let first = placed.first_word as usize;
        let all = subscribers
            .iter()
            .fold(None, |_, subscriber| Some(subscriber.tree.absorb(first, bitmap)));
        let Some(frames) = all else {
            return Ok(bitmap.iter().map(|bits| u64::from(bits.count_ones())).sum());
        };
        self.stats.marked_frames.fetch_add(frames, Ordering::Relaxed);
        Ok(frames)
    }

    /// Returns whether `gfn` is marked in any subscriber's tree; false for a frame of no slot.
    /// Costs one load for each subscriber.
    pub fn is_marked(&self, gfn: Gfn) -> bool {
        let run = FrameRun { start: gfn, count: 1 };
        let Ok(bit) = self.layout.bit_of_run(run) else { return false };
        let subscribers = sync::read(&self.subscribers);
        subscribers.iter().any(|s| s.tree.contains(bit))
    }

    /// Returns the counters since the creation of the tracker. Costs a few loads.
    pub fn stats(&self) -> TrackerStats {
        let subscribers = sync::read(&self.subscribers);
        TrackerStats {
            subscribers: subscribers.len() as u64,
            marked_frames: self.stats.marked_frames.load(Ordering::Relaxed),
            marked_all: self.stats.marked_all.load(Ordering::Relaxed),
            marks_outside: self.stats.outside.load(Ordering::Relaxed),
            tree_bytes: subscribers.iter().map(|s| s.tree.reserved_bytes()).sum(),
        }
    }

    /// Starts a batch of marks under one lock.
    pub(crate) fn marking(&self) -> Marking<'_> {
        let subscribers = sync::read(&self.subscribers);
        Marking {
            tracker: self,
            subscribers,
            slot: None,
            words: [(0, 0); GATHERED],
            len: 0,
            new: 0,
        }
    }

    fn mark_bits(&self, first: u64, count: u64) {
        // Orders the caller's writes before the load of the number of subscribers: pairs with the
        // fence of `subscribe`. `Marking` needs no fence, because it takes the lock that
        // `subscribe` takes.
        sync::fence(Ordering::SeqCst);
        if self.active.load(Ordering::SeqCst) == 0 {
            return;
        }
        self.stats.marked_frames.fetch_add(count, Ordering::Relaxed);
        for subscriber in sync::read(&self.subscribers).iter() {
            subscriber.tree.insert(first, count);
        }
    }
}

/// A batch of marks. It locks the subscribers once, remembers the last slot, merges frames of one
/// word, and gathers words before it inserts them. Dropping it inserts the remaining words.
pub(crate) struct Marking<'t> {
    tracker: &'t Tracker,
    subscribers: RwLockReadGuard<'t, Arc<[Arc<SubscriberTree>]>>,
    slot: Option<Placed>,
    /// Words and their bits. The last word may still receive bits.
    words: [(u64, u64); GATHERED],
    len: usize,
    /// Frames that were new, see [`take_new`](Self::take_new).
    new: u64,
}

/// Number of words that are inserted together.
const GATHERED: usize = 64;

impl Marking<'_> {
    /// As [`Tracker::mark_offset`].
    pub(crate) fn mark_offset(&mut self, slot: SlotId, offset: u64) -> Result<(), OutOfSlot> {
        let bit = match self.slot {
            Some(p) if p.slot.id == slot && offset < p.slot.frames => p.first_word * 64 + offset,
            _ => {
                let bit = self.tracker.layout.bit_of_offset(slot, offset)?;
                self.slot = self.tracker.layout.placed_by_id(slot).copied();
                bit
            }
        };
        self.insert_word(bit >> 6, 1 << (bit & 63));
        Ok(())
    }

    fn insert_word(&mut self, word: u64, bits: u64) {
        match self.words[..self.len].last_mut() {
            Some((last, there)) if *last == word => *there |= bits,
            _ => {
                if self.len == GATHERED {
                    self.flush();
                }
                self.words[self.len] = (word, bits);
                self.len += 1;
            }
        }
    }

    /// Inserts the gathered words. Returns how many frames since the last call were new to a
    /// subscriber. Each group of gathered words counts the frames of the subscriber to which most
    /// were new. Passive subscribers count only if there are no others.
    pub(crate) fn take_new(&mut self) -> u64 {
        self.flush();
        std::mem::take(&mut self.new)
    }

    fn flush(&mut self) {
        let words = &self.words[..self.len];
        self.len = 0;
        if self.subscribers.is_empty() || words.is_empty() {
            return;
        }
        let count = words.iter().map(|(_, bits)| u64::from(bits.count_ones())).sum();
        self.tracker.stats.marked_frames.fetch_add(count, Ordering::Relaxed);
        let (mut new, mut aside) = (None, 0);
        for subscriber in self.subscribers.iter() {
            let of_home = subscriber.tree.insert_words(words);
            match subscriber.passive.load(Ordering::Relaxed) {
                false => new = new.max(Some(of_home)),
                true => aside = aside.max(of_home),
            }
        }
        self.new += new.unwrap_or(aside);
    }
}

impl Drop for Marking<'_> {
    fn drop(&mut self) {
        self.flush();
    }
}

/// A subscriber, which drains its own tree. Dropping it unsubscribes. Its dirty sets stay valid;
/// frames that they give back afterwards reach no one.
///
/// ```
/// # use std::sync::Arc;
/// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tracker};
/// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1000 }])?;
/// # let tracker = Arc::new(Tracker::new(layout));
/// let mut checkpoints = tracker.subscribe("checkpoints")?;
/// tracker.mark(FrameRun { start: Gfn(62), count: 3 })?;
/// assert!(checkpoints.is_marked(Gfn(64)) && !checkpoints.is_marked(Gfn(65)));
/// assert_eq!(checkpoints.bitmap(SlotId(0)).unwrap()[..2], [0b11 << 62, 1]);
/// assert_eq!(checkpoints.check(), Ok(()));
///
/// let (dirty, was_last) = checkpoints.drain_slice(1); // a word of 64 frames at a time
/// assert_eq!((dirty.frames(), was_last), (2, false));
/// dirty.commit();
/// let (dirty, was_last) = checkpoints.drain_slice(1);
/// assert_eq!((dirty.frames(), was_last), (1, true));
/// dirty.commit();
/// assert!(checkpoints.drain().is_empty());
/// assert_eq!((checkpoints.name(), checkpoints.layout().frames()), ("checkpoints", 1000));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Subscription {
    subscriber: Arc<SubscriberTree>,
    tracker: Arc<Tracker>,
    slices: Slices,
}

impl Subscription {
    /// Returns the name given to [`Tracker::subscribe`].
    pub fn name(&self) -> &str {
        &self.subscriber.name
    }

    /// Excludes this subscriber from the per-vCPU accounting of dirty frames
    /// ([`Harvester::dirtied`](crate::Harvester::dirtied)) while there are others. A subscriber
    /// that drains often, to display writes, must not make a vCPU look busier to a migration. It
    /// still receives every frame. Costs one store.
    pub fn set_passive(&self) {
        self.subscriber.passive.store(true, Ordering::Relaxed);
    }

    /// Returns the layout of the tracked memory.
    pub fn layout(&self) -> &Layout {
        &self.subscriber.layout
    }

    /// Takes the frames marked since the last drain. Other threads may mark meanwhile: a mark that
    /// returned before this call is in the dirty set. Costs a [`Tree::drain`](crate::Tree::drain),
    /// O(dirty words). Allocates nothing once the buffers of earlier dirty sets are long enough.
    pub fn drain(&mut self) -> DirtySet {
        let mut runs = self.subscriber.buffer();
        let frames = self.subscriber.tree.drain(&self.subscriber.layout, &mut runs);
        self.dirty_set(runs, frames)
    }

    /// As [`drain`](Self::drain), for callers that must not occupy their thread for long: takes at
    /// most `words` non-empty leaf words (of 64 frames). The flag is true for the last slice of a
    /// round. All frames marked before the round are then in its dirty sets.
    pub fn drain_slice(&mut self, words: usize) -> (DirtySet, bool) {
        let mut runs = self.subscriber.buffer();
        let Self { subscriber, slices, .. } = self;
        let frames = subscriber.tree.drain_slice(&subscriber.layout, slices, words, &mut runs);
        (self.dirty_set(runs, frames), self.slices.is_over())
    }

    fn dirty_set(&self, runs: Vec<FrameRun>, frames: u64) -> DirtySet {
        let number = self.subscriber.drains.fetch_add(1, Ordering::Relaxed);
        DirtySet::new(self.subscriber.clone(), number, runs, frames)
    }

    /// Returns whether `gfn` is in the tree: marked and not drained; false for a frame of no slot.
    /// O(log slots).
    pub fn is_marked(&self, gfn: Gfn) -> bool {
        let run = FrameRun { start: gfn, count: 1 };
        self.subscriber.layout.bit_of_run(run).is_ok_and(|bit| self.subscriber.tree.contains(bit))
    }

    /// Checks I1 by walking the entire tree. For tests; exact only while no thread marks.
    ///
    /// # Errors
    /// Returns the first word that violates I1.
    pub fn check(&self) -> Result<(), MissingSummary> {
        self.subscriber.tree.check()
    }

    /// Returns a copy of the slot's leaves, which are its KVM dirty bitmap: bit `i` of word `w` is
    /// frame `64 * w + i` of the slot. `None` if there is no such slot. O(words of the slot).
    pub fn bitmap(&self, slot: SlotId) -> Option<Vec<u64>> {
        Some(self.subscriber.tree.leaves(&self.subscriber.layout, slot).ok()?.collect())
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut subscribers = sync::write(&self.tracker.subscribers);
        *subscribers =
            subscribers.iter().filter(|s| !Arc::ptr_eq(s, &self.subscriber)).cloned().collect();
        self.tracker.active.store(subscribers.len(), Ordering::SeqCst);
    }
}
