//! A guest that calls a test's function before it releases its disks or detaches from its networks.

use std::sync::Arc;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, Layout, Subscription};
use driftline_guest::testing::MemoryGuest;
use driftline_guest::{
    Clock, CollectionReport, DirtyLog, GuestContents, GuestError, GuestIdentity, GuestRam,
    HandOver, Lifecycle, Line, NextHost, Populate, RunState, Section, SharedGuest, Stateful,
    VcpuWrites, VmId, WriteThrottle,
};

pub struct HookedGuest {
    guest: Arc<MemoryGuest>,
    hook: Box<dyn Fn(&'static str) + Send + Sync>,
}

impl HookedGuest {
    /// Calls `hook` with "release" or "detach".
    pub fn new(
        guest: Arc<MemoryGuest>,
        hook: impl Fn(&'static str) + Send + Sync + 'static,
    ) -> Self {
        Self { guest, hook: Box::new(hook) }
    }
}

driftline_guest::delegate!(
    HookedGuest as hooked => *hooked.guest;
    GuestIdentity, GuestContents, Populate, DirtyLog, WriteThrottle, Lifecycle, Stateful,
);

impl HandOver for HookedGuest {
    fn stay_awake(&self) {
        self.guest.stay_awake();
    }
    fn share(&self) -> Result<SharedGuest, GuestError> {
        self.guest.share()
    }
    fn flush(&self, limit: Duration) -> Result<bool, GuestError> {
        self.guest.flush(limit)
    }
    fn release(&self, next: NextHost) -> Result<(), GuestError> {
        (self.hook)("release");
        self.guest.release(next)
    }
    fn detach(&self, next: NextHost) -> Result<Vec<u8>, GuestError> {
        (self.hook)("detach");
        self.guest.detach(next)
    }
    fn attach(&self, late: &[u8]) {
        self.guest.attach(late);
    }
    fn acquire(&self) -> Result<(), GuestError> {
        self.guest.acquire()
    }
}
