//! The guest's clock on the threads backend: the host's monotonic clock plus an offset.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Guest time in nanoseconds. It advances while the guest is paused, as it does under KVM: the
/// guest sees a pause as a gap.
#[derive(Debug)]
pub(super) struct GuestClock {
    origin: Instant,
    /// Guest time at `origin`, modulo 2^64.
    base_ns: AtomicU64,
}

impl GuestClock {
    /// Returns a clock that starts at zero.
    pub(super) fn new() -> Self {
        Self { origin: Instant::now(), base_ns: AtomicU64::new(0) }
    }

    /// Returns the current guest time in nanoseconds.
    pub(super) fn now_ns(&self) -> u64 {
        self.base_ns.load(Ordering::Relaxed).wrapping_add(self.elapsed_ns())
    }

    /// Sets the current guest time to `now_ns`.
    pub(super) fn set(&self, now_ns: u64) {
        self.base_ns.store(now_ns.wrapping_sub(self.elapsed_ns()), Ordering::Relaxed);
    }

    fn elapsed_ns(&self) -> u64 {
        nanos(self.origin.elapsed())
    }
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}
