//! The tracker: one layout, any number of subscribers, one tree for each.
//!
//! Sources and the VMM's own writes *mark*; each subscriber *drains* its own tree into epochs and
//! never sees what others did. Without a subscriber a mark costs one load.

use crate::layout::Placed;
use crate::subscriber_tree::SubscriberTree;
use crate::sync::{self, Arc, AtomicU64, AtomicUsize, Ordering, RwLock, RwLockReadGuard};
use crate::{DirtySet, FrameRun, Gfn, Layout, MissingSummary, NoMemory, OutOfSlot, Slices, SlotId};

/// Every subscriber's tree, and the way to mark them all, from any number of threads.
///
/// A mark takes a lock for reading, which only coming and going subscribers take for writing, and
/// then costs one insert in each tree.
///
/// ```
/// use std::sync::Arc;
/// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tracker};
///
/// let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0x100), frames: 1000 }])?;
/// let tracker = Arc::new(Tracker::new(layout));
/// tracker.mark_offset(SlotId(0), 1)?; // nobody subscribes yet: forgotten
/// let mut migration = tracker.subscribe("migration")?;
/// tracker.mark_offset(SlotId(0), 2)?;
/// tracker.mark(FrameRun { start: Gfn(0x110), count: 4 })?;
/// assert_eq!(tracker.absorb_bitmap(SlotId(0), &[0b101])?, 2);
/// assert!(tracker.is_marked(Gfn(0x113)) && !tracker.is_marked(Gfn(0x101)));
/// let runs: Vec<String> = migration.drain().runs().map(|run| run.to_string()).collect();
/// assert_eq!(runs, ["gfn 0x100..0x101", "gfn 0x102..0x103", "gfn 0x110..0x114"]);
///
/// tracker.mark_all(); // it lost sight of something
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
    /// `subscribers.len()`, so that marking costs nothing while nobody subscribes.
    active: AtomicUsize,
    stats: Counters,
}

#[derive(Debug, Default)]
struct Counters {
    marked_frames: AtomicU64,
    marked_all: AtomicU64,
    outside: AtomicU64,
}

/// What a tracker has counted since it was made. Example at [`Tracker`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TrackerStats {
    /// Subscribers now.
    pub subscribers: u64,
    /// Frames marked while there were subscribers, by sources and by the VMM; a frame marked twice
    /// counts twice unless one word of a batch has both.
    pub marked_frames: u64,
    /// How often all memory was marked at once: overruns and requests.
    pub marked_all: u64,
    /// Marks by the VMM of addresses outside the layout, each of which marked all memory instead.
    /// Any is a mistake in the VMM.
    #[cfg_attr(feature = "serde", serde(default))]
    pub marks_outside: u64,
    /// Bytes reserved for trees, see [`Tree::reserved_bytes`].
    pub tree_bytes: u64,
}

impl Tracker {
    /// A tracker over `layout` that nobody subscribes to yet. It has no trees, so O(1).
    pub fn new(layout: Layout) -> Self {
        Self {
            layout: Arc::new(layout),
            subscribers: RwLock::new(Arc::new([])),
            active: AtomicUsize::new(0),
            stats: Counters::default(),
        }
    }

    /// The layout of the tracked memory.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Adds a subscriber with an empty tree. `name` is for logs and statistics.
    ///
    /// Its first epoch holds what is marked from now on; the source must already be catching
    /// writes when the caller begins to read memory. Costs a [`Tree::new`].
    ///
    /// # Errors
    /// As [`Tree::new`]. The other subscribers are unaffected.
    pub fn subscribe(self: &Arc<Self>, name: impl Into<String>) -> Result<Subscription, NoMemory> {
        let subscriber = Arc::new(SubscriberTree::new(name.into(), self.layout.clone())?);
        let mut subscribers = sync::write(&self.subscribers);
        *subscribers = subscribers.iter().chain([&subscriber]).cloned().collect();
        self.active.store(subscribers.len(), Ordering::SeqCst);
        drop(subscribers);
        // Before the caller's reads of memory: pairs with the fence of `mark_bits`.
        sync::fence(Ordering::SeqCst);
        Ok(Subscription { subscriber, tracker: self.clone(), slices: Slices::default() })
    }

    /// How many subscribers there are. One load.
    pub fn subscribers(&self) -> usize {
        self.active.load(Ordering::SeqCst)
    }

    /// Marks a run of frames, which must lie in one slot; otherwise the error names the run, and
    /// nothing is marked. A run of no frames is none. Costs one insert in each tree, O(words of 64
    /// frames).
    pub fn mark(&self, run: FrameRun) -> Result<(), OutOfSlot> {
        if run.count == 0 {
            return Ok(());
        }
        let bit = self.layout.bit_of_run(run)?;
        self.mark_bits(bit, run.count);
        Ok(())
    }

    /// Marks a frame as KVM names it, by slot and offset in frames. A slot that does not exist, or
    /// is shorter, is an error that names both. Costs O(log slots) and one insert in each tree.
    pub fn mark_offset(&self, slot: SlotId, offset: u64) -> Result<(), OutOfSlot> {
        let bit = self.layout.bit_of_offset(slot, offset)?;
        self.mark_bits(bit, 1);
        Ok(())
    }

    /// Marks every frame of every slot (I6). Costs a write of every leaf, a 32,768th of guest
    /// memory, in each tree.
    pub fn mark_all(&self) {
        self.stats.marked_all.fetch_add(1, Ordering::Relaxed);
        for p in self.layout.placed() {
            self.mark_bits(p.first_word * 64, p.slot.frames);
        }
    }

