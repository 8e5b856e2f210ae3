//! A source that loses frames, for the tests of the tests: each of them has to notice. Only with
//! feature `broken-source`, and only where debug assertions are on: no binary has it that is built
//! for use, and no release build whatever its features.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use driftline_dirty_tracker::{
    Collected, DirtySource, FrameRun, NoMemory, SourceError, Subscription, Tracker, TrackingMode,
};

/// Frames that sources of this kind were told of, in all machines: a guest that moves from one to
/// the next so often that none lives for a million frames loses one in a million all the same.
static REPORTED: AtomicU64 = AtomicU64::new(0);

/// Another source, of whose frames it keeps one in so many to itself.
pub struct BrokenSource {
    inner: Box<dyn DirtySource>,
    /// What the other one reports to.
    seen: Arc<Tracker>,
    subscription: Subscription,
    one_in: NonZeroU64,
}

impl BrokenSource {
    /// Loses one in `one_in` of the frames that `inner` reports to `tracker`.
    pub fn new(
        inner: Box<dyn DirtySource>,
        tracker: &Tracker,
        one_in: NonZeroU64,
    ) -> Result<Self, NoMemory> {
        let seen = Arc::new(Tracker::new(tracker.layout().clone()));
        let subscription = seen.subscribe("broken source")?;
        Ok(Self { inner, seen, subscription, one_in })
    }
}

impl DirtySource for BrokenSource {
    fn mode(&self) -> TrackingMode {
        self.inner.mode()
    }

    fn start(&mut self) -> Result<(), SourceError> {
        self.inner.start()
    }

    fn stop(&mut self) -> Result<(), SourceError> {
        self.inner.stop()
    }

    fn collect(&mut self, tracker: &Tracker) -> Result<Collected, SourceError> {
        let collected = self.inner.collect(&self.seen)?;
        let epoch = self.subscription.drain();
        for start in epoch.runs().flat_map(FrameRun::frames) {
            let number = REPORTED.fetch_add(1, Ordering::Relaxed) + 1;
            // The layouts are the same.
            if number % self.one_in != 0 && tracker.mark(FrameRun { start, count: 1 }).is_err() {
                tracker.mark_all();
            }
        }
        epoch.commit();
        Ok(collected)
    }

    fn dirtied(&self) -> &[u64] {
        self.inner.dirtied()
    }

    fn harvested(&self) -> &[u64] {
        self.inner.harvested()
    }
}
