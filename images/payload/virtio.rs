//! Requests to the machine's first virtio disk and its first virtio interface, so that they are in
//! use. The disk's blocks are written and read back in turn; frames are sent, and those that arrive
//! are received and dropped. One request of a kind is under way at a time, and nothing waits for
//! it. The devices' interrupts are off.
//!
//! The registers are those of virtio over MMIO, version 2, at the places where Driftline has them.

use core::arch::asm;
use core::sync::atomic::{Ordering, fence};

use crate::heap;
use crate::workload::LineBuffer;

/// Address of the first device's registers, the distance to those of the next one, and the number
/// of places.
const FIRST: u64 = 0xd000_0000;
const STRIDE: u64 = 0x1000;
const PLACES: u64 = 19;

const MAGIC: u32 = 0x7472_6976;
const NET: u32 = 1;
const DISK: u32 = 2;

// Offsets of registers.
const MAGIC_VALUE: u64 = 0x00;
const DEVICE_ID: u64 = 0x08;
const DRIVER_FEATURES: u64 = 0x20;
const DRIVER_FEATURES_SEL: u64 = 0x24;
const QUEUE_SEL: u64 = 0x30;
const QUEUE_NUM: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const QUEUE_NOTIFY: u64 = 0x50;
const STATUS: u64 = 0x70;
const QUEUE_DESC: u64 = 0x80;
const QUEUE_DRIVER: u64 = 0x90;
const QUEUE_DEVICE: u64 = 0xa0;
/// Number of 512-byte sectors, in a disk's configuration.
const CAPACITY: u64 = 0x100;

/// Bit 32 of the features, in their second half.
const VERSION_1: u32 = 1;
const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;

/// Number of descriptors in a queue.
const SIZE: u16 = 8;
// Offsets in a queue's page.
const AVAILABLE: u64 = 0x100;
const USED: u64 = 0x200;
/// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

const BLOCK: u64 = 4096;
const SECTORS: u64 = BLOCK / 512;
/// Largest number of blocks that are used.
const BLOCKS: u64 = 1024;
/// Bytes of the header of a frame, of a frame that is sent, and of the largest one that arrives.
const FRAME_HEAD: u32 = 12;
const FRAME: u32 = 60;
const LARGEST_FRAME: u32 = 1526;

/// Part of a request.
#[derive(Clone, Copy)]
struct Part {
    at: u64,
    bytes: u32,
    /// Whether the device writes it.
    writes: bool,
}

/// A queue, with at most one request under way.
struct PayloadQueue {
    registers: u64,
    index: u32,
    page: u64,
    /// Requests so far.
    sent: u16,
}

impl PayloadQueue {
    /// Gives a queue to the device at `registers`.
    fn start(registers: u64, index: u32) -> Self {
        let page = take_cleared();
        write_register(registers, QUEUE_SEL, index);
        write_register(registers, QUEUE_NUM, u32::from(SIZE));
        for (register, at) in
            [(QUEUE_DESC, page), (QUEUE_DRIVER, page + AVAILABLE), (QUEUE_DEVICE, page + USED)]
        {
            write_register(registers, register, at as u32);
            write_register(registers, register + 4, (at >> 32) as u32);
        }
        // The device need not interrupt.
        store::<u16>(page + AVAILABLE, 1);
        write_register(registers, QUEUE_READY, 1);
        PayloadQueue { registers, index, page, sent: 0 }
    }

    /// Returns whether the device has finished all requests.
    #[inline(always)]
    fn is_idle(&self) -> bool {
        let used = load::<u16>(self.page + USED + 2);
        fence(Ordering::Acquire);
        used == self.sent
    }

    fn send(&mut self, parts: &[Part]) {
        for (index, part) in (0u64..).zip(parts) {
            let at = self.page + index * 16;
            let is_last = index + 1 == parts.len() as u64;
            store(at, part.at);
            store(at + 8, part.bytes);
            let flags = if part.writes { WRITE } else { 0 } | if is_last { 0 } else { NEXT };
            store(at + 12, flags);
            store(at + 14, index as u16 + 1);
        }
        // The request begins at descriptor 0.
        store::<u16>(self.page + AVAILABLE + 4 + u64::from(self.sent % SIZE) * 2, 0);
        fence(Ordering::Release);
        self.sent = self.sent.wrapping_add(1);
        store(self.page + AVAILABLE + 2, self.sent);
        fence(Ordering::SeqCst);
        write_register(self.registers, QUEUE_NOTIFY, self.index);
    }
}

