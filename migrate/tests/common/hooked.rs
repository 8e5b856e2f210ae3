//! A guest that does something of a test's before it lets go of what only one host may hold, or of
//! what peers reach it by.

use std::sync::Arc;
use std::time::Duration;

use driftline_dirty_tracker::{Collected, FrameRun, Layout, Subscription};
use driftline_guest::testing::MemoryGuest;
use driftline_guest::{
    Clock, Guest, GuestError, GuestRam, Line, RunState, Section, VcpuWrites, VmId,
};

pub struct Hooked {
    guest: Arc<MemoryGuest>,
    hook: Box<dyn Fn(&'static str) + Send + Sync>,
}

impl Hooked {
    /// `hook` is told which of the two it is: `release` or `detach`.
    pub fn new(
        guest: Arc<MemoryGuest>,
        hook: impl Fn(&'static str) + Send + Sync + 'static,
    ) -> Self {
        Self { guest, hook: Box::new(hook) }
    }
}

impl Guest for Hooked {
    fn vm_id(&self) -> VmId {
        self.guest.vm_id()
    }
    fn line(&self) -> Line {
        self.guest.line()
    }
    fn config(&self) -> Vec<u8> {
        self.guest.config()
    }
    fn layout(&self) -> &Layout {
        self.guest.layout()
    }
    fn ram(&self) -> &GuestRam {
        self.guest.ram()
    }
    fn prepare(&self, frames: FrameRun) {
        self.guest.prepare(frames);
    }
    fn populated(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.guest.populated()
    }
    fn subscribe(&self, name: &str) -> Result<Subscription, GuestError> {
        self.guest.subscribe(name)
    }
    fn collect(&self) -> Result<Collected, GuestError> {
        self.guest.collect()
    }
    fn vcpu_writes(&self) -> Vec<VcpuWrites> {
        self.guest.vcpu_writes()
    }
    fn throttle(&self, frames_per_s: Option<u64>) {
        self.guest.throttle(frames_per_s);
    }
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }
    fn pause(&self) -> Result<RunState, GuestError> {
        self.guest.pause()
    }
    fn resume(&self) -> Result<(), GuestError> {
        self.guest.resume()
    }
    fn save_state(&self) -> Result<Vec<Section>, GuestError> {
        self.guest.save_state()
    }
    fn restore_state(&self, sections: &[Section], clock: Clock) -> Result<(), GuestError> {
        self.guest.restore_state(sections, clock)
    }
    fn flush(&self, limit: Duration) -> Result<bool, GuestError> {
        self.guest.flush(limit)
    }
    fn release(&self) -> Result<(), GuestError> {
        (self.hook)("release");
        self.guest.release()
    }
    fn detach(&self) -> Result<Vec<u8>, GuestError> {
        (self.hook)("detach");
        self.guest.detach()
    }
    fn attach(&self, late: &[u8]) -> Result<(), GuestError> {
        self.guest.attach(late)
    }
    fn acquire(&self) -> Result<(), GuestError> {
        self.guest.acquire()
    }
    fn stop(&self, why: &str) {
        self.guest.stop(why);
    }
}
