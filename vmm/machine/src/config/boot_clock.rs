//! When the start of a guest was requested.

use std::time::{Duration, Instant};

/// The time at which a guest's start was requested, and the processor time that this process had
/// used by then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BootClock {
    wall: Instant,
    cpu: Duration,
}

impl BootClock {
    /// Returns the clock of a start that is requested now.
    pub fn start() -> Self {
        Self { wall: Instant::now(), cpu: cpu_time() }
    }

    /// Returns the time and the processor time since the request.
    pub(crate) fn elapsed(&self) -> (Duration, Duration) {
        (self.wall.elapsed(), cpu_time().saturating_sub(self.cpu))
    }
}

/// Returns the processor time that this process has used.
fn cpu_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // The first call of rustix's function would make a system call that threads may not make.
    // SAFETY: the kernel writes the time there.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut now) };
    // The kernel returns neither negative times nor more than a second of nanoseconds.
    Duration::new(now.tv_sec.try_into().unwrap_or(0), now.tv_nsec.try_into().unwrap_or(0))
}
