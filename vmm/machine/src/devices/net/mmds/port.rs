//! The metadata service of one interface, with a clock and a timer.

use std::io;
use std::time::Duration;

use rustix::rand::{GetRandomFlags, getrandom};

use super::stack::MmdsStack;
use crate::config::NetConfig;
use crate::devices::timer::Timer;
use crate::metadata::MetadataStore;

/// MTU of an interface whose configuration has none, and the largest that the service uses.
const MTU: u16 = 1500;
/// Shortest wait until the timer expires, whatever the guest does.
const MIN_WAIT: Duration = Duration::from_millis(10);

/// The metadata service of an interface.
pub(in crate::devices) struct MmdsPort {
    stack: MmdsStack,
    store: MetadataStore,
    /// Timer of the next [`tick`](Self::tick).
    timer: Timer,
    /// Whether the timer may have to be set again.
    changed: bool,
}

impl MmdsPort {
    /// Opens the service of the interface `config`, if it has one.
    pub(in crate::devices) fn open(
        config: &NetConfig,
        store: &MetadataStore,
    ) -> io::Result<Option<Self>> {
        let Some(metadata) = config.metadata else { return Ok(None) };
        let mut seed = [0; 8];
        getrandom(&mut seed, GetRandomFlags::empty())?;
        let mtu = config.mtu.unwrap_or(MTU).min(MTU);
        let stack = MmdsStack::new(metadata, mtu, store.clone(), u64::from_ne_bytes(seed));
        Ok(Some(Self { stack, store: store.clone(), timer: Timer::new()?, changed: false }))
    }

    /// Returns the timer, which is readable when [`tick`](Self::tick) is due.
    pub(in crate::devices) fn timer(&self) -> &Timer {
        &self.timer
    }

    /// Takes a frame of the guest if it is for the service. Returns whether it is.
    pub(in crate::devices) fn take(&mut self, frame: &[u8]) -> bool {
        let is_taken = self.stack.take(frame, self.store.now());
        self.changed |= is_taken;
        is_taken
    }

    /// Returns the next frame for the guest, which stays the next one.
    pub(in crate::devices) fn first_frame(&self) -> Option<&[u8]> {
        self.stack.first_frame()
    }

    /// Takes the next frame for the guest.
    pub(in crate::devices) fn next_frame(&mut self) -> Option<Vec<u8>> {
        let frame = self.stack.next_frame(self.store.now());
        self.changed |= frame.is_some();
        frame
    }

    /// Returns whether frames wait for the guest.
    pub(in crate::devices) fn has_frames(&self) -> bool {
        self.stack.waiting_frames() > 0
    }

    /// Handles a readiness event of the timer.
    pub(in crate::devices) fn tick(&mut self) {
        // If the timer cannot be read, it is set again all the same.
        let _ = self.timer.take();
        self.stack.tick(self.store.now());
        self.changed = true;
    }

    /// Sets the timer if anything has changed.
    pub(in crate::devices) fn schedule(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.changed) {
            return Ok(());
        }
        match self.stack.due_in(self.store.now()) {
            Some(wait) => self.timer.set(wait.max(MIN_WAIT)),
            None => self.timer.clear(),
        }
    }

    /// Continues after a pause of the guest. A timer that was set before only expires too early.
    pub(in crate::devices) fn resume(&mut self) {
        self.stack.resume(self.store.now());
    }

    /// Forgets all connections, as after a reset of the device.
    pub(in crate::devices) fn reset(&mut self) {
        self.stack.reset();
        self.changed = true;
    }
}
