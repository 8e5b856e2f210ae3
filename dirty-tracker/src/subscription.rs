//! A subscription: the handle through which a subscriber drains its tree. `tracker` is below this
//! module and does not name it.

use crate::subscriber::Subscriber;
use crate::sync::{self, Arc, Ordering};
use crate::tracker::{SubscriberTree, Tracker, TrackerState};
use crate::tree::{NoMemory, Tree};
use crate::{DirtySet, FrameRun, Gfn, Layout, OutOfSlot, SlotId};

impl Tracker {
    /// Adds a subscriber with an empty tree. `name` is for logs and statistics.
    ///
    /// Its first drain returns the frames marked from now on. The source must already track writes
    /// when the caller begins to read memory. Costs a [`Tree::new`].
    ///
    /// # Errors
    ///
    /// Returns an error if [`Tree::new`] does. The other subscribers are unaffected.
    pub fn subscribe(self: &Arc<Self>, name: impl Into<String>) -> Result<Subscription, NoMemory> {
        let name = name.into();
        let subscriber = self.change(|state| {
            let tree = Arc::new(Tree::new(state.layout.clone())?);
            let subscriber = Arc::new(Subscriber::new(name, tree.clone()));
            let member = SubscriberTree { subscriber: subscriber.clone(), tree };
            state.members = state.members.iter().cloned().chain([member]).collect();
            Ok(subscriber)
        })?;
        // Orders the caller's later reads of memory after the change of the state: pairs with the
        // fence of `is_watched`.
        sync::fence(Ordering::SeqCst);
        Ok(Subscription { subscriber, tracker: self.clone() })
    }
}

/// A subscriber, which drains its own tree. Dropping it unsubscribes. Its dirty sets stay valid;
/// frames that they give back afterwards are discarded.
///
/// ```
/// # use std::sync::Arc;
/// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tracker};
/// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1000 }])?;
/// # let tracker = Arc::new(Tracker::new(layout));
/// let mut checkpoints = tracker.subscribe("checkpoints")?;
/// tracker.mark(FrameRun { start: Gfn(62), count: 3 })?;
/// assert!(checkpoints.contains(Gfn(64)) && !checkpoints.contains(Gfn(65)));
/// assert_eq!(checkpoints.bitmap(SlotId(0)).unwrap()[..2], [0b11 << 62, 1]);
/// assert_eq!((checkpoints.count(), checkpoints.is_empty()), (3, false));
/// checkpoints.drain().commit();
/// assert!(checkpoints.drain().is_empty());
/// checkpoints.mark(FrameRun { start: Gfn(7), count: 2 })?; // no other subscriber sees this
/// assert_eq!(checkpoints.drain().frames(), 2);
/// assert_eq!((checkpoints.name(), checkpoints.layout().frames()), ("checkpoints", 1000));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Subscription {
    subscriber: Arc<Subscriber>,
    tracker: Arc<Tracker>,
}

impl Subscription {
    /// Returns the name given to [`Tracker::subscribe`].
    pub fn name(&self) -> &str {
        &self.subscriber.name
    }

    /// Excludes this subscriber from the per-vCPU accounting of dirty frames
    /// ([`Harvester::dirtied`](crate::ring::Harvester::dirtied)) while there are others. A
    /// subscriber that drains often, to display writes, must not make a vCPU look busier to a
    /// migration. It still receives every frame. Costs one store.
    pub fn set_passive(&self) {
        self.subscriber.passive.store(true, Ordering::Relaxed);
    }

    /// Returns the layout of the tracked memory.
    pub fn layout(&self) -> Arc<Layout> {
        self.tracker.layout()
    }

    /// Takes the frames marked since the last drain. Other threads may mark meanwhile: a mark that
    /// returned before this call is in the dirty set.
    ///
    /// Costs a [`Tree::drain`], O(dirty words). Allocates nothing once the buffers of earlier dirty
    /// sets are long enough. With the feature `parallel`, several threads share the drain of a
    /// guest of at least 32 GiB if so many words are dirty that draining them takes longer than
    /// waking a thread (`cargo bench --all-features -- parallel` prints the gain). Such a drain
    /// allocates: a list of the non-empty subtrees, and scratch memory for each thread.
    pub fn drain(&mut self) -> DirtySet {
        self.tracker.flush();
        let mut lists = self.subscriber.buffer();
        let mut is_first = true;
        self.subscriber.with_tree(|tree| {
            if std::mem::take(&mut is_first) {
                tree.drain_to_lists(&mut lists);
            } else {
                lists.merge(tree.drain(), tree.layout());
            }
        });
        DirtySet::new(self.subscriber.clone(), lists)
    }

    /// Marks a run of frames, which must lie in one slot, for this subscriber alone. A subscriber
    /// that continues the work of another, for example in another process, marks the frames that
    /// the other had not drained. Costs a [`Tree::mark`].
    ///
    /// # Errors
    ///
    /// Returns an error that names the run if it does not lie in one slot. Nothing is marked.
    pub fn mark(&self, run: FrameRun) -> Result<(), OutOfSlot> {
        let mut marked = Ok(());
        self.subscriber.with_tree(|tree| marked = tree.mark(run));
        marked
    }

    /// Returns the number of frames that are marked and not drained. Costs a [`Tree::count`].
    pub fn count(&self) -> u64 {
        self.tracker.flush();
        self.subscriber.tree().count()
    }

    /// Returns whether no frame is marked. Costs a [`Tree::is_empty`].
    pub fn is_empty(&self) -> bool {
        self.tracker.flush();
        self.subscriber.tree().is_empty()
    }

    /// Returns whether `gfn` is marked and not drained; false for a frame of no slot. Costs a lock,
    /// and O(log slots).
    pub fn contains(&self, gfn: Gfn) -> bool {
        self.tracker.flush();
        self.subscriber.tree().contains(gfn)
    }

    /// Returns a copy of the slot's leaves, which are its KVM dirty bitmap: bit `i` of word `w` is
    /// frame `64 * w + i` of the slot. `None` if there is no such slot. O(words of the slot).
    pub fn bitmap(&self, slot: SlotId) -> Option<Vec<u64>> {
        self.tracker.flush();
        Some(self.subscriber.tree().bitmap(slot).ok()?.collect())
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let remove = |state: &mut TrackerState| {
            let is_other =
                |member: &&SubscriberTree| !Arc::ptr_eq(&member.subscriber, &self.subscriber);
            state.members = state.members.iter().filter(is_other).cloned().collect();
            Ok::<(), std::convert::Infallible>(())
        };
        let Ok(()) = self.tracker.change(remove);
    }
}
