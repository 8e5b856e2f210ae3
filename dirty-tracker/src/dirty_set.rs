//! An epoch: the frames that changed since the one before, committed or given back (I4).

use crate::subscriber_tree::SubscriberTree;
use crate::sync::Arc;
use crate::{FrameRun, Layout};

/// The frames drained from one subscriber's tree. Owned, so several may be under way at once.
///
/// [`commit`](Self::commit) forgets the frames, [`give_back`](Self::give_back) or dropping returns
/// them to the tree they came from, so that the next epoch has them again. None of it fails.
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
/// let epoch = subscription.drain();
/// assert_eq!((epoch.number(), epoch.frames(), epoch.is_empty()), (0, 3, false));
/// assert_eq!((epoch.runs().len(), epoch.layout().frames()), (2, 1024));
/// let sent = epoch.runs().try_for_each(send);
/// match sent {
///     Ok(()) => epoch.commit(),
///     Err(_) => epoch.give_back(),
/// }
/// assert_eq!(subscription.drain().frames(), 3, "it failed, and nothing is lost");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "an epoch that is dropped gives its frames back"]
pub struct DirtySet {
    subscriber: Arc<SubscriberTree>,
    number: u64,
    runs: Vec<FrameRun>,
    frames: u64,
    committed: bool,
}

impl DirtySet {
    pub(crate) fn new(
        subscriber: Arc<SubscriberTree>,
        number: u64,
        runs: Vec<FrameRun>,
        frames: u64,
    ) -> Self {
        Self { subscriber, number, runs, frames, committed: false }
    }

    /// The subscriber's count of epochs before this one.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// How many frames are in it. O(1).
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// The frames as runs, ascending, none touching its neighbour within a slot.
    pub fn runs(&self) -> impl ExactSizeIterator<Item = FrameRun> + '_ {
        self.runs.iter().copied()
    }

    /// The layout that the frames belong to.
    pub fn layout(&self) -> &Layout {
        &self.subscriber.layout
    }

    /// The frames have arrived where they were going: forgets them. O(1).
    pub fn commit(mut self) {
        self.committed = true;
    }

    /// The frames did not arrive: returns them to the subscriber's tree, like dropping does. Costs
    /// the insert of each run; what was marked meanwhile stays marked.
    pub fn give_back(self) {}
}

impl Drop for DirtySet {
    fn drop(&mut self) {
        if !self.committed {
            for run in &self.runs {
                self.subscriber.give_back(*run);
            }
        }
        self.subscriber.recycle(std::mem::take(&mut self.runs));
    }
}
