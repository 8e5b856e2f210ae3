//! A timer that a device's thread polls like any file.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// Timer that is readable after it has expired. Reading it never blocks, because it may have been
/// cleared after it was reported as readable.
#[derive(Debug)]
pub(super) struct Timer(OwnedFd);

impl Timer {
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Arms the timer to expire once, after `wait`. A `wait` of zero expires almost immediately.
    pub(super) fn set(&self, wait: Duration) -> io::Result<()> {
        self.arm(wait.max(Duration::from_nanos(1)))
    }

    /// Disarms the timer.
    pub(super) fn clear(&self) -> io::Result<()> {
        self.arm(Duration::ZERO)
    }

    fn arm(&self, wait: Duration) -> io::Result<()> {
        let once = Itimerspec {
            it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: Timespec {
                tv_sec: wait.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: wait.subsec_nanos().into(),
            },
        };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }

    /// Returns whether the timer has expired since it was set.
    pub(super) fn take(&self) -> io::Result<bool> {
        match rustix::io::read(&self.0, &mut [0; 8]) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
