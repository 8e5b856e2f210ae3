//! A dirty set: the frames that changed between two drains. It is committed or given back (I4).

use crate::FrameRun;
use crate::subscriber::Subscriber;
use crate::sync::Arc;
use crate::tree::{ListedRuns, RunLists};

/// The frames drained from one subscriber's tree. The set is owned, so several can exist at the
/// same time.
///
/// [`commit`](Self::commit) discards the frames. [`give_back`](Self::give_back), or dropping the
/// set, returns them to their tree, so that the next drain has them again. None of these fails.
/// Frames that the layout has lost meanwhile are not given back.
///
/// ```
/// # use std::sync::Arc;
/// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tracker};
/// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1024 }])?;
/// # let tracker = Arc::new(Tracker::new(layout));
/// # let mut subscription = tracker.subscribe("doc")?;
/// # let send = |run: FrameRun| if run.start.0 < 100 { Ok(()) } else { Err("no route to host") };
/// tracker.mark(FrameRun { start: Gfn(5), count: 2 })?;
/// tracker.mark(FrameRun { start: Gfn(500), count: 1 })?;
/// let dirty = subscription.drain();
/// assert_eq!((dirty.number(), dirty.frames(), dirty.is_empty()), (0, 3, false));
/// assert_eq!(dirty.runs().len(), 2);
/// let sent = dirty.runs().try_for_each(send);
/// match sent {
///     Ok(()) => dirty.commit(),
///     Err(_) => dirty.give_back(),
/// }
/// assert_eq!(subscription.drain().frames(), 3, "the send failed, and nothing is lost");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a dirty set that is dropped gives its frames back"]
pub struct DirtySet {
    subscriber: Arc<Subscriber>,
    number: u64,
    lists: RunLists,
    committed: bool,
}

impl DirtySet {
    pub(crate) fn new(subscriber: Arc<Subscriber>, lists: RunLists) -> Self {
        let number = subscriber.next_number();
        Self { subscriber, number, lists, committed: false }
    }

    /// Returns the number of dirty sets that the subscriber drained before this one.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the number of frames. O(1).
    pub fn frames(&self) -> u64 {
        self.lists.frames()
    }

    /// Returns whether no frame changed.
    pub fn is_empty(&self) -> bool {
        self.frames() == 0
    }

    /// Returns the frames as ascending runs. No two runs touch within a slot.
    pub fn runs(&self) -> DirtyRuns<'_> {
        DirtyRuns(self.lists.iter())
    }

    /// Discards the frames, because they arrived at their destination. O(1).
    pub fn commit(mut self) {
        self.committed = true;
    }

    /// Returns the frames to the subscriber's tree, because they did not arrive. Dropping does the
    /// same. Costs one insert for each run. Marks made meanwhile stay.
    pub fn give_back(self) {}
}

impl Drop for DirtySet {
    fn drop(&mut self) {
        if !self.committed {
            self.subscriber.with_tree(|tree| tree.mark_parts(self.lists.iter()));
        }
        self.subscriber.recycle(std::mem::take(&mut self.lists));
    }
}

/// The runs of a dirty set, ascending. From [`DirtySet::runs`].
#[derive(Debug, Clone)]
pub struct DirtyRuns<'s>(ListedRuns<'s>);

impl Iterator for DirtyRuns<'_> {
    type Item = FrameRun;

    fn next(&mut self) -> Option<FrameRun> {
        self.0.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for DirtyRuns<'_> {}

impl<'s> IntoIterator for &'s DirtySet {
    type Item = FrameRun;
    type IntoIter = DirtyRuns<'s>;

    fn into_iter(self) -> DirtyRuns<'s> {
        self.runs()
    }
}
