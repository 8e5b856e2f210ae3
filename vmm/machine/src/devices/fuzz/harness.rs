//! A hostile driver, controlled by a fuzzer's bytes. After every step, the harness checks the rules
//! that the device must keep whatever its driver does.

use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::*;

use super::device::FuzzedDevice;
use super::input::FuzzInput;
use super::memory::FuzzMemory;
use crate::devices::virtio::threadless::ThreadlessDevice;
use crate::devices::virtio::{DriverBuffer, REGISTERS_LEN, VIRTIO_MMIO_QUEUE_RESET, VirtioState};
use crate::memory::Backing;

/// Address of the rings: those of queue `i` are at `RINGS + i * RINGS_STEP`.
const RINGS: u64 = 0x1000;
const RINGS_STEP: u64 = 0x2000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x1800;
/// Most rounds that a device may take for the work that one step starts.
const MAX_ROUNDS: usize = 1000;
/// Most steps of one run. More steps would find nothing new.
const MAX_STEPS: usize = 200;
const REGISTERS: [u32; 19] = [
    VIRTIO_MMIO_DEVICE_FEATURES_SEL,
    VIRTIO_MMIO_DRIVER_FEATURES,
    VIRTIO_MMIO_DRIVER_FEATURES_SEL,
    VIRTIO_MMIO_QUEUE_SEL,
    VIRTIO_MMIO_QUEUE_NUM,
    VIRTIO_MMIO_QUEUE_READY,
    VIRTIO_MMIO_QUEUE_NOTIFY,
    VIRTIO_MMIO_INTERRUPT_ACK,
    VIRTIO_MMIO_STATUS,
    VIRTIO_MMIO_QUEUE_DESC_LOW,
    VIRTIO_MMIO_QUEUE_DESC_HIGH,
    VIRTIO_MMIO_QUEUE_AVAIL_LOW,
    VIRTIO_MMIO_QUEUE_AVAIL_HIGH,
    VIRTIO_MMIO_QUEUE_USED_LOW,
    VIRTIO_MMIO_QUEUE_USED_HIGH,
    VIRTIO_MMIO_QUEUE_RESET,
    VIRTIO_MMIO_CONFIG,
    VIRTIO_MMIO_CONFIG + 4,
    VIRTIO_MMIO_CONFIG + 12,
];

#[derive(Clone, Copy, Default)]
struct FuzzQueue {
    size: u16,
    available: u16,
    next: u16,
}

/// A driver and its device. See the module documentation.
pub(super) struct FuzzHarness<'s> {
    fuzzed: &'s mut dyn FuzzedDevice,
    memory: FuzzMemory,
    device: ThreadlessDevice,
    queues: Vec<FuzzQueue>,
    /// Whether, since the last check of memory, the device was in a state in which it may write.
    may_write: bool,
    /// Whether the device continues from a state that no device has saved.
    damaged: bool,
}

impl<'s> FuzzHarness<'s> {
    pub(super) fn new(fuzzed: &'s mut dyn FuzzedDevice, backing: Backing) -> Self {
        let memory = FuzzMemory::new(backing);
        let device =
            ThreadlessDevice::new("fuzz", fuzzed.make(), memory.memory().ram().clone()).unwrap();
        device.acquire().unwrap();
        device.resume();
        let (queues, may_write, damaged) = (Vec::new(), false, false);
        let mut harness = Self { fuzzed, memory, device, queues, may_write, damaged };
        harness.queues = vec![FuzzQueue::default(); harness.queue_count()];
        harness
    }

    /// Returns the number of queues that the device has.
    fn queue_count(&self) -> usize {
        let exists = |i: &u32| {
            self.device.write(VIRTIO_MMIO_QUEUE_SEL.into(), &i.to_le_bytes());
            self.get(VIRTIO_MMIO_QUEUE_NUM_MAX) > 0
        };
        (0..).take_while(exists).count()
    }

    /// Performs the steps in `from`, up to its end.
    pub(super) fn run(&mut self, from: &mut FuzzInput<'_>) {
        for _ in 0..MAX_STEPS {
            if from.is_empty() {
                break;
            }
            self.run_step(from);
            self.check_memory();
        }
        self.pause_and_resume();
    }

    /// Writes and reads registers as `from` says.
    pub(super) fn run_registers(&mut self, from: &mut FuzzInput<'_>) {
        for _ in 0..MAX_STEPS {
            if from.is_empty() {
                break;
            }
            self.write_or_read_register(from);
        }
        self.pause_and_resume();
    }

    /// Restores `bytes` into the device, if they are a state of such a device, and runs it.
    pub(super) fn run_state(&mut self, bytes: &[u8]) {
        let Ok(state) = postcard::from_bytes::<VirtioState>(bytes) else { return };
        self.device.quiesce().unwrap();
        self.damaged |= self.move_with(state).is_none();
        for queue in 0..self.queues.len() as u32 {
            self.set(VIRTIO_MMIO_QUEUE_NOTIFY, queue);
        }
        self.pause_and_resume();
    }

