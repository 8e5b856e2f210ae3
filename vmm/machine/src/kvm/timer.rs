//! A timer that makes the thread that created it leave `KVM_RUN`, repeatedly until it is stopped. A
//! signal that arrives between the thread's check of the clock and `KVM_RUN` has no effect; the
//! next one makes up for it.

use std::io;
use std::ptr;
use std::time::Duration;

use libc::{itimerspec, sigevent, timer_t, timespec};
use vmm_sys_util::signal::SIGRTMIN;

/// Timer of the thread that created it, stopped at first. It sends the same signal as a kick.
#[derive(Debug)]
pub struct ExitTimer(timer_t);

// SAFETY: a timer is a number to the kernel, and belongs to the process.
unsafe impl Send for ExitTimer {}

impl ExitTimer {
    /// Creates a timer for the calling thread.
    pub fn new() -> io::Result<Self> {
        // SAFETY: all zeros is a sigevent.
        let mut event: sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = SIGRTMIN();
        event.sigev_notify_thread_id = rustix::thread::gettid().as_raw_pid();
        let mut timer = ptr::null_mut();
        // SAFETY: both pointers are to local values that outlive the call.
        let made = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) };
        if made == 0 { Ok(Self(timer)) } else { Err(io::Error::last_os_error()) }
    }

    /// Starts the timer: it fires every `interval` from now on.
    pub fn start(&self, interval: Duration) -> io::Result<()> {
        self.set(interval)
    }

    /// Stops the timer.
    pub fn stop(&self) -> io::Result<()> {
        self.set(Duration::ZERO)
    }

    fn set(&self, interval: Duration) -> io::Result<()> {
        let time = timespec {
            tv_sec: interval.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: interval.subsec_nanos().into(),
        };
        let value = itimerspec { it_interval: time, it_value: time };
        // SAFETY: the timer lives as long as self, and the value as long as the call.
        let set = unsafe { libc::timer_settime(self.0, 0, &value, ptr::null_mut()) };
        if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for ExitTimer {
    fn drop(&mut self) {
        // SAFETY: this struct owns the timer, and no code uses it after this.
        unsafe { libc::timer_delete(self.0) };
    }
}
