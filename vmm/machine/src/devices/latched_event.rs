//! An event that one thread, or the kernel, signals and another one polls like any file.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Event that stays readable from a signal until it is cleared.
#[derive(Debug)]
pub(crate) struct LatchedEvent(EventFd);

impl LatchedEvent {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?))
    }

    pub(super) fn signal(&self) {
        // Fails only if the counter is at its maximum: then the event is readable already.
        let _ = self.0.write(1);
    }

    /// Clears the event. Returns whether it was signaled.
    pub(super) fn clear(&self) -> bool {
        // Fails only if the event is not readable.
        self.0.read().is_ok()
    }

    /// Returns the descriptor, which KVM signals or waits for.
    pub(super) fn descriptor(&self) -> &EventFd {
        &self.0
    }
}

impl AsRawFd for LatchedEvent {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for LatchedEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open for as long as the event that is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}
