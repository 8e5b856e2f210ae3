//! The collector: the one thread that owns a machine's dirty source.
//!
//! The collector starts the source for the first subscriber and stops it after the last one has
//! ended. In between it collects on request, when a vCPU finds its ring full, and periodically, so
//! that rings seldom fill. While a throttle is on, the collector collects as often as the throttle
//! needs, and stalls vCPUs (see `throttle`).
//!
//! The collector never waits for another thread, so a vCPU that waits for the collector can still
//! be paused.

mod peaks;
mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{PAGE_SIZE, Subscription, Tracker};
use driftline_guest::CollectionReport;

use crate::actor::{self, Handle, Inbox};
use crate::histogram::{Distribution, Histogram};
use crate::sandbox::{self, Class};
use crate::sources::DirtySource;
use crate::throttle::Pacing;
use crate::tracking::TrackingMode;
use crate::vcpu::ThrottleHandle;
use peaks::Peaks;
use state::{CaughtWrites, CollectorError, PERIOD_MOST};

pub(crate) use state::CollectorState;

/// Buckets of the time of a collection, in µs. Nearly empty rings take some 10 µs, full ones some
/// ms; a vCPU that waits for room in its ring waits this long.
const COLLECTION_US: &[u64] =
    &[5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000];

/// Limit on waiting for the collector, and what each GiB of guest memory adds to it. The collector
/// waits for no thread, so only a defect takes this long. A source may have to write-protect all
/// memory when it starts: `userfault-wp` takes about 20 ms a GiB.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
const ANSWER_LIMIT_PER_GIB: Duration = Duration::from_millis(100);

/// Creates the inbox of a collector, and the handle of it for the vCPUs.
pub(crate) fn inbox() -> (Handle<CollectorState>, Inbox<CollectorState>) {
    actor::inbox("the collector")
}

/// The handle of a collector. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Collector {
    state: Handle<CollectorState>,
    answer_limit: Duration,
    overruns: Arc<AtomicU64>,
    dirtied: Arc<[AtomicU64]>,
    peaks: Arc<[AtomicU64]>,
    times: Arc<Histogram>,
    thread: Option<JoinHandle<()>>,
}

impl Collector {
    /// Starts a collector of `source`, which throttles the vCPUs through `throttles`. A periodic
    /// collection of at least `many` frames shortens the interval to the next one.
    pub(crate) fn spawn(
        source: Box<dyn DirtySource>,
        tracker: Arc<Tracker>,
        many: u64,
        throttles: Vec<ThrottleHandle>,
        (handle, inbox): (Handle<CollectorState>, Inbox<CollectorState>),
    ) -> std::io::Result<Self> {
        let gib = tracker.layout().frames() * PAGE_SIZE / (1 << 30);
        let gib = u32::try_from(gib).unwrap_or(u32::MAX);
        let answer_limit = ANSWER_LIMIT + ANSWER_LIMIT_PER_GIB.saturating_mul(gib);
        let overruns = Arc::new(AtomicU64::new(0));
        let dirtied: Arc<[AtomicU64]> = source.dirtied().iter().map(|n| (*n).into()).collect();
        let peaks = Peaks::new(source.harvested().len());
        let published = peaks.published();
        let times = Arc::new(Histogram::new(COLLECTION_US));
        let class = match source.mode() {
            TrackingMode::UserfaultWp => Class::Watcher,
            _ => Class::Collector,
        };
        let state = CollectorState {
            source,
            tracker,
            many,
            caught: CaughtWrites::Nothing,
            unreported: CollectionReport::default(),
            period: PERIOD_MOST,
            overruns: overruns.clone(),
            dirtied: dirtied.clone(),
            peaks,
            times: times.clone(),
            pacing: Pacing::new(throttles),
        };
        let thread = Some(sandbox::spawn(class, "collector", move || state.run(&inbox))?);
        Ok(Self { state: handle, answer_limit, overruns, dirtied, peaks: published, times, thread })
    }

    pub(crate) fn subscribe(&self, name: &str) -> Result<Subscription, CollectorError> {
        let name = name.to_owned();
        self.ask("begin to track the guest's writes", |state| state.subscribe(name))
    }

