//! The rate limiters of a device: which queue waits for tokens, and the timer that wakes the
//! device's thread for it.
//!
//! Queues that share a limiter take turns. While one waits, the others wait for their turn: a
//! request that needs many tokens could otherwise be overtaken for ever by small ones.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::config::{LimitsChange, RateLimits};
use crate::devices::error::StateError;
use crate::devices::misfit::DeviceMisfit;
use crate::devices::rate_limit::{DeviceRateLimiter, SavedLimiter};
use crate::devices::stats::Counter;
use crate::devices::timer::Timer;

/// The clock of a device's limiters. It never goes backwards, and it is stopped while the device is
/// paused: neither a pause nor the time between save and restore refills a bucket.
#[derive(Debug, Default)]
struct LimiterClock {
    /// Time before the last resume, in nanoseconds.
    before_ns: u64,
    /// Moment of the last resume, if the device is not paused.
    resumed: Option<Instant>,
    /// Nanoseconds that a test sets.
    #[cfg(test)]
    fake_ns: Option<Arc<AtomicU64>>,
}

impl LimiterClock {
    fn now_ns(&self) -> u64 {
        #[cfg(test)]
        if let Some(ns) = &self.fake_ns {
            return ns.load(Ordering::SeqCst);
        }
        let running = self.resumed.map_or(0, |resumed| resumed.elapsed().as_nanos());
        self.before_ns.saturating_add(u64::try_from(running).unwrap_or(u64::MAX))
    }
}

/// The limiters of a device, in an order that the device defines.
#[derive(Debug)]
pub(crate) struct Limiters {
    limiters: Vec<Limiter>,
    /// Whether the configuration has limits. If so, the state has limiters even after the limits
    /// were removed.
    configured: bool,
    clock: LimiterClock,
    /// Readable when the next turn is due. `None` if the device has no limiters.
    timer: Option<Timer>,
    /// The number of times that each limiter has made a queue wait.
    throttles: Arc<[Counter]>,
}

/// One limiter.
#[derive(Debug)]
struct Limiter {
    rate: DeviceRateLimiter,
    /// Queues that wait for tokens, in the order of their turns. Usually there are none.
    waiting: VecDeque<usize>,
    /// Time at which the first of them has its tokens, if it has been asked since its turn came.
    due_ns: Option<u64>,
}

impl Limiter {
    fn enqueue(&mut self, queue: usize) {
        if !self.waiting.contains(&queue) {
            self.waiting.push_back(queue);
        }
    }
}

impl Limiters {
    /// Creates the limiters of a paused device with these limits. A limiter without limits can get
    /// some later.
    pub(super) fn new(limits: &[RateLimits]) -> io::Result<Self> {
        let limiter = |limits: &RateLimits| Limiter {
            rate: DeviceRateLimiter::new(*limits, 0),
            waiting: VecDeque::new(),
            due_ns: None,
        };
        let timer = if limits.is_empty() { None } else { Some(Timer::new()?) };
        let (limiters, clock) = (limits.iter().map(limiter).collect(), LimiterClock::default());
        let configured = limits.iter().any(|limits| !limits.is_none());
        let throttles = limits.iter().map(|_| Counter::default()).collect();
        Ok(Self { limiters, configured, clock, timer, throttles })
    }

    /// Returns the counters of how many times each limiter has made a queue wait.
    pub(super) fn throttles(&self) -> &Arc<[Counter]> {
        &self.throttles
    }

    /// Returns the timer to watch.
    pub(super) fn timer(&self) -> Option<&Timer> {
        self.timer.as_ref()
    }

    /// Stops the clock.
    pub(super) fn pause(&mut self) {
        self.clock.before_ns = self.clock.now_ns();
        self.clock.resumed = None;
    }

    /// Starts the clock.
    pub(super) fn resume(&mut self) {
        self.clock.resumed = Some(Instant::now());
    }

    /// Takes the tokens for one operation of queue `queue` that moves `bytes`. If there are too
    /// few, returns `false` and takes nothing: the device leaves the chain in the queue, and
    /// [`Device::process`](super::Device::process) is called again when there may be enough.
    pub(crate) fn admit(&mut self, limiter: usize, queue: usize, bytes: u64) -> bool {
        let is_admitted = self.takes_tokens(limiter, queue, bytes);
        if let Some(throttles) = self.throttles.get(limiter).filter(|_| !is_admitted) {
            throttles.add(1);
        }
        is_admitted
    }

    fn takes_tokens(&mut self, limiter: usize, queue: usize, bytes: u64) -> bool {
        let Some(limiter) = self.limiters.get_mut(limiter).filter(|l| !l.rate.is_off()) else {
            return true;
        };
        if limiter.waiting.front().is_some_and(|first| *first != queue) {
            limiter.enqueue(queue);
            return false;
        }
        let now_ns = self.clock.now_ns();
        let taken = limiter.rate.take(bytes, now_ns);
        limiter.due_ns = match taken {
            Ok(()) => {
                limiter.waiting.pop_front();
                // The next queue's turn has come.
                (!limiter.waiting.is_empty()).then_some(now_ns)
            }
            Err(wait_ns) => {
                limiter.enqueue(queue);
                Some(now_ns.saturating_add(wait_ns))
            }
        };
        if limiter.due_ns.is_some() {
            self.arm(now_ns);
        }
        taken.is_ok()
    }

