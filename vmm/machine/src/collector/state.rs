//! The state that the collector's thread owns, and the thread's loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{NoMemory, Subscription, Tracker};
use driftline_guest::{CollectionReport, GuestError};

use super::peaks::Peaks;
use crate::actor::{CallError, Inbox, Next};
use crate::histogram::Histogram;
use crate::sources::{DirtySource, SourceError};
use crate::throttle::Pacing;
use crate::tracking::TrackingMode;
use crate::vcpu::ThrottleHandle;

/// The shortest time between two periodic collections. 1 ms, chosen: each collection makes the
/// guest fault again on the frames that it writes. A vCPU whose ring is full does not wait for it.
const PERIOD_LEAST: Duration = Duration::from_millis(1);
/// The longest time between two periodic collections. 32 ms, chosen: a guest that writes little
/// costs the host 31 wake-ups a second. It also bounds how long the source runs after its last
/// subscriber.
pub(super) const PERIOD_MOST: Duration = Duration::from_millis(32);

/// The reason why the collector has refused or not answered a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CollectorError {
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// There is no room for a dirty tree.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
    /// The thread did not answer.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl From<CollectorError> for GuestError {
    fn from(e: CollectorError) -> Self {
        Self::System { what: "tracking the guest's writes", cause: Box::new(e) }
    }
}

/// The writes that the source catches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CaughtWrites {
    Nothing,
    Everything,
    /// Those to some slots: starting or stopping has failed half-way.
    Partial,
}

/// The state that the collector's thread owns.
pub(crate) struct CollectorState {
    pub(super) source: Box<dyn DirtySource>,
    pub(super) tracker: Arc<Tracker>,
    pub(super) many: u64,
    pub(super) caught: CaughtWrites,
    /// Results of collections that were not requested; part of the next reply.
    pub(super) unreported: CollectionReport,
    pub(super) period: Duration,
    pub(super) overruns: Arc<AtomicU64>,
    /// A copy of the source's counts that other threads can read.
    pub(super) dirtied: Arc<[AtomicU64]>,
    pub(super) peaks: Peaks,
    /// The time of each collection.
    pub(super) times: Arc<Histogram>,
    pub(super) pacing: Pacing<ThrottleHandle>,
}

impl CollectorState {
    pub(super) fn run(mut self, inbox: &Inbox<Self>) {
        crate::signals::block();
        let mut last_tick = Instant::now();
        loop {
            let next = match self.caught {
                CaughtWrites::Nothing => {
                    let next = inbox.recv();
                    last_tick = Instant::now();
                    next
                }
                // Jobs postpone a tick, but not the end of tracking: vCPUs with full rings and
                // throttled vCPUs send one job after the other until a tick stops the source.
                _ if last_tick.elapsed() >= PERIOD_MOST && self.tracker.subscribers() == 0 => {
                    Next::Nothing
                }
                _ => inbox.recv_timeout(self.until_next_tick()),
            };
            match next {
                Next::Job(job) => job(&mut self),
                Next::Nothing => {
                    self.tick();
                    last_tick = Instant::now();
                }
                Next::End => return,
            }
        }
    }

    /// Returns the time until the next periodic collection or check.
    fn until_next_tick(&self) -> Duration {
        let check = self.pacing.next_check();
        let left = check.map(|check| check.saturating_duration_since(Instant::now()));
        left.unwrap_or(self.period).min(self.period)
    }

    pub(super) fn subscribe(&mut self, name: String) -> Result<Subscription, CollectorError> {
        if self.caught != CaughtWrites::Everything {
            // Until the start has succeeded no subscriber may rely on any slot, and a tick has to
            // undo a partial start.
            self.caught = CaughtWrites::Partial;
            self.source.start()?;
            self.caught = CaughtWrites::Everything;
            self.unreported = CollectionReport::default();
            self.period = PERIOD_LEAST;
        }
        // The source already catches writes, so no write between the two calls is missed.
        Ok(self.tracker.subscribe(name)?)
    }

    /// Collects once, and adds the result to the unreported ones. Returns the number of frames
    /// collected.
    fn collect(&mut self) -> Result<u64, SourceError> {
        let collected = self.source.collect(&self.tracker);
        // Also after an error, so that the next check is not due immediately.
        self.pacing.harvested(self.source.dirtied(), Instant::now());
        if self.caught == CaughtWrites::Everything {
            self.peaks.record(self.source.harvested(), Instant::now());
        }
        let now = collected?;
        let ns = now.harvest_ns + now.reprotect_ns + now.insert_ns;
        self.times.observe(Duration::from_nanos(ns));
        self.overruns.fetch_add(now.overruns, Ordering::Relaxed);
        let sum = &mut self.unreported;
        sum.frames += now.frames;
        sum.overruns += now.overruns;
        sum.marked_all |= now.marked_all;
        sum.harvest_ns += now.harvest_ns;
        sum.reprotect_ns += now.reprotect_ns;
        sum.insert_ns += now.insert_ns;
        for (shared, frames) in self.dirtied.iter().zip(self.source.dirtied()) {
            shared.store(*frames, Ordering::Relaxed);
        }
        Ok(now.frames)
    }

    pub(super) fn report(&mut self) -> Result<CollectionReport, CollectorError> {
        if self.caught == CaughtWrites::Everything {
            self.collect()?;
        }
        Ok(std::mem::take(&mut self.unreported))
    }

    /// Collects for a vCPU that waits with a full ring, so that it can continue.
    pub(crate) fn relieve(&mut self, vcpu: u8) {
        self.period = PERIOD_LEAST;
        // Collect also without subscribers: a ring that was overrun stays full after the source was
        // stopped, until it has been harvested often enough.
        if let Err(e) = self.collect() {
            tracing::warn!("vCPU {vcpu} waits for room in its dirty ring, but {e}");
            // The vCPU finds its ring full again immediately. The sleep keeps this thread from
            // spinning.
            std::thread::sleep(PERIOD_LEAST);
        }
    }

    /// Answers a vCPU that has run for its slice after a stall, and now waits. `stalls` is the
    /// number of its stalls that were complete when it reported.
    pub(crate) fn end_slice(&mut self, vcpu: u8, stalls: u64) {
        if let Err(e) = self.collect() {
            tracing::warn!("the pages that vCPU {vcpu} has written cannot be counted yet: {e}");
        }
        self.pacing.reported(vcpu.into(), stalls, Instant::now());
    }

    /// Handles a timeout: stops the source if there are no subscribers left, and otherwise keeps
    /// the rings from filling.
    fn tick(&mut self) {
        if self.tracker.subscribers() == 0 {
            // No subscriber is left that a throttle could serve.
            self.pacing.set_rate(None, &[], Instant::now());
            let stopped = self.source.stop();
            self.peaks.clear();
            if let Err(e) = &stopped {
                tracing::warn!("dirty tracking cannot be stopped yet: {e}");
                self.period = (self.period * 2).min(PERIOD_MOST);
            }
            // After a failed stop, the next subscriber must not take a partly started source for a
            // whole one.
            self.caught =
                if stopped.is_ok() { CaughtWrites::Nothing } else { CaughtWrites::Partial };
            return;
        }
        match self.collect() {
            // Only rings fill. Reading a bitmap more often than requested costs the guest faults.
            Ok(frames) if frames >= self.many && self.source.mode() == TrackingMode::DirtyRing => {
                self.period = (self.period / 2).max(PERIOD_LEAST);
            }
            Ok(_) => self.period = (self.period * 2).min(PERIOD_MOST),
            Err(e) => tracing::warn!("dirty pages are not collected for now: {e}"),
        }
    }
}