    fn get(&self, register: u32) -> u32 {
        let mut bytes = [0; 4];
        self.device.read(register.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn set(&mut self, register: u32, value: u32) {
        self.step(false, |device| device.write(register.into(), &value.to_le_bytes()));
    }

    fn is_stopped(&self) -> bool {
        self.get(VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET != 0
    }

    /// Checks memory and the backend, unless something may be in flight.
    fn check_memory(&mut self) {
        if !self.fuzzed.writes_asynchronously() {
            let wrote = self.memory.check();
            assert!(!wrote || self.may_write, "a stopped device writes");
            self.may_write = false;
            self.fuzzed.check(self.memory.memory());
        }
    }

    /// Runs `f` and all work that follows from it, and checks the rules that must hold then. With
    /// `nothing_new`, `f` contains no reset, so a stopped device must not do anything.
    fn step(&mut self, nothing_new: bool, f: impl FnOnce(&ThreadlessDevice)) {
        let stopped = self.is_stopped();
        f(&self.device);
        let rounds = (0..MAX_ROUNDS).take_while(|_| self.device.poll()).count();
        assert!(rounds < MAX_ROUNDS, "the device works without end");
        let status = self.get(VIRTIO_MMIO_STATUS);
        let works = status & VIRTIO_CONFIG_S_DRIVER_OK != 0 && !self.is_stopped();
        assert_eq!(self.device.is_active(), works, "status {status:#x}");
        if self.is_stopped() {
            let interrupted = self.get(VIRTIO_MMIO_INTERRUPT_STATUS) & VIRTIO_MMIO_INT_CONFIG != 0;
            assert!(interrupted || stopped, "the driver of a stopped device is told");
        }
        self.may_write |= !(stopped && nothing_new);
    }

    /// Pauses the device, so that nothing is in flight, checks everything, and resumes it.
    fn pause_and_resume(&mut self) {
        self.device.quiesce().unwrap();
        self.memory.check_all();
        self.may_write = false;
        self.fuzzed.check(self.memory.memory());
        self.step(true, ThreadlessDevice::resume);
    }

    fn run_step(&mut self, from: &mut FuzzInput<'_>) {
        match from.u8() % 24 {
            0 => self.start(from),
            1 | 2 => self.post_request(from, true),
            3 => self.post_request(from, false),
            4 | 5 => self.post_pieces(from),
            6 => self.write_arbitrary_descriptor(from),
            7 => self.make_arbitrary_available(from),
            8 => self.set_available(from),
            9 | 10 => {
                let queue = self.queue(from);
                self.notify(queue);
            }
            11 => self.write_or_read_register(from),
            12 => {
                let (addr, len) = (from.address(), from.u8().into());
                let bytes = from.bytes(len);
                self.memory.write(addr, bytes);
            }
            13..16 => {
                self.fuzzed.cause_backend_event(from);
                self.step(true, |_| ());
            }
            16 => self.migrate(from, false),
            17 => self.migrate(from, true),
            18 => self.set(VIRTIO_MMIO_STATUS, 0),
            19 => {
                let queue = self.queue(from);
                self.set(VIRTIO_MMIO_QUEUE_SEL, queue as u32);
                self.set(VIRTIO_MMIO_QUEUE_RESET, 1);
                if from.flip() {
                    self.set_up(queue, from);
                }
            }
            20 => {
                let queue = self.queue(from);
                self.set(VIRTIO_MMIO_QUEUE_SEL, queue as u32);
                self.set(VIRTIO_MMIO_QUEUE_DESC_LOW, from.address() as u32);
            }
            21 => self.pause_and_resume(),
            22 => self.post_indirect(from),
            _ => self.set(VIRTIO_MMIO_INTERRUPT_ACK, from.u8().into()),
        }
    }

    /// Returns a queue, mostly the one under test.
    fn queue(&self, from: &mut FuzzInput<'_>) -> usize {
        match from.u8() {
            n if n & 0x80 == 0 => self.fuzzed.queue().min(self.queues.len() - 1),
            n => usize::from(n & 0x7f) % self.queues.len(),
        }
    }

    /// Takes the device from power-on to a ready driver, with all features or fewer.
    fn start(&mut self, from: &mut FuzzInput<'_>) {
        self.set(VIRTIO_MMIO_STATUS, 0);
        self.set(VIRTIO_MMIO_STATUS, 1);
        self.set(VIRTIO_MMIO_STATUS, 3);
        let (which, mut features) = (from.u8(), 0);
        for select in [0, 1] {
            self.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
            features |= u64::from(self.get(VIRTIO_MMIO_DEVICE_FEATURES)) << (32 * select);
        }
        for (bit, feature) in [(1, VIRTIO_RING_F_EVENT_IDX), (2, VIRTIO_RING_F_INDIRECT_DESC)] {
            if which & bit != 0 {
                features &= !(1 << feature);
            }
        }
        if which & 4 != 0 {
            features &= !u64::from(from.u32() & 0xff_ffff);
        }
        for select in [0, 1] {
            self.set(VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.set(VIRTIO_MMIO_DRIVER_FEATURES, (features >> (32 * select)) as u32);
        }
        self.set(VIRTIO_MMIO_STATUS, 11);
        for queue in 0..self.queues.len() {
            self.set_up(queue, from);
        }
        self.set(VIRTIO_MMIO_STATUS, 15);
    }

    fn set_up(&mut self, queue: usize, from: &mut FuzzInput<'_>) {
        self.set(VIRTIO_MMIO_QUEUE_SEL, queue as u32);
        let most = self.get(VIRTIO_MMIO_QUEUE_NUM_MAX);
        let size = (1 << (from.u8() % 9)).min(most);
        let rings = rings(queue);
        self.memory.write(rings, &[0; RINGS_STEP as usize]);
        self.queues[queue] = FuzzQueue { size: size as u16, ..FuzzQueue::default() };
        self.set(VIRTIO_MMIO_QUEUE_NUM, size);
        for (register, addr) in [
            (VIRTIO_MMIO_QUEUE_DESC_LOW, rings),
            (VIRTIO_MMIO_QUEUE_AVAIL_LOW, rings + AVAILABLE),
            (VIRTIO_MMIO_QUEUE_USED_LOW, rings + USED),
        ] {
            self.set(register, addr as u32);
            self.set(register + 4, 0);
        }
        self.set(VIRTIO_MMIO_QUEUE_READY, 1);
    }

    fn write_descriptor(&mut self, at: u64, piece: DriverBuffer, flags: u16, next: u16) {
        self.memory.write(at, &piece.descriptor(flags, next));
    }

    /// Makes a chain of `pieces` available, without a notification.
    fn post(&mut self, queue: usize, pieces: &[DriverBuffer]) {
        let FuzzQueue { size, next: head, .. } = self.queues[queue];
        let Some(last) = pieces.len().checked_sub(1).filter(|_| size > 0) else { return };
        for (i, piece) in pieces.iter().enumerate() {
            let index = self.queues[queue].next;
            let next = (index + 1) % size;
            let flags = if i == last { 0 } else { VRING_DESC_F_NEXT as u16 };
            self.write_descriptor(rings(queue) + 16 * u64::from(index), *piece, flags, next);
            self.queues[queue].next = next;
        }
        self.make_available(queue, head);
    }

    fn make_available(&mut self, queue: usize, head: u16) {
        let FuzzQueue { size, available, .. } = self.queues[queue];
        let ring = rings(queue) + AVAILABLE;
        self.memory.write(ring + 4 + 2 * u64::from(available % size.max(1)), &head.to_le_bytes());
        self.put_available(queue, available.wrapping_add(1));
    }

    fn put_available(&mut self, queue: usize, index: u16) {
        self.queues[queue].available = index;
        self.memory.write(rings(queue) + AVAILABLE + 2, &index.to_le_bytes());
    }

    fn notify(&mut self, queue: usize) {
        let number = (queue as u32).to_le_bytes();
        self.step(true, |device| device.write(VIRTIO_MMIO_QUEUE_NOTIFY.into(), &number));
    }

    /// Makes a valid or nearly valid request available, and notifies the device if `tell` is true.
    fn post_request(&mut self, from: &mut FuzzInput<'_>, tell: bool) {
        let queue = self.queue(from);
        let pieces = self.fuzzed.request(queue, from, &mut self.memory);
        self.post(queue, &pieces);
        if tell {
            self.notify(queue);
        }
    }

    /// Makes an arbitrary chain of buffers available.
    fn post_pieces(&mut self, from: &mut FuzzInput<'_>) {
        let queue = self.queue(from);
        let mut pieces = from.pieces(false);
        pieces.extend(from.pieces(true));
        self.post(queue, &pieces);
        self.notify(queue);
    }

    fn post_indirect(&mut self, from: &mut FuzzInput<'_>) {
        let queue = self.queue(from);
        let table = from.address();
        let pieces = match from.flip() {
            true => self.fuzzed.request(queue, from, &mut self.memory),
            false => [from.pieces(false), from.pieces(true)].concat(),
        };
        for (piece, i) in pieces.iter().zip(0u16..) {
            let last = usize::from(i) + 1 == pieces.len();
            let flags = if last { 0 } else { VRING_DESC_F_NEXT as u16 };
            self.write_descriptor(table.wrapping_add(16 * u64::from(i)), *piece, flags, i + 1);
        }
        let len = 16 * pieces.len() as u32 + u32::from(from.u8() / 250);
        let piece = DriverBuffer { addr: table, len, writable: from.u8() > 250 };
        let FuzzQueue { size, next, .. } = self.queues[queue];
        let at = rings(queue) + 16 * u64::from(next);
        self.write_descriptor(at, piece, VRING_DESC_F_INDIRECT as u16, 0);
        self.make_available(queue, next);
        self.queues[queue].next = (next + 1) % size.max(1);
        self.notify(queue);
    }

    /// Writes an arbitrary descriptor anywhere in the table.
    fn write_arbitrary_descriptor(&mut self, from: &mut FuzzInput<'_>) {
        let queue = self.queue(from);
        let (at, writable) = (rings(queue) + 16 * u64::from(from.u8()), from.flip());
        let piece = from.piece(writable);
        self.write_descriptor(at, piece, u16::from(from.u8() & 7), from.u8().into());
    }

    fn make_arbitrary_available(&mut self, from: &mut FuzzInput<'_>) {
        let queue = self.queue(from);
        let head = if from.flip() { from.u16() } else { from.u8().into() };
        self.make_available(queue, head);
        self.notify(queue);
    }

    fn set_available(&mut self, from: &mut FuzzInput<'_>) {
        let queue = self.queue(from);
        let by = if from.flip() { from.u16() } else { from.u8().into() };
        self.put_available(queue, self.queues[queue].available.wrapping_add(by));
        self.notify(queue);
    }

    fn write_or_read_register(&mut self, from: &mut FuzzInput<'_>) {
        let kind = from.u8();
        let register = match kind & 3 {
            0 => u64::from(from.u16()) % REGISTERS_LEN,
            _ => from.one_of(&REGISTERS).into(),
        };
        // An access must not cross the end of the registers, which take one page.
        let most = (REGISTERS_LEN - register).min(8) as usize;
        let len = if kind & 4 != 0 { 1 + usize::from(from.u8()) % 8 } else { 4 }.min(most);
        let value = if kind & 8 != 0 { from.u64() } else { from.u8().into() };
        let mut bytes = value.to_le_bytes();
        match kind & 0x30 {
            0 => self.step(true, |device| device.read(register, &mut bytes[..len])),
            _ => self.step(false, |device| device.write(register, &bytes[..len])),
        }
    }

    /// Moves the device to another host, with its saved state or a damaged copy of it.
    fn migrate(&mut self, from: &mut FuzzInput<'_>, damaged: bool) {
        self.device.quiesce().unwrap();
        self.memory.check_all();
        self.may_write = false;
        self.fuzzed.check(self.memory.memory());
        let state = self.device.save().unwrap();
        let mut bytes = postcard::to_stdvec(&state).unwrap();
        if !damaged {
            if let Some(why) = self.move_with(state.clone()) {
                // A damaged state says that data of the disk is lost. The disk is not released
                // before the guest has been told.
                assert!(
                    self.damaged && why.contains("could not be made durable"),
                    "{why}: {state:?}"
                );
                return self.step(false, ThreadlessDevice::resume);
            }
            assert_eq!(self.last_saved(), bytes, "what is saved again is the same");
            return self.step(false, ThreadlessDevice::resume);
        }
        for _ in 0..1 + from.u8() % 4 {
            let at = usize::from(from.u16()) % bytes.len();
            bytes[at] = from.u8();
        }
        if let Ok(state) = postcard::from_bytes(&bytes) {
            self.damaged |= self.move_with(state).is_none();
        }
        // The same bytes as data that arrived after the save. Hardly any device accepts data there.
        if let Err(why) = self.device.attach(&bytes) {
            assert!(!why.to_string().is_empty());
        }
        self.step(false, ThreadlessDevice::resume);
    }

    fn last_saved(&self) -> Vec<u8> {
        postcard::to_stdvec(&self.device.save().unwrap()).unwrap()
    }

    /// Restores `state` into a new device that replaces this one. Returns the reason if that fails.
    /// The device is paused in both cases.
    fn move_with(&mut self, state: VirtioState) -> Option<String> {
        let ram = self.memory.memory().ram().clone();
        let new = ThreadlessDevice::new("fuzz", self.fuzzed.make(), ram).unwrap();
        if let Err(why) = new.restore(state) {
            return Some(why.to_string());
        }
        if let Err(why) = self.device.release() {
            self.device.acquire().unwrap();
            return Some(why.to_string());
        }
        let queued_packets = self.device.detach(4096);
        assert!(queued_packets.len() <= 4096);
        // These bytes may be malformed.
        let _ = new.attach(&queued_packets);
        new.acquire().unwrap();
        self.device = new;
        None
    }
}

fn rings(queue: usize) -> u64 {
    RINGS + queue as u64 * RINGS_STEP
}