    /// Returns whether queue `queue` waits and its turn has not come, so that asking is of no use.
    pub(crate) fn must_wait(&self, limiter: usize, queue: usize) -> bool {
        let Some(limiter) = self.limiters.get(limiter) else { return false };
        limiter.waiting.contains(&queue)
            && (limiter.waiting.front() != Some(&queue)
                || limiter.due_ns.is_some_and(|due_ns| due_ns > self.clock.now_ns()))
    }

    /// Arms the timer for the next turn of any limiter.
    fn arm(&self, now_ns: u64) {
        let Some(due_ns) = self.limiters.iter().filter_map(|limiter| limiter.due_ns).min() else {
            return;
        };
        let wait = Duration::from_nanos(due_ns.saturating_sub(now_ns));
        if let Some(Err(e)) = self.timer.as_ref().map(|timer| timer.set(wait)) {
            tracing::error!("a device with a rate limit stays idle until it is notified: {e}");
        }
    }

    /// Handles a readiness event of the timer.
    pub(super) fn take_expiry(&self) {
        if let Some(Err(e)) = self.timer.as_ref().map(Timer::take) {
            tracing::error!("the timer of a device's rate limits cannot be read: {e}");
        }
    }

    /// Forgets which queues wait: the driver has taken its queues back.
    pub(super) fn forget_waiting(&mut self) {
        for limiter in &mut self.limiters {
            limiter.waiting.clear();
            limiter.due_ns = None;
        }
    }

    /// Returns the turns to give now: for each queue that waits, the index of its limiter.
    pub(super) fn turns(&self) -> Vec<usize> {
        let each = self.limiters.iter().enumerate();
        each.flat_map(|(i, limiter)| limiter.waiting.iter().map(move |_| i)).collect()
    }

    /// Begins the turn of the first queue that waits for the limiter. Returns the queue, which the
    /// caller processes, or `None` if the queue's tokens are not there yet.
    pub(super) fn begin_turn(&mut self, limiter: usize) -> Option<usize> {
        let now_ns = self.clock.now_ns();
        let limiter = self.limiters.get_mut(limiter)?;
        if limiter.due_ns.is_some_and(|due_ns| due_ns > now_ns) {
            return None;
        }
        limiter.due_ns = None;
        limiter.waiting.front().copied()
    }

    /// Ends the turn of `queue`, which has been processed.
    pub(super) fn end_turn(&mut self, limiter: usize, queue: usize) {
        let Some(limiter) = self.limiters.get_mut(limiter) else { return };
        if limiter.due_ns.is_none() && limiter.waiting.front() == Some(&queue) {
            // It had no request left.
            limiter.waiting.pop_front();
        }
    }

    /// Arms the timer for the queues whose turns are still to come.
    pub(super) fn await_turns(&mut self) {
        let now_ns = self.clock.now_ns();
        for limiter in self.limiters.iter_mut().filter(|limiter| !limiter.waiting.is_empty()) {
            limiter.due_ns.get_or_insert(now_ns);
        }
        self.arm(now_ns);
    }

    /// Returns the limits in effect.
    pub(super) fn limits(&self) -> Vec<RateLimits> {
        self.limiters.iter().map(|limiter| limiter.rate.limits()).collect()
    }

    /// Changes the limits of the first limiters. The caller then gives the queues that wait their
    /// turns.
    pub(super) fn change(&mut self, changes: &[LimitsChange]) {
        let now_ns = self.clock.now_ns();
        for (limiter, change) in self.limiters.iter_mut().zip(changes) {
            limiter.rate.change(change, now_ns);
            limiter.due_ns = None;
        }
    }

    /// Returns the limiters' states; nothing if the device neither has limits nor was built with
    /// some.
    pub(super) fn save(&self) -> Vec<SavedLimiter> {
        if !self.configured && self.limiters.iter().all(|limiter| limiter.rate.is_off()) {
            return Vec::new();
        }
        let now_ns = self.clock.now_ns();
        self.limiters.iter().map(|limiter| limiter.rate.save(now_ns)).collect()
    }

    /// Restores states from [`save`](Self::save). They are hostile. `device` is the device's name
    /// in errors.
    pub(super) fn restore(
        &mut self,
        saved: &[SavedLimiter],
        device: &str,
    ) -> Result<(), StateError> {
        if saved.is_empty() {
            return Ok(());
        }
        if saved.len() != self.limiters.len() {
            let (found, here) = (saved.len(), self.limiters.len());
            return Err(DeviceMisfit::Limiters { found, device: device.to_owned(), here }.into());
        }
        let now_ns = self.clock.now_ns();
        for (limiter, saved) in self.limiters.iter_mut().zip(saved) {
            limiter.rate = DeviceRateLimiter::restored(saved, now_ns, device)?;
        }
        Ok(())
    }

    /// Replaces the clock, before the first request.
    #[cfg(test)]
    pub(super) fn use_clock(&mut self, ns: Arc<AtomicU64>) {
        self.clock.fake_ns = Some(ns);
    }
}