    pub(crate) fn collect(&self) -> Result<CollectionReport, CollectorError> {
        self.ask("collect what the guest has written", CollectorState::report)
    }

    /// Returns the number of ring overruns so far (I6).
    pub(crate) fn overruns(&self) -> u64 {
        self.overruns.load(Ordering::Relaxed)
    }

    /// Returns the number of frames that each vCPU has made dirty, as of the last collection; empty
    /// if the source does not count them.
    pub(crate) fn dirtied(&self) -> impl Iterator<Item = u64> {
        self.dirtied.iter().map(|frames| frames.load(Ordering::Relaxed))
    }

    /// Returns the most entries that a collection in the last second has found in each vCPU's ring;
    /// empty if there are no rings.
    pub(crate) fn peaks(&self) -> impl Iterator<Item = u64> {
        self.peaks.iter().map(|entries| entries.load(Ordering::Relaxed))
    }

    /// Returns the times that collections took.
    pub(crate) fn times(&self) -> Distribution {
        self.times.read()
    }

    /// Throttles vCPUs that make more than `frames_per_s` frames dirty in a second; `None` ends the
    /// throttle.
    pub(crate) fn throttle(&self, frames_per_s: Option<u64>) {
        // A collector that has ended stalls no vCPU.
        self.state.tell(move |state| {
            state.pacing.set_rate(frames_per_s, state.source.dirtied(), Instant::now());
        });
    }

