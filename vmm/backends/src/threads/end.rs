//! The end of a guest: set once; any number of threads can wait for it.

use std::time::Duration;

use driftline_machine::vm::EndReason;
use parking_lot::{Condvar, Mutex, MutexGuard};

#[derive(Debug, Default)]
struct EndState {
    done_workers: u32,
    reason: Option<EndReason>,
}

/// Whether and why the guest has ended.
#[derive(Debug, Default)]
pub(super) struct GuestEnd {
    ending: Mutex<EndState>,
    changed: Condvar,
}

impl GuestEnd {
    /// Ends the guest, unless it has ended already.
    pub(super) fn set(&self, reason: EndReason) {
        let mut ending = self.lock();
        if ending.reason.is_none() {
            ending.reason = Some(reason);
            self.changed.notify_all();
        }
    }

    /// Counts one of `all` workers as done. The last one powers the guest off.
    pub(super) fn worker_done(&self, all: u32) {
        let mut ending = self.lock();
        ending.done_workers += 1;
        if ending.done_workers == all && ending.reason.is_none() {
            ending.reason = Some(EndReason::PowerOff);
            self.changed.notify_all();
        }
    }

    /// Returns why the guest has ended, or `None` while it has not.
    pub(super) fn reason(&self) -> Option<EndReason> {
        self.lock().reason.clone()
    }

    /// Blocks until the guest has ended, and returns why, or until `timeout` has passed (then
    /// `None`).
    pub(super) fn wait(&self, timeout: Option<Duration>) -> Option<EndReason> {
        let mut ending = self.lock();
        let is_running = |e: &mut EndState| e.reason.is_none();
        match timeout {
            None => self.changed.wait_while(&mut ending, is_running),
            Some(timeout) => _ = self.changed.wait_while_for(&mut ending, is_running, timeout),
        }
        ending.reason.clone()
    }

    fn lock(&self) -> MutexGuard<'_, EndState> {
        self.ending.lock()
    }
}
