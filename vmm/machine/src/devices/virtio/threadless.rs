//! A device without a thread, for tests and fuzzing. The effect of a vCPU's write is complete when
//! the write returns. Events of the backend are handled when the caller looks.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_guest::{GuestRam, NextHost};

use super::mmio::MmioInterface;
use super::worker::DeviceWorker;
use super::{Device, RequestError, VirtioState};
use crate::actor::{self, Handle};
use crate::devices::latched_event::LatchedEvent;

/// A timeout longer than any request of a test takes.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A device without a thread; see the module.
pub(crate) struct ThreadlessDevice {
    mmio: MmioInterface,
    worker: RefCell<DeviceWorker>,
    /// Keeps the worker's inbox open; nothing is sent.
    _handle: Handle<DeviceWorker>,
}

impl ThreadlessDevice {
    /// Creates a device, which is paused.
    pub(crate) fn new(id: &str, device: Box<dyn Device>, ram: GuestRam) -> io::Result<Self> {
        let mmio = MmioInterface::new(id, &*device)?;
        let (handle, inbox) = actor::inbox(mmio.label());
        let wake = Arc::new(LatchedEvent::new()?);
        let worker = RefCell::new(DeviceWorker::new(&mmio, device, ram, inbox, wake)?);
        Ok(Self { mmio, worker, _handle: handle })
    }

    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        self.mmio.read(offset, data);
    }

    pub(crate) fn write(&self, offset: u64, data: &[u8]) {
        self.mmio.write(offset, data, |command| self.worker.borrow_mut().carry_out(command));
    }

    /// Handles the events since the last look. Returns whether there were any.
    pub(crate) fn poll(&self) -> bool {
        self.worker.borrow_mut().poll()
    }

    /// Returns whether the device works for a driver.
    pub(crate) fn is_active(&self) -> bool {
        self.worker.borrow().is_active()
    }

    pub(crate) fn quiesce(&self) -> Result<(), RequestError> {
        self.worker.borrow_mut().quiesce(Instant::now() + REQUEST_TIMEOUT)
    }

    pub(crate) fn resume(&self) {
        self.worker.borrow_mut().resume();
    }

    pub(crate) fn acquire(&self) -> Result<(), RequestError> {
        self.worker.borrow_mut().acquire(NextHost::Another)
    }

    pub(crate) fn release(&self) -> Result<(), RequestError> {
        self.worker.borrow_mut().release(Instant::now() + REQUEST_TIMEOUT, NextHost::Another)
    }

    pub(crate) fn detach(&self, room: usize) -> Vec<u8> {
        self.worker.borrow_mut().detach(room, NextHost::Another)
    }

    pub(crate) fn attach(&self, queued_packets: &[u8]) -> Result<(), RequestError> {
        self.worker.borrow_mut().attach(queued_packets)
    }

    pub(crate) fn save(&self) -> Result<VirtioState, RequestError> {
        Ok(self.mmio.save(self.worker.borrow().save()?))
    }

    pub(crate) fn restore(&self, state: VirtioState) -> Result<(), RequestError> {
        let (worker, interrupt) = self.mmio.begin_restore(state)?;
        self.worker.borrow_mut().restore(worker)?;
        self.mmio.finish_restore(&interrupt);
        Ok(())
    }
}
