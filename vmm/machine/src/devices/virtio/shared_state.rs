//! State that a device's registers and its thread share without a message: the interrupt with its
//! status, the configuration space, and whether the device was stopped.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::{Mutex, MutexGuard};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};

use crate::devices::latched_event::LatchedEvent;

/// State shared by a device's registers and its thread; see the module.
#[derive(Debug)]
pub(crate) struct SharedDeviceState {
    /// `InterruptStatus`. A bit is set before the interrupt that reports it. An interrupt that is
    /// lost on its way (to a saved interrupt controller) therefore leaves its bit behind.
    interrupt_status: AtomicU32,
    /// The event that raises the interrupt.
    line: LatchedEvent,
    needs_reset: AtomicBool,
    /// Number of resets that the driver has begun and the thread has not done.
    resets: AtomicU32,
    config: Mutex<ConfigSpace>,
}

#[derive(Debug)]
struct ConfigSpace {
    generation: u32,
    bytes: Vec<u8>,
}

impl SharedDeviceState {
    pub(super) fn new(config: Vec<u8>) -> io::Result<Self> {
        Ok(Self {
            interrupt_status: AtomicU32::new(0),
            line: LatchedEvent::new()?,
            needs_reset: AtomicBool::new(false),
            resets: AtomicU32::new(0),
            config: Mutex::new(ConfigSpace { generation: 0, bytes: config }),
        })
    }

    /// Returns the event that raises the interrupt, for connection to an interrupt controller.
    pub(crate) fn line(&self) -> &LatchedEvent {
        &self.line
    }

    /// Raises an interrupt for used buffers.
    pub(super) fn interrupt_used(&self) {
        self.interrupt(VIRTIO_MMIO_INT_VRING);
    }

    /// Raises an interrupt for a changed configuration or status.
    fn interrupt_config(&self) {
        self.interrupt(VIRTIO_MMIO_INT_CONFIG);
    }

    fn interrupt(&self, bit: u32) {
        // SeqCst: the change that is reported comes before the bit, and the bit before the
        // interrupt.
        self.interrupt_status.fetch_or(bit, Ordering::SeqCst);
        self.line.signal();
    }

    pub(crate) fn interrupt_status(&self) -> u32 {
        self.interrupt_status.load(Ordering::SeqCst)
    }

    pub(super) fn acknowledge(&self, bits: u32) {
        self.interrupt_status.fetch_and(!bits, Ordering::SeqCst);
    }

    pub(super) fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::SeqCst)
    }

    /// Tells the driver that the device has stopped.
    pub(super) fn request_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
        self.interrupt_config();
    }

    /// Records that the driver resets the device. The thread does the reset.
    pub(super) fn begin_reset(&self) {
        self.resets.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns whether a reset is in progress.
    pub(super) fn is_resetting(&self) -> bool {
        self.resets.load(Ordering::SeqCst) > 0
    }

    /// Ends one reset: clears the interrupt status and the request for a reset. The configuration
    /// space stays.
    pub(super) fn end_reset(&self) {
        self.needs_reset.store(false, Ordering::SeqCst);
        self.interrupt_status.store(0, Ordering::SeqCst);
        self.resets.fetch_sub(1, Ordering::SeqCst);
    }

    /// Restores saved values, without an interrupt.
    pub(super) fn restore(&self, interrupt_status: u32, needs_reset: bool, generation: u32) {
        self.interrupt_status.store(interrupt_status, Ordering::SeqCst);
        self.needs_reset.store(needs_reset, Ordering::SeqCst);
        self.config().generation = generation;
    }

    fn config(&self) -> MutexGuard<'_, ConfigSpace> {
        self.config.lock()
    }

    pub(super) fn config_generation(&self) -> u32 {
        self.config().generation
    }

    /// Reads the configuration space; bytes past its end are zeros.
    pub(super) fn read_config(&self, offset: usize, data: &mut [u8]) {
        data.fill(0);
        let config = self.config();
        if let Some(bytes) = config.bytes.get(offset..) {
            let len = bytes.len().min(data.len());
            data[..len].copy_from_slice(&bytes[..len]);
        }
    }

    /// Replaces the configuration space, and tells the driver if it has changed.
    pub(crate) fn change_config(&self, bytes: Vec<u8>) {
        if self.put_config(bytes) {
            self.interrupt_config();
        }
    }

    /// Replaces the configuration space without telling the driver. Returns whether it has changed.
    pub(crate) fn put_config(&self, bytes: Vec<u8>) -> bool {
        let mut config = self.config();
        let changed = config.bytes != bytes;
        if changed {
            config.bytes = bytes;
            config.generation = config.generation.wrapping_add(1);
        }
        changed
    }
}