    /// Marks every frame in place of one that the layout does not have. Returns how often that was
    /// done before.
    #[cfg(feature = "vm-memory")]
    pub(crate) fn mark_outside(&self) -> u64 {
        self.mark_all();
        self.stats.outside.fetch_add(1, Ordering::Relaxed)
    }

    /// Marks what a KVM dirty bitmap of `slot` says: bit `i` of word `w` is frame `64 * w + i`.
    /// Bits past the slot's end are an error and nothing is marked. Returns the frames marked.
    /// Several threads share the work on a large bitmap (see [`Tree::absorb_bitmap`]).
    pub fn absorb_bitmap(&self, slot: SlotId, bitmap: &[u64]) -> Result<u64, OutOfSlot> {
        let (placed, bitmap) = self.layout.checked_bitmap(slot, bitmap)?;
        // Not under the lock: a pool's thread that waits for others may run a task that wants it.
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

    /// Whether `gfn` is marked in any subscriber's tree; a frame of no slot is not. A load for
    /// each.
    pub fn is_marked(&self, gfn: Gfn) -> bool {
        let run = FrameRun { start: gfn, count: 1 };
        let Ok(bit) = self.layout.bit_of_run(run) else { return false };
        let subscribers = sync::read(&self.subscribers);
        subscribers.iter().any(|s| s.tree.contains(bit))
    }

    /// Counters since the tracker was made. A few loads.
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

    /// Marks many frames under one lock.
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
        // Orders the caller's writes before the look at who subscribes: pairs with the fence of
        // `subscribe`. `Marking` needs none, since it takes the lock that `subscribe` takes.
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

/// A batch of marks: the subscribers locked once, the last slot remembered, frames of one word
/// joined and words gathered before they are inserted. Dropping it inserts the last ones.
pub(crate) struct Marking<'t> {
    tracker: &'t Tracker,
    subscribers: RwLockReadGuard<'t, Arc<[Arc<SubscriberTree>]>>,
    slot: Option<Placed>,
    /// Words and their bits; the last one may still get some.
    words: [(u64, u64); GATHERED],
    len: usize,
    /// See [`take_new`](Self::take_new).
    new: u64,
}

/// Words that are inserted together.
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

    /// Inserts what is gathered. How many of the frames since the last call a subscriber did not
    /// have marked yet: of each gathered lot, those of the subscriber who had fewest, of those that
    /// only look on if there are no others.
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

/// One subscriber: drains its own tree. Dropping it unsubscribes; its epochs live on, and what they
/// give back nobody sees.
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
/// let (epoch, was_last) = checkpoints.drain_slice(1); // a word of 64 frames at a time
/// assert_eq!((epoch.frames(), was_last), (2, false));
/// epoch.commit();
/// let (epoch, was_last) = checkpoints.drain_slice(1);
/// assert_eq!((epoch.frames(), was_last), (1, true));
/// epoch.commit();
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
    /// The name it was made with.
    pub fn name(&self) -> &str {
        &self.subscriber.name
    }

    /// From now on what is new to this one is no measure of who makes frames dirty
    /// ([`Harvester::dirtied`](crate::Harvester::dirtied)) while there are others: somebody who
    /// drains often, to show what is written, shall not make a vCPU look busier to a migration. It
    /// gets every frame as before. One store.
    pub fn set_passive(&self) {
        self.subscriber.passive.store(true, Ordering::Relaxed);
    }

    /// The layout of the tracked memory.
    pub fn layout(&self) -> &Layout {
        &self.subscriber.layout
    }

    /// Takes what was marked since the last drain. Safe while others mark: a mark that returned
    /// before this call is in the epoch. Costs what [`Tree::drain`] does, O(dirty words); allocates
    /// nothing once the buffers of earlier epochs are long enough.
    pub fn drain(&mut self) -> DirtySet {
        let mut runs = self.subscriber.buffer();
        let frames = self.subscriber.tree.drain(&self.subscriber.layout, &mut runs);
        self.dirty_set(runs, frames)
    }

    /// As [`drain`](Self::drain), but at most `words` leaf words (of 64 frames) that hold
    /// something: for callers that must not hold their thread for longer. The flag says that this
    /// was the last slice of a round; what was marked before the round is then in one of its
    /// epochs.
    pub fn drain_slice(&mut self, words: usize) -> (DirtySet, bool) {
        let mut runs = self.subscriber.buffer();
        let Self { subscriber, slices, .. } = self;
        let frames = subscriber.tree.drain_slice(&subscriber.layout, slices, words, &mut runs);
        (self.dirty_set(runs, frames), self.slices.is_over())
    }

    fn dirty_set(&self, runs: Vec<FrameRun>, frames: u64) -> DirtySet {
        let number = self.subscriber.epochs.fetch_add(1, Ordering::Relaxed);
        DirtySet::new(self.subscriber.clone(), number, runs, frames)
    }

    /// Whether `gfn` is in the tree: marked and not drained. Frames of no slot are not. O(log
    /// slots).
    pub fn is_marked(&self, gfn: Gfn) -> bool {
        let run = FrameRun { start: gfn, count: 1 };
        self.subscriber.layout.bit_of_run(run).is_ok_and(|bit| self.subscriber.tree.contains(bit))
    }

    /// Checks I1 by walking the whole tree, and answers with the first word that breaks it. For
    /// tests; exact only while nobody marks.
    pub fn check(&self) -> Result<(), MissingSummary> {
        self.subscriber.tree.check()
    }

    /// A copy of the slot's leaves, which are its KVM dirty bitmap: bit `i` of word `w` is frame
    /// `64 * w + i` of the slot. `None` for a slot that does not exist. O(words of the slot).
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
