//! What only one host may hold of a guest on threads: the right to run, and its memory.

use std::time::Duration;

use driftline_guest::{GuestError, HandOver, NextHost, SharedGuest};

use super::machine::ThreadMachine;

impl HandOver for ThreadMachine {
    fn stay_awake(&self) {
        // No vCPU waits for an interrupt here.
    }

    fn share(&self) -> Result<SharedGuest, GuestError> {
        self.memory.share()
    }

    fn flush(&self, _: Duration) -> Result<bool, GuestError> {
        // This backend has no disks.
        Ok(true)
    }

    fn release(&self, _: NextHost) -> Result<(), GuestError> {
        self.require_paused("release the resources of").map(drop)
    }

    fn detach(&self, _: NextHost) -> Result<Vec<u8>, GuestError> {
        // No peer can reach this guest.
        self.require_paused("detach").map(|_| Vec::new())
    }

    fn attach(&self, _: &[u8]) {
        // No peer can reach this guest.
    }

    fn acquire(&self) -> Result<(), GuestError> {
        self.memory.right().keep()?;
        self.require_paused("take the resources of").map(drop)
    }
}
