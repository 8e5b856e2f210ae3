//! A source that loses frames on purpose, to test the tests: each of them must notice the loss. It
//! exists only with feature `broken-source` and only with debug assertions on. No binary built for
//! use contains it, and no release build does, whatever its features.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::source::{DirtySource, SourceError};
use crate::tracking::TrackingMode;

use driftline_dirty_tracker::{FrameRun, NoMemory, Subscription, Tracker};
use driftline_guest::CollectionReport;

/// Frames reported to all sources of this kind, counted over all machines. Machines share the
/// counter so that a guest that moves too often for any one machine to see a million frames still
/// loses one in a million.
static REPORTED: AtomicU64 = AtomicU64::new(0);

/// Wraps another source and drops one in `one_in` of its frames.
pub struct BrokenSource {
    inner: Box<dyn DirtySource>,
    /// Private tracker that the wrapped source reports to.
    reported: Arc<Tracker>,
    subscription: Subscription,
    one_in: NonZeroU64,
}

impl BrokenSource {
    /// Returns a source that drops one in `one_in` of the frames that `inner` reports to `tracker`.
    pub fn new(
        inner: Box<dyn DirtySource>,
        tracker: &Tracker,
        one_in: NonZeroU64,
    ) -> Result<Self, NoMemory> {
        let reported = Arc::new(Tracker::new(tracker.layout()));
        let subscription = reported.subscribe("broken source")?;
        Ok(Self { inner, reported, subscription, one_in })
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

    fn collect(&mut self, tracker: &Tracker) -> Result<CollectionReport, SourceError> {
        let collected = self.inner.collect(&self.reported)?;
        let epoch = self.subscription.drain();
        for start in epoch.runs().flat_map(FrameRun::frames) {
            let number = REPORTED.fetch_add(1, Ordering::Relaxed) + 1;
            // Both trackers have the same layout, so the mark cannot fail.
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
