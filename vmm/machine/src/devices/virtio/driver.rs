//! A driver for tests: it uses a device as a guest would, through registers and guest memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::*;
use vm_memory::{Bytes, GuestAddress};

use super::{Device, DriverBuffer, Transport};
use crate::memory::Memory;

/// A timeout longer than anything here takes, even on the slowest host.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Guest addresses: rings of queue `i` at `RINGS + i * RINGS_STEP`, buffers from `BUFFERS` on.
pub(super) const RINGS: u64 = 0x10_0000;
pub(super) const RINGS_STEP: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x8000;
const BUFFERS: u64 = 0x40_0000;
pub(crate) const MEM_BYTES: u64 = 16 << 20;

#[derive(Clone, Copy, Debug, Default)]
struct DriverQueue {
    size: u16,
    rings: u64,
    available: u16,
    used: u16,
    next_descriptor: u16,
}

pub(crate) struct Driver {
    pub(crate) transport: Transport,
    pub(crate) memory: Arc<Memory>,
    queues: Vec<DriverQueue>,
    next_buffer: u64,
    /// Chains that the device has given back and no call has claimed: queue and head, and the
    /// number of bytes written.
    unclaimed: HashMap<(usize, u16), u32>,
}

impl Driver {
    /// Starts a device on a thread of its own, with a driver that has done nothing yet.
    pub(crate) fn new(device: Box<dyn Device>) -> Self {
        let memory = Arc::new(Memory::new(MEM_BYTES, &Default::default()).unwrap());
        let transport = Transport::spawn("test", device, memory.ram().clone()).unwrap();
        transport.resume();
        Self {
            transport,
            memory,
            queues: Vec::new(),
            next_buffer: BUFFERS,
            unclaimed: HashMap::new(),
        }
    }

    /// Like [`new`](Self::new), with a driver that uses all features and queues.
    pub(crate) fn started(device: Box<dyn Device>) -> Self {
        Self::started_without(device, 0)
    }

    /// Like [`started`](Self::started), without `features`.
    pub(crate) fn started_without(device: Box<dyn Device>, features: u64) -> Self {
        let mut driver = Self::new(device);
        driver.start(!features);
        driver
    }

    /// Starts the device as a driver does, with those of `features` that are offered.
    pub(crate) fn start(&mut self, features: u64) {
        self.negotiate(features);
        self.set_up_queues();
        self.write(VIRTIO_MMIO_STATUS, 15);
    }

