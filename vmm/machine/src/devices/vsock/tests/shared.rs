//! A device that a test shares with the device's thread.

use std::sync::{Mutex, MutexGuard};

use super::*;
use crate::devices::virtio::HandOverNeeds;

/// A device that its test can read and change between the calls of its thread.
pub(super) struct SharedVsock {
    pub(super) vsock: Arc<Mutex<Vsock>>,
    /// Called after each call that transfers packets, before the test can see the device.
    pub(super) after_call: Box<dyn FnMut(&Vsock) + Send>,
}

impl SharedVsock {
    fn vsock(&self) -> MutexGuard<'_, Vsock> {
        self.vsock.lock().unwrap()
    }
}

impl Device for SharedVsock {
    fn kind(&self) -> DeviceKind {
        self.vsock().kind()
    }

    fn features(&self) -> u64 {
        self.vsock().features()
    }

    fn queue_sizes(&self) -> Vec<u16> {
        self.vsock().queue_sizes()
    }

    fn config_space(&self) -> Vec<u8> {
        self.vsock().config_space()
    }

    fn write_config(&mut self, offset: usize, data: &[u8], io: &mut DeviceIo<'_>) {
        self.vsock().write_config(offset, data, io);
    }

    fn start(&mut self, watcher: &Watcher) -> io::Result<()> {
        self.vsock().start(watcher)
    }

    fn activate(&mut self, features: u64) {
        self.vsock().activate(features);
    }

    fn reset(&mut self, io: &mut DeviceIo<'_>) {
        self.vsock().reset(io);
    }

    fn process(&mut self, queue: usize, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let mut vsock = self.vsock.lock().unwrap();
        let done = vsock.process(queue, io);
        (self.after_call)(&vsock);
        done
    }

    fn backend_ready(
        &mut self,
        token: u32,
        events: EventSet,
        io: &mut DeviceIo<'_>,
    ) -> Result<(), Violation> {
        let mut vsock = self.vsock.lock().unwrap();
        let done = vsock.backend_ready(token, events, io);
        (self.after_call)(&vsock);
        done
    }

    fn quiesce(&mut self, deadline: Instant, io: &mut DeviceIo<'_>) -> Result<(), QuiesceError> {
        self.vsock().quiesce(deadline, io)
    }

    fn resume(&mut self, moved: bool, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        self.vsock().resume(moved, io)
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        self.vsock().save()
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        self.vsock().restore(state)
    }

    fn hand_over(&self) -> HandOverNeeds {
        self.vsock().hand_over()
    }

    fn acquire(&mut self, from: NextHost) -> Result<(), DeviceError> {
        self.vsock().acquire(from)
    }

    fn release(&mut self, deadline: Instant, next: NextHost) -> Result<(), DeviceError> {
        self.vsock().release(deadline, next)
    }
}
