//! What the device has only so much of, patience and open files: connections end whose guest does
//! not answer, there are as many as the process may have files for, and programs wait at the door
//! while there is none.

use std::io;
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::EventSet;

use super::bounds::MAX_CALLERS;
use super::connection::{Connection, Fate};
use super::{DOOR, Vsock};
use crate::devices::virtio::Watcher;

/// After this long programs are let in again that the system had no room for.
const DOOR_RETRY: Duration = Duration::from_secs(1);

impl Vsock {
    /// Watches the door, if it is there and not left alone for a while.
    pub(super) fn watch_door(&mut self, watcher: &Watcher) -> io::Result<()> {
        let closed = self.door_watched || self.door_retry.is_some();
        if let Some(door) = self.door.as_ref().filter(|_| !closed) {
            watcher.watch(door.listener(), EventSet::IN, DOOR)?;
            self.door_watched = true;
        }
        Ok(())
    }

    /// Ends the connections that the guest has kept waiting for too long.
    fn expire(&mut self) {
        let now = Instant::now();
        while let Some((deadline, token)) = self.deadlines.pop_front_if(|(at, _)| *at <= now) {
            let still = self.connections.get(&token).and_then(Connection::deadline);
            if still == Some(deadline) {
                self.settle(token, Fate::Reset);
            }
        }
    }

    /// Sets the timer, if something is to be done after a while and it is not set yet.
    pub(super) fn set_timer(&mut self) {
        let first = self.deadlines.front().map(|(at, _)| *at);
        let Some(at) = first.into_iter().chain(self.door_retry).min() else { return };
        // One that comes too early finds nothing to do, and is set again.
        if !self.timer_set {
            match self.timer.set(at.saturating_duration_since(Instant::now())) {
                Ok(()) => self.timer_set = true,
                Err(e) => tracing::debug!("vsock: no timer: {e}"),
            }
        }
    }

    /// The timer's time has come, or had.
    pub(super) fn tick(&mut self, watcher: &Watcher) {
        // It fails only for a file that is no timer.
        self.timer_set &= !self.timer.take().unwrap_or(true);
        self.expire();
        if self.door_retry.is_some_and(|at| at <= Instant::now()) {
            self.door_retry = None;
            self.try_watch_door(watcher);
        }
    }

    /// As [`watch_door`](Self::watch_door), of a device that works.
    pub(super) fn try_watch_door(&mut self, watcher: &Watcher) {
        if let Err(e) = self.watch_door(watcher) {
            tracing::error!("the vsock's unix socket cannot be watched: {e}");
        }
    }

    /// Lets in programs that want to be connected.
    pub(super) fn let_in(&mut self, watcher: &Watcher) {
        // As many as may wait: a program that comes in a loop does not hold up the rest.
        for _ in 0..MAX_CALLERS {
            let Some(door) = &self.door else { return };
            let stream = match door.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(e) => {
                    // It stays at the door: looking at it would find it there for ever.
                    tracing::debug!("vsock: a program is not let in for now: {e}");
                    let unwatched = watcher.unwatch(door.listener());
                    self.door_watched &= unwatched.is_err();
                    self.door_retry = Some(Instant::now() + DOOR_RETRY);
                    return;
                }
            };
            if self.callers.len() >= MAX_CALLERS {
                self.callers.pop_front();
            }
            if let Ok(token) = self.watch(&stream, watcher) {
                self.callers.push_back((token, stream));
            }
        }
    }
}