/// The request to the disk that is under way, or the last one.
enum DiskStep {
    Written,
    Read,
}

struct PayloadDisk {
    queue: PayloadQueue,
    /// The header, 16 bytes, and the status.
    head: u64,
    block: u64,
    blocks: u64,
    /// Blocks that were written and read back.
    checked: u64,
    /// `None` before the first request.
    step: Option<DiskStep>,
}

impl PayloadDisk {
    fn start(registers: u64) -> Self {
        let queue = begin_device(registers, |registers| PayloadQueue::start(registers, 0));
        let sectors = u64::from(read_register(registers, CAPACITY))
            | u64::from(read_register(registers, CAPACITY + 4)) << 32;
        let blocks = (sectors / SECTORS).min(BLOCKS);
        if blocks == 0 {
            refuse("io= needs a disk of at least 4K");
        }
        let (head, block) = (take_cleared(), heap::take(BLOCK));
        PayloadDisk { queue, head, block, blocks, checked: 0, step: None }
    }

    /// Returns the content of a word of the block that is in use.
    fn word(&self, word: u64) -> u64 {
        (self.checked + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word
    }

    fn sector(&self) -> u64 {
        self.checked % self.blocks * SECTORS
    }

    fn words(&self) -> impl Iterator<Item = (u64, u64)> {
        (0..BLOCK / 8).map(|word| (self.block + word * 8, self.word(word)))
    }

    /// Begins the next request if there is none under way.
    fn poll(&mut self) {
        if !self.queue.is_idle() {
            return;
        }
        let status = load::<u8>(self.head + 16);
        if status != 0 {
            refuse("the disk has failed a request");
        }
        match self.step {
            Some(DiskStep::Written) => {
                self.words().for_each(|(at, _)| store::<u64>(at, 0));
                self.step = Some(DiskStep::Read);
                return self.send(0);
            }
            Some(DiskStep::Read) => {
                if self.words().any(|(at, expected)| load::<u64>(at) != expected) {
                    refuse("the disk has returned other bytes than were written");
                }
                self.checked += 1;
            }
            None => {}
        }
        self.words().for_each(|(at, word)| store(at, word));
        self.step = Some(DiskStep::Written);
        self.send(1);
    }

    /// Sends a request: to read (0) or to write (1).
    fn send(&mut self, kind: u32) {
        store(self.head, kind);
        store(self.head + 4, 0u32);
        store(self.head + 8, self.sector());
        store(self.head + 16, 0xffu8);
        let head = Part { at: self.head, bytes: 16, writes: false };
        let block = Part { at: self.block, bytes: BLOCK as u32, writes: kind == 0 };
        let status = Part { at: self.head + 16, bytes: 1, writes: true };
        self.queue.send(&[head, block, status]);
    }
}

struct PayloadNet {
    arriving: PayloadQueue,
    sending: PayloadQueue,
    arriving_at: u64,
    sending_at: u64,
    /// Whether a frame was given to the device.
    has_begun: bool,
    /// Frames that were sent.
    sent: u64,
}

impl PayloadNet {
    fn start(registers: u64) -> Self {
        let [arriving, sending] = begin_device(registers, |registers| {
            [PayloadQueue::start(registers, 0), PayloadQueue::start(registers, 1)]
        });
        let (arriving_at, sending_at) = (heap::take(4096), take_cleared());
        // To all, from a local address, of a kind for experiments.
        let frame = [[0xff; 6], [2, 0, 0, 0, 0, 1]];
        for (at, byte) in (sending_at + u64::from(FRAME_HEAD)..).zip(frame.as_flattened()) {
            store(at, *byte);
        }
        store(sending_at + u64::from(FRAME_HEAD) + 12, 0xb588u16);
        PayloadNet { arriving, sending, arriving_at, sending_at, has_begun: false, sent: 0 }
    }

