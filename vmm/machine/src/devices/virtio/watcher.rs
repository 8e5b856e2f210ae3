//! What a device's thread waits for: commands, its queues' notifications, and the files behind the
//! device.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Events taken at once.
const MOST: usize = 32;
const COMMAND: u64 = u64::MAX;
const QUEUE: u64 = 1 << 32;

/// An event that the thread was woken by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// A command waits in the channel.
    Command,
    /// The driver has notified this queue.
    Queue(usize),
    /// A file that the device watches, by its token, is ready for this.
    Backend(u32, EventSet),
}

/// The files that a device's thread waits for. Level-triggered unless a device asks for edges: a
/// file that stays ready is reported again, so a device that cannot do anything about it stops
/// watching it.
#[derive(Debug)]
pub(crate) struct Watcher {
    epoll: Epoll,
}

impl Watcher {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { epoll: Epoll::new()? })
    }

    pub(super) fn watch_commands(&self, fd: &impl AsRawFd) -> io::Result<()> {
        self.control(ControlOperation::Add, fd, EventSet::IN, COMMAND)
    }

    pub(super) fn watch_queue(&self, fd: &impl AsRawFd, queue: usize) -> io::Result<()> {
        self.control(ControlOperation::Add, fd, EventSet::IN, QUEUE | queue as u64)
    }

    /// Calls [`Device::backend_ready`](super::Device::backend_ready) with `token` whenever `fd` is
    /// ready for one of `events`.
    pub(crate) fn watch(&self, fd: &impl AsRawFd, events: EventSet, token: u32) -> io::Result<()> {
        self.control(ControlOperation::Add, fd, events, token.into())
    }

    /// Changes what a file that is watched already is watched for.
    #[allow(dead_code, reason = "devices whose files are not always of interest use it")]
    pub(crate) fn rewatch(
        &self,
        fd: &impl AsRawFd,
        events: EventSet,
        token: u32,
    ) -> io::Result<()> {
        self.control(ControlOperation::Modify, fd, events, token.into())
    }

    /// Stops watching a file.
    #[allow(dead_code, reason = "devices whose files come and go use it")]
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

    /// The events that there are now.
    #[cfg(any(test, fuzzing))]
    pub(super) fn look(&self) -> io::Result<Vec<Event>> {
        self.wait_at_most(0)
    }

    /// Waits for events, as many milliseconds; a negative number is for ever.
    fn wait_at_most(&self, ms: i32) -> io::Result<Vec<Event>> {
        let mut events = [EpollEvent::default(); MOST];
        let count = loop {
            match self.epoll.wait(ms, &mut events) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        let event = |e: &EpollEvent| match e.data() {
            COMMAND => Event::Command,
            data if data & QUEUE != 0 => Event::Queue((data & !QUEUE) as usize),
            data => Event::Backend(data as u32, e.event_set()),
        };
        Ok(events[..count].iter().map(event).collect())
    }
}
