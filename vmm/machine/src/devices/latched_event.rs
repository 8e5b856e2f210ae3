//! An event that one thread signals and another thread polls like any file.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

/// Event that stays readable from a signal until it is cleared.
#[derive(Debug)]
pub(super) struct LatchedEvent(OwnedFd);

impl LatchedEvent {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
    }

    pub(super) fn signal(&self) {
        // Fails only if the counter is at its maximum: then the event is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(super) fn clear(&self) {
        // Fails only if the event is not readable.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for LatchedEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