    fn poll(&mut self) {
        if self.arriving.is_idle() {
            let room = Part { at: self.arriving_at, bytes: LARGEST_FRAME, writes: true };
            self.arriving.send(&[room]);
        }
        if self.sending.is_idle() {
            self.sent += u64::from(self.has_begun);
            self.has_begun = true;
            let frame = Part { at: self.sending_at, bytes: FRAME_HEAD + FRAME, writes: false };
            self.sending.send(&[frame]);
        }
    }
}

/// The devices that are in use.
pub struct Devices {
    disk: Option<PayloadDisk>,
    net: Option<PayloadNet>,
    interval_ns: u64,
    next_ns: u64,
    report_ns: u64,
    next_report_ns: u64,
}

impl Devices {
    /// Begins to use the devices, with a request of each kind every `io_ms`. Only before the loop.
    pub fn start(io_ms: u64, report_ms: u64) -> Self {
        mask_interrupts();
        let device = |id| {
            let places = (0..PLACES).map(|place| FIRST + place * STRIDE);
            places
                .filter(|at| read_register(*at, MAGIC_VALUE) == MAGIC)
                .find(|at| read_register(*at, DEVICE_ID) == id)
        };
        let (disk, net) =
            (device(DISK).map(PayloadDisk::start), device(NET).map(PayloadNet::start));
        if disk.is_none() && net.is_none() {
            refuse("io= needs a virtio disk or interface");
        }
        let (interval_ns, report_ns) = (io_ms * 1_000_000, report_ms * 1_000_000);
        Devices { disk, net, interval_ns, next_ns: 0, report_ns, next_report_ns: 0 }
    }

    /// Begins the requests that are due.
    #[inline(always)]
    pub fn poll(&mut self, now_ns: u64, print: &mut impl FnMut(&[u8])) {
        if now_ns >= self.next_ns {
            self.next_ns = now_ns + self.interval_ns;
            self.poll_all(now_ns, print);
        }
    }

    #[cold]
    #[inline(never)]
    fn poll_all(&mut self, now_ns: u64, print: &mut dyn FnMut(&[u8])) {
        if let Some(disk) = &mut self.disk {
            disk.poll();
        }
        if let Some(net) = &mut self.net {
            net.poll();
        }
        if now_ns >= self.next_report_ns {
            self.next_report_ns = now_ns + self.report_ns;
            let mut line = LineBuffer::new();
            line.text("payload io");
            line.field("blocks", self.disk.as_ref().map_or(0, |disk| disk.checked));
            line.field("frames", self.net.as_ref().map_or(0, |net| net.sent)).byte(b'\n');
            print(line.as_bytes());
        }
    }
}

/// Returns a page of zeros. The memory of a restarted machine has its old content.
fn take_cleared() -> u64 {
    let page = heap::take(4096);
    (page..page + 4096).step_by(8).for_each(|at| store(at, 0u64));
    page
}

/// Resets a device, accepts none of its optional features, and starts it with the queues that
/// `queues` returns.
fn begin_device<Q>(registers: u64, queues: impl FnOnce(u64) -> Q) -> Q {
    write_register(registers, STATUS, 0);
    while read_register(registers, STATUS) != 0 {
        core::hint::spin_loop();
    }
    write_register(registers, STATUS, ACKNOWLEDGE | DRIVER);
    for (half, features) in [(0, 0), (1, VERSION_1)] {
        write_register(registers, DRIVER_FEATURES_SEL, half);
        write_register(registers, DRIVER_FEATURES, features);
    }
    write_register(registers, STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
    if read_register(registers, STATUS) & FEATURES_OK == 0 {
        refuse("a virtio device needs features that the payload does not have");
    }
    let queues = queues(registers);
    write_register(registers, STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    queues
}

/// Masks the legacy interrupt controllers, which deliver the devices' interrupts to vCPU 0 as
/// exceptions until they are set up. Only in ring 0.
fn mask_interrupts() {
    for port in [0x21u16, 0xa1] {
        // SAFETY: writes the mask of an interrupt controller.
        unsafe {
            asm!("out dx, al", in("dx") port, in("al") 0xffu8,
                options(nomem, nostack, preserves_flags))
        };
    }
}

#[cold]
fn refuse(why: &str) -> ! {
    crate::end_with(LineBuffer::new().text("payload fatal: ").text(why))
}

fn read_register(registers: u64, offset: u64) -> u32 {
    load(registers + offset)
}

fn write_register(registers: u64, offset: u64, value: u32) {
    store(registers + offset, value);
}

#[inline(always)]
fn load<T>(at: u64) -> T {
    // SAFETY: registers of a device, or memory that was allocated for a queue or a request. Both
    // are mapped.
    unsafe { (at as *const T).read_volatile() }
}

#[inline(always)]
fn store<T>(at: u64, value: T) {
    // SAFETY: as for loads.
    unsafe { (at as *mut T).write_volatile(value) }
}
