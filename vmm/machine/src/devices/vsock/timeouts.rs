//! Limits in time and in open files. A connection ends if its guest does not answer in time. The
//! number of connections depends on how many files the process may open. Programs wait at the
//! listening socket while no file is left.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::EventSet;

use super::bounds::MAX_NEW_PROGRAMS;
use super::connection::{self, Connection, ConnectionOutcome};
use super::{LISTENER, Vsock};
use crate::devices::virtio::Watcher;

/// Retry interval for accepting programs after the system had no room for one.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

impl Vsock {
    /// Watches the listening socket if it exists and no retry is pending.
    pub(super) fn watch_listener(&mut self, watcher: &Watcher) -> io::Result<()> {
        let closed = self.listener_watched || self.accept_retry.is_some();
        if let Some(listener) = self.listener.as_ref().filter(|_| !closed) {
            watcher.watch(listener.listener(), EventSet::IN, LISTENER)?;
            self.listener_watched = true;
        }
        Ok(())
    }

    /// Ends the connections whose guest has exceeded its deadline at `now`. While the packets for
    /// the guest wait for the acknowledgement of a reset, the guest cannot answer, and none ends.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.reset_deadline.is_some() {
            return;
        }
        while let Some((deadline, token)) = self.deadlines.pop_front_if(|(at, _)| *at <= now) {
            let still = self.connections.get(&token).and_then(Connection::deadline);
            if still == Some(deadline) {
                self.apply_outcome(token, ConnectionOutcome::Reset);
            }
        }
    }

    /// Restarts the deadline of each connection that waits for the guest.
    pub(super) fn restart_answer_deadlines(&mut self) {
        self.deadlines.clear();
        let tokens: Vec<u32> = self.connections.keys().copied().collect();
        for token in tokens {
            let Some(connection) = self.connections.get_mut(&token) else { continue };
            connection.restart_deadline();
            self.queue_for_sending(token);
        }
    }

    /// Sets the timer if something is due later, and not after the time for which it is set.
    pub(super) fn set_timer(&mut self) {
        let answer = self.deadlines.front().map(|(at, _)| *at);
        // No answer is due before the acknowledgement of a reset.
        let due = self.reset_deadline.or(answer).into_iter().chain(self.accept_retry);
        let Some(at) = due.min() else { return };
        // A timer that expires too early finds nothing to do and is set again.
        if self.timer_at.is_none_or(|set| at < set) {
            match self.timer.set(at.saturating_duration_since(Instant::now())) {
                Ok(()) => self.timer_at = Some(at),
                Err(e) => tracing::debug!("vsock: no timer: {e}"),
            }
        }
    }

    /// Handles a readiness event of the timer, which may be outdated.
    pub(super) fn tick(&mut self, watcher: &Watcher) {
        // Fails only if the file is not a timer.
        if self.timer.take().unwrap_or(true) {
            self.timer_at = None;
        }
        self.expire(Instant::now());
        if self.accept_retry.is_some_and(|at| at <= Instant::now()) {
            self.accept_retry = None;
            self.try_watch_listener(watcher);
        }
    }

    /// Watches the listening socket like [`watch_listener`](Self::watch_listener), for a running
    /// device: logs an error instead of returning it.
    pub(super) fn try_watch_listener(&mut self, watcher: &Watcher) {
        if let Err(e) = self.watch_listener(watcher) {
            tracing::error!("the vsock's unix socket cannot be watched: {e}");
        }
    }

    /// Accepts programs that want a connection.
    pub(super) fn accept_programs(&mut self, watcher: &Watcher) {
        // Accepts at most as many as may wait, so that a program that connects in a loop does not
        // delay other work.
        for _ in 0..MAX_NEW_PROGRAMS {
            let Some(listener) = &self.listener else { return };
            let stream = match listener.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(e) => {
                    // The program stays in the listen queue. A watch would report it again and
                    // again.
                    tracing::debug!("vsock: a program is not accepted for now: {e}");
                    let unwatched = watcher.unwatch(listener.listener());
                    self.listener_watched &= unwatched.is_err();
                    self.accept_retry = Some(Instant::now() + ACCEPT_RETRY);
                    return;
                }
            };
            if self.new_programs.len() >= MAX_NEW_PROGRAMS {
                let oldest = self.new_programs.pop_front();
                oldest.iter().for_each(|(_, stream)| connection::close(stream));
            }
            if let Ok(token) = self.watch(&stream, watcher) {
                self.new_programs.push_back((token, Arc::new(stream)));
            }
        }
    }
}