    pub(crate) fn negotiate(&self, features: u64) {
        self.write(VIRTIO_MMIO_STATUS, 0);
        self.write(VIRTIO_MMIO_STATUS, 1);
        self.write(VIRTIO_MMIO_STATUS, 3);
        let chosen = self.offered() & features;
        for select in [0, 1] {
            self.write(VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.write(VIRTIO_MMIO_DRIVER_FEATURES, (chosen >> (32 * select)) as u32);
        }
        self.write(VIRTIO_MMIO_STATUS, 11);
        assert_eq!(self.read(VIRTIO_MMIO_STATUS), 11, "features {chosen:#x} are accepted");
    }

    pub(crate) fn offered(&self) -> u64 {
        let half = |select| {
            self.write(VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
            u64::from(self.read(VIRTIO_MMIO_DEVICE_FEATURES))
        };
        half(0) | half(1) << 32
    }

    pub(crate) fn set_up_queues(&mut self) {
        self.queues.clear();
        self.unclaimed.clear();
        for i in 0.. {
            self.write(VIRTIO_MMIO_QUEUE_SEL, i);
            let size = self.read(VIRTIO_MMIO_QUEUE_NUM_MAX) as u16;
            if size == 0 {
                break;
            }
            let rings = RINGS + u64::from(i) * RINGS_STEP;
            // The driver provides zeroed rings.
            self.memory.ram().write_slice(&[0; RINGS_STEP as usize], GuestAddress(rings)).unwrap();
            self.queues.push(DriverQueue { size, rings, ..Default::default() });
            self.write(VIRTIO_MMIO_QUEUE_NUM, size.into());
            self.set_queue_address(i, rings);
            self.write(VIRTIO_MMIO_QUEUE_READY, 1);
        }
    }

    /// Tells the device where queue `queue` is.
    pub(crate) fn set_queue_address(&self, queue: u32, rings: u64) {
        self.write(VIRTIO_MMIO_QUEUE_SEL, queue);
        let areas = [
            (VIRTIO_MMIO_QUEUE_DESC_LOW, rings),
            (VIRTIO_MMIO_QUEUE_AVAIL_LOW, rings + AVAILABLE),
            (VIRTIO_MMIO_QUEUE_USED_LOW, rings + USED),
        ];
        for (register, addr) in areas {
            self.write(register, addr as u32);
            self.write(register + 4, (addr >> 32) as u32);
        }
    }

    /// Returns the same driver for another device over the same memory, as after a migration.
    pub(crate) fn moved_to(self, transport: Transport) -> Self {
        Self { transport, ..self }
    }

    pub(crate) fn read(&self, register: u32) -> u32 {
        let mut bytes = [0; 4];
        self.transport.read(register.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(crate) fn write(&self, register: u32, value: u32) {
        self.transport.write_and_wait(register.into(), &value.to_le_bytes());
    }

    pub(crate) fn queue_count(&self) -> usize {
        self.queues.len()
    }

    pub(crate) fn queue_size(&self, queue: usize) -> u16 {
        self.queues[queue].size
    }

    /// Allocates guest memory on frames of its own.
    pub(crate) fn allocate(&mut self, len: u32) -> u64 {
        let addr = self.next_buffer;
        self.next_buffer += u64::from(len).next_multiple_of(4096).max(4096);
        assert!(self.next_buffer < MEM_BYTES, "the test's guest has no more memory");
        addr
    }

    /// Forgets all buffers so far: their memory is used again.
    pub(crate) fn forget_buffers(&mut self) {
        self.next_buffer = BUFFERS;
    }

    /// Returns a buffer with `bytes` for the device to read.
    pub(crate) fn readable(&mut self, bytes: &[u8]) -> DriverBuffer {
        let addr = self.allocate(bytes.len() as u32);
        self.memory.ram().write_slice(bytes, GuestAddress(addr)).unwrap();
        DriverBuffer { addr, len: bytes.len() as u32, writable: false }
    }

    /// Returns a buffer of `len` bytes for the device to write.
    pub(crate) fn writable(&mut self, len: u32) -> DriverBuffer {
        DriverBuffer { addr: self.allocate(len), len, writable: true }
    }

    pub(crate) fn bytes(&self, piece: DriverBuffer) -> Vec<u8> {
        let mut bytes = vec![0; piece.len as usize];
        self.memory.ram().read_slice(&mut bytes, GuestAddress(piece.addr)).unwrap();
        bytes
    }

    /// Writes a descriptor without any check.
    pub(crate) fn write_descriptor(
        &self,
        queue: usize,
        index: u16,
        piece: DriverBuffer,
        flags: u16,
        next: u16,
    ) {
        let at = self.queues[queue].rings + 16 * u64::from(index);
        self.memory.ram().write_slice(&piece.descriptor(flags, next), GuestAddress(at)).unwrap();
    }

    /// Makes the chain from `head` available, without a notification.
    pub(crate) fn make_available(&mut self, queue: usize, head: u16) {
        let DriverQueue { size, rings, available, .. } = self.queues[queue];
        let entry = rings + AVAILABLE + 4 + 2 * u64::from(available % size);
        self.memory.ram().write_obj(head, GuestAddress(entry)).unwrap();
        self.set_available(queue, available.wrapping_add(1));
    }

    /// Returns the available index.
    pub(crate) fn available(&self, queue: usize) -> u16 {
        self.queues[queue].available
    }

    /// Writes the available index without any check.
    pub(crate) fn set_available(&mut self, queue: usize, index: u16) {
        let at = GuestAddress(self.queues[queue].rings + AVAILABLE + 2);
        self.memory.ram().store(index, at, std::sync::atomic::Ordering::SeqCst).unwrap();
        self.queues[queue].available = index;
    }

    /// Makes a chain of `pieces` available, without a notification. Returns its head.
    pub(crate) fn post(&mut self, queue: usize, pieces: &[DriverBuffer]) -> u16 {
        let size = self.queues[queue].size;
        let head = self.queues[queue].next_descriptor;
        for (i, piece) in pieces.iter().enumerate() {
            let index = self.queues[queue].next_descriptor;
            let next = (index + 1) % size;
            let last = i + 1 == pieces.len();
            let flags = if last { 0 } else { VRING_DESC_F_NEXT as u16 };
            self.write_descriptor(queue, index, *piece, flags, next);
            self.queues[queue].next_descriptor = next;
        }
        self.make_available(queue, head);
        head
    }

    /// Like [`post`](Self::post), through an indirect table.
    pub(crate) fn post_indirect(&mut self, queue: usize, pieces: &[DriverBuffer]) -> u16 {
        let table = self.allocate(16 * pieces.len() as u32);
        for (i, piece) in pieces.iter().enumerate() {
            let last = i + 1 == pieces.len();
            let flags = if last { 0 } else { VRING_DESC_F_NEXT as u16 };
            let at = GuestAddress(table + 16 * i as u64);
            self.memory.ram().write_slice(&piece.descriptor(flags, i as u16 + 1), at).unwrap();
        }
        let head = self.queues[queue].next_descriptor;
        self.queues[queue].next_descriptor = (head + 1) % self.queues[queue].size;
        let piece = DriverBuffer { addr: table, len: 16 * pieces.len() as u32, writable: false };
        self.write_descriptor(queue, head, piece, VRING_DESC_F_INDIRECT as u16, 0);
        self.make_available(queue, head);
        head
    }

    /// Returns whether the device wants a notification for the chain that was made available last.
    /// `event_idx` says whether the driver has accepted that feature.
    pub(crate) fn is_kick_wanted(&self, queue: usize, event_idx: bool) -> bool {
        let DriverQueue { size, rings, available, .. } = self.queues[queue];
        let load = |at: u64| -> u16 {
            let at = GuestAddress(rings + USED + at);
            self.memory.ram().load(at, std::sync::atomic::Ordering::SeqCst).unwrap()
        };
        match event_idx {
            true => load(4 + 8 * u64::from(size)) == available.wrapping_sub(1),
            false => u32::from(load(0)) & VRING_USED_F_NO_NOTIFY == 0,
        }
    }

    pub(crate) fn kick(&self, queue: usize) {
        self.write(VIRTIO_MMIO_QUEUE_NOTIFY, queue as u32);
    }

    /// Waits until the device gives the chain from `head` back. Returns the number of bytes that
    /// the device reports as written.
    #[track_caller]
    pub(crate) fn wait_used(&mut self, queue: usize, head: u16) -> u32 {
        let end = Instant::now() + TIMEOUT;
        loop {
            if let Some(len) = self.unclaimed.remove(&(queue, head)) {
                return len;
            }
            match self.take_used(queue) {
                Some((id, len)) => drop(self.unclaimed.insert((queue, id), len)),
                None => {
                    assert!(!self.is_stopped(), "the device has stopped");
                    assert!(Instant::now() < end, "chain {head} of queue {queue} never came back");
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        }
    }

    /// Waits for the interrupt. The device raises it after it has put a chain into the used ring.
    #[track_caller]
    pub(crate) fn wait_interrupt(&self) {
        let end = Instant::now() + TIMEOUT;
        while !self.transport.line().clear() {
            assert!(Instant::now() < end, "the driver was not told");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn take_used(&mut self, queue: usize) -> Option<(u16, u32)> {
        let DriverQueue { size, rings, used, .. } = self.queues[queue];
        let index = GuestAddress(rings + USED + 2);
        let index: u16 =
            self.memory.ram().load(index, std::sync::atomic::Ordering::SeqCst).unwrap();
        if index == used {
            return None;
        }
        let entry = GuestAddress(rings + USED + 4 + 8 * u64::from(used % size));
        let [id, len]: [u32; 2] = self.memory.ram().read_obj(entry).unwrap();
        self.queues[queue].used = used.wrapping_add(1);
        Some((id as u16, len))
    }

    /// Takes the next entry of the used ring. Returns whether there was one.
    pub(crate) fn has_used(&mut self, queue: usize) -> bool {
        self.take_used(queue).is_some()
    }

    /// Posts a chain, notifies the device and waits.
    #[track_caller]
    pub(crate) fn request(&mut self, queue: usize, pieces: &[DriverBuffer]) -> u32 {
        let head = self.post(queue, pieces);
        self.kick(queue);
        self.wait_used(queue, head)
    }

    /// Returns whether the device has asked for a reset.
    pub(crate) fn is_stopped(&self) -> bool {
        self.read(VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET != 0
    }

    /// Waits until the device asks for a reset because of `what`, and has interrupted the driver.
    #[track_caller]
    pub(crate) fn wait_stopped(&self, what: &str) {
        let end = Instant::now() + TIMEOUT;
        let is_told = || self.read(VIRTIO_MMIO_INTERRUPT_STATUS) & VIRTIO_MMIO_INT_CONFIG != 0;
        while !(self.is_stopped() && is_told()) {
            assert!(Instant::now() < end, "{what}: the device did not stop");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Pauses the device.
    #[track_caller]
    pub(crate) fn quiesce(&self) {
        self.transport.begin_quiesce(Instant::now() + TIMEOUT).wait().unwrap();
    }
}