    fn ask<T: Send + 'static>(
        &self,
        what: &'static str,
        job: impl FnOnce(&mut CollectorState) -> Result<T, CollectorError> + Send + 'static,
    ) -> Result<T, CollectorError> {
        self.state.call(what, Instant::now() + self.answer_limit, job)?
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.state.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId};
    use driftline_guest::GuestError;
    use std::process::Stdio;
    use std::sync::{Mutex, mpsc};

    use crate::sources::SourceError;
    use crate::testing::run_in_child;

    /// Two slots of 64 frames; the first frame of each is always dirty. A failing call reaches the
    /// first slot only.
    #[derive(Default)]
    struct SlotLogging {
        logging: [bool; 2],
        starts: u32,
        stops: u32,
        failing_starts: u32,
        failing_stops: u32,
    }

    struct FakeSource(Arc<Mutex<SlotLogging>>);

    fn slot(id: u32) -> Slot {
        Slot { id: SlotId(id), base: Gfn(u64::from(id) * 1000), frames: 64 }
    }

    fn switch(slots: &mut [bool; 2], on: bool, failing: &mut u32) -> Result<(), SourceError> {
        slots[0] = on;
        if *failing > 0 {
            *failing -= 1;
            let cause = std::io::Error::other("no memory");
            return Err(SourceError { what: "switching logging", cause });
        }
        slots[1] = on;
        Ok(())
    }

    impl DirtySource for FakeSource {
        fn mode(&self) -> TrackingMode {
            TrackingMode::DirtyBitmap
        }

        fn start(&mut self) -> Result<(), SourceError> {
            let s = &mut *self.0.lock().unwrap();
            s.starts += 1;
            switch(&mut s.logging, true, &mut s.failing_starts)
        }

        fn stop(&mut self) -> Result<(), SourceError> {
            let s = &mut *self.0.lock().unwrap();
            s.stops += 1;
            switch(&mut s.logging, false, &mut s.failing_stops)
        }

        fn collect(&mut self, tracker: &Tracker) -> Result<CollectionReport, SourceError> {
            let mut out = CollectionReport::default();
            for (id, _) in (0..).zip(self.0.lock().unwrap().logging).filter(|(_, on)| *on) {
                tracker.mark(FrameRun { start: slot(id).base, count: 1 }).unwrap();
                out.frames += 1;
            }
            Ok(out)
        }

        fn dirtied(&self) -> &[u64] {
            &[]
        }

        fn harvested(&self) -> &[u64] {
            &[]
        }
    }

    fn collector(slots: SlotLogging) -> (Collector, Arc<Mutex<SlotLogging>>) {
        collector_of(slots, vec![slot(0), slot(1)])
    }

    fn collector_of(slots: SlotLogging, layout: Vec<Slot>) -> (Collector, Arc<Mutex<SlotLogging>>) {
        let slots = Arc::new(Mutex::new(slots));
        let tracker = Arc::new(Tracker::new(Layout::new(layout).unwrap()));
        let source = Box::new(FakeSource(slots.clone()));
        let collector = Collector::spawn(source, tracker, 1000, Vec::new(), inbox());
        (collector.unwrap(), slots)
    }

    #[track_caller]
    fn wait(slots: &Mutex<SlotLogging>, what: impl Fn(&SlotLogging) -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !what(&slots.lock().unwrap()) {
            assert!(Instant::now() < end, "the condition was not met within 60 s");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn subscriber_after_a_failed_stop_sees_every_slot() {
        let (collector, slots) =
            collector(SlotLogging { failing_stops: u32::MAX, ..SlotLogging::default() });
        drop(collector.subscribe("first").unwrap());
        wait(&slots, |s| s.stops > 0);
        let subscription = collector.subscribe("second").unwrap();
        collector.collect().unwrap();
        let marked = [0, 1].map(|id| subscription.contains(slot(id).base));
        assert_eq!(marked, [true, true], "one frame of each slot is dirty");
        // No subscriber is left, and at last stopping succeeds.
        drop(subscription);
        slots.lock().unwrap().failing_stops = 3;
        wait(&slots, |s| s.failing_stops == 0 && s.logging == [false, false]);
    }

    #[test]
    fn failed_start_is_undone_and_can_be_retried() {
        let (collector, slots) =
            collector(SlotLogging { failing_starts: 1, ..SlotLogging::default() });
        let error = collector.subscribe("first").unwrap_err().to_string();
        assert!(error.contains("no memory"), "{error}");
        wait(&slots, |s| s.stops > 0 && s.logging == [false, false]);
        let _subscription = collector.subscribe("second").unwrap();
        assert_eq!(slots.lock().unwrap().logging, [true, true]);
        // Once, and once more for each periodic collection until then.
        let frames = collector.collect().unwrap().frames;
        assert!(frames >= 2 && frames.is_multiple_of(2), "{frames}");
    }

    #[test]
    fn source_stops_although_jobs_keep_coming() {
        let (collector, slots) = collector(SlotLogging::default());
        let subscription = collector.subscribe("first").unwrap();
        // The first job ends once all the others are in the inbox, so the inbox is never empty
        // before the last one. Together they take longer than any period.
        let (queued, gate) = mpsc::channel::<()>();
        collector.state.tell(move |_| _ = gate.recv());
        drop(subscription);
        for _ in 0..8 {
            collector.state.tell(|_| std::thread::sleep(PERIOD_MOST / 4));
        }
        let counted = slots.clone();
        let what = "count the stops";
        let end = Instant::now() + ANSWER_LIMIT;
        let stops = collector.state.begin(what, end, move |_| counted.lock().unwrap().stops);
        drop(queued);
        assert!(stops.wait().unwrap() > 0, "the source still runs behind the jobs");
    }

    /// In a process of its own, since the limit on the address space is the process's.
    #[test]
    fn subscriber_without_address_space_is_refused_and_undone() {
        const CHILD: &str = "ADDRESS_SPACE_LIMITED";
        if std::env::var_os(CHILD).is_none() {
            let name = "collector::tests::subscriber_without_address_space_is_refused_and_undone";
            return run_in_child(name, CHILD, "1", Stdio::null());
        }
        let limit = rustix::process::Rlimit { current: Some(8 << 30), maximum: Some(8 << 30) };
        rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
        // The largest guest: its dirty bits take 128 GiB.
        let all = Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 40 };
        let (collector, slots) = collector_of(SlotLogging::default(), vec![all]);
        for _ in 0..2 {
            let error = GuestError::from(collector.subscribe("migration").unwrap_err()).to_string();
            assert!(error.contains("tracking the guest's writes failed"), "{error}");
            assert!(error.contains("ulimit -v"), "{error}");
            // The source stops again, and the collector continues.
            wait(&slots, |s| s.starts == s.stops && s.logging == [false, false]);
            collector.collect().unwrap();
        }
    }
}
