//! The events that a device's thread waits for: jobs, notifications of its queues, the timer of its
//! rate limits, and files of the device's backend.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Maximum number of events taken in one call.
const MAX_EVENTS: usize = 32;
const JOB: u64 = u64::MAX;
const TURN: u64 = u64::MAX - 1;
const QUEUE: u64 = 1 << 32;

/// An event that woke the thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// The inbox has a job.
    Job,
    /// The driver has notified this queue.
    Queue(usize),
    /// The turn of a queue that waits for a rate limit is due.
    Turn,
    /// The watched file with this token is ready for these events.
    Backend(u32, EventSet),
}

/// The files that a device's thread waits for. They are level-triggered unless a device asks for
/// edges. A file that stays ready is reported again and again, so a device that can do nothing
/// about it must stop watching it.
#[derive(Debug)]
pub(crate) struct Watcher {
    epoll: Epoll,
}

impl Watcher {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { epoll: Epoll::new()? })
    }

    pub(super) fn watch_jobs(&self, fd: &impl AsRawFd) -> io::Result<()> {
        self.control(ControlOperation::Add, fd, EventSet::IN, JOB)
    }

    pub(super) fn watch_queue(&self, fd: &impl AsRawFd, queue: usize) -> io::Result<()> {
        self.control(ControlOperation::Add, fd, EventSet::IN, QUEUE | queue as u64)
    }

    pub(super) fn watch_turns(&self, timer: &impl AsRawFd) -> io::Result<()> {
        self.control(ControlOperation::Add, timer, EventSet::IN, TURN)
    }

    /// Calls [`Device::backend_ready`](super::Device::backend_ready) with `token` whenever `fd` is
    /// ready for one of `events`.
    pub(crate) fn watch(&self, fd: &impl AsRawFd, events: EventSet, token: u32) -> io::Result<()> {
        self.control(ControlOperation::Add, fd, events, token.into())
    }

    /// Stops watching a file.
    pub(crate) fn unwatch(&self, fd: &impl AsRawFd) -> io::Result<()> {
        self.control(ControlOperation::Delete, fd, EventSet::empty(), 0)
    }

    fn control(
        &self,
        operation: ControlOperation,
        fd: &impl AsRawFd,
        events: EventSet,
        data: u64,
    ) -> io::Result<()> {
        let fd: RawFd = fd.as_raw_fd();
        self.epoll.ctl(operation, fd, EpollEvent::new(events, data))
    }

    /// Waits for events.
    pub(super) fn wait(&self) -> io::Result<Vec<Event>> {
        self.wait_at_most(-1)
    }

    /// Returns the events that are pending now.
    #[cfg(any(test, fuzzing))]
    pub(super) fn poll(&self) -> io::Result<Vec<Event>> {
        self.wait_at_most(0)
    }

    /// Waits for events for at most `ms` milliseconds; without limit if `ms` is negative.
    fn wait_at_most(&self, ms: i32) -> io::Result<Vec<Event>> {
        let mut events = [EpollEvent::default(); MAX_EVENTS];
        let count = loop {
            match self.epoll.wait(ms, &mut events) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        let event = |e: &EpollEvent| match e.data() {
            JOB => Event::Job,
            TURN => Event::Turn,
            data if data & QUEUE != 0 => Event::Queue((data & !QUEUE) as usize),
            data => Event::Backend(data as u32, e.event_set()),
        };
        Ok(events[..count].iter().map(event).collect())
    }
}
