//! Limits the rate of a migration: after each message the sender waits until the next one is due.

use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use crate::transport::wait;

/// A rate limit without credit for unused time. All channels of a migration share one.
#[derive(Debug)]
pub(super) struct RateLimiter(Mutex<RateLimiterState>);

#[derive(Debug)]
struct RateLimiterState {
    /// Bytes/s; `None`: no limit.
    rate: Option<u64>,
    /// Time at which the next message is due.
    next: Instant,
}

impl RateLimiter {
    pub(super) fn new(rate: Option<u64>) -> Self {
        Self(Mutex::new(RateLimiterState {
            rate: rate.filter(|rate| *rate > 0),
            next: Instant::now(),
        }))
    }

    fn state(&self) -> MutexGuard<'_, RateLimiterState> {
        self.0.lock()
    }

    /// Lifts the limit.
    pub(super) fn lift(&self) {
        self.state().rate = None;
    }

    /// Starts a pass, without credit or debt from the time before.
    pub(super) fn begin(&self) {
        let mut state = self.state();
        state.next = state.next.max(Instant::now());
    }

    /// Waits, after `bytes` were sent, until the next message is due or `is_over` returns true.
    pub(super) fn pace(&self, bytes: u64, is_over: impl Fn() -> bool) {
        let next = self.state().due(bytes, Instant::now());
        wait::sleep_until(next, || is_over().then_some(()));
    }
}

impl RateLimiterState {
    /// Returns the time at which the next message is due, after `bytes` that were sent until `now`.
    fn due(&mut self, bytes: u64, now: Instant) -> Instant {
        let Some(rate) = self.rate else { return now };
        let takes = Duration::from_secs_f64((bytes as f64 / rate as f64).min(3600.0));
        // Idle time counts for no more than this message's own share.
        let from = self.next.max(now.checked_sub(takes).unwrap_or(now));
        self.next = from + takes;
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_gives_no_credit() {
        let rate_limiter = RateLimiter::new(Some(1000));
        let mut state = rate_limiter.state();
        let begun = state.next;
        let ms = Duration::from_millis;
        assert_eq!(state.due(500, begun), begun + ms(500));
        assert_eq!(state.due(500, begun + ms(500)), begun + ms(1000));
        // A link as slow as the rate is not slowed down.
        assert_eq!(state.due(500, begun + ms(1500)), begun + ms(1500));
        let later = begun + ms(9000);
        assert_eq!(state.due(500, later), later, "one message is free");
        assert_eq!(state.due(500, later), later + ms(500), "the next one waits");
        drop(state);
        rate_limiter.lift();
        assert_eq!(rate_limiter.state().due(u64::MAX, later), later);
    }

    #[test]
    fn a_stop_ends_the_wait() {
        let begun = Instant::now();
        let rate_limiter = RateLimiter::new(Some(1));
        rate_limiter.pace(1 << 40, || begun.elapsed() > Duration::from_millis(100));
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
