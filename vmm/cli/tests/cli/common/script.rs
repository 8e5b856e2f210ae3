//! A guest that drives virtio devices by a script. The guest is a table of register and memory
//! writes, and a few instructions that walk the table. A driver's actions therefore pass through
//! the machine: exits, ioeventfds, and the devices' threads.

use driftline_machine::testing::{CODE_AT, Elf};

/// Guest physical address of the devices' registers; register offsets within a device.
pub const DEVICES: u32 = 0xd000_0000;
const DRIVER_FEATURES: u32 = 0x20;
const DRIVER_FEATURES_SEL: u32 = 0x24;
pub const QUEUE_SEL: u32 = 0x30;
pub const QUEUE_NUM: u32 = 0x38;
pub const QUEUE_READY: u32 = 0x44;
pub const QUEUE_NOTIFY: u32 = 0x50;
pub const STATUS: u32 = 0x70;
pub const QUEUE_DESC_LOW: u32 = 0x80;
const QUEUE_AVAIL_LOW: u32 = 0x90;
pub const QUEUE_USED_LOW: u32 = 0xa0;
const CONFIG: u32 = 0x100;

const NEEDS_RESET: u32 = 64;
pub const NEXT: u32 = 1;
pub const WRITE: u32 = 2;
pub const INDIRECT: u32 = 4;
/// Number of entries in each queue.
pub const SIZE: u32 = 8;
/// Size of guest memory, in bytes.
pub const MEM_BYTES: u32 = 32 << 20;
/// Addresses of the rings, one page apart: descriptors, available ring, used ring; then the
/// buffers.
pub const RINGS: u32 = 0x20_0000;
pub const AVAILABLE: u32 = RINGS + 0x1000;
pub const USED: u32 = RINGS + 0x2000;
pub const BUFFERS: u32 = 0x30_0000;

/// One step of the guest: write 32 bits, wait for 32 bits, print a character, continue at another
/// step, or halt forever.
#[derive(Clone, Copy)]
pub enum DriverStep {
    Write(u32, u32),
    Wait(u32, u32, u32),
    Print(u8),
    GoTo(u32),
    Halt,
}

/// A device of the guest.
#[derive(Clone, Copy)]
pub struct ScriptedDevice {
    /// Index of the device's register page.
    pub index: u32,
    /// Index of the queue that the script uses.
    pub queue: u32,
    /// Name of the device in messages.
    pub label: &'static str,
}

impl ScriptedDevice {
    pub fn register(self, register: u32) -> u32 {
        DEVICES + 0x1000 * self.index + register
    }
}

#[derive(Default)]
pub struct DriverScript(Vec<DriverStep>);

impl DriverScript {
    pub fn write(&mut self, addr: u32, value: u32) {
        self.0.push(DriverStep::Write(addr, value));
    }

    pub fn set(&mut self, device: ScriptedDevice, register: u32, value: u32) {
        self.write(device.register(register), value);
    }

    /// Takes the device from a reset to a ready driver, with one queue and fresh rings.
    pub fn start(&mut self, device: ScriptedDevice) {
        self.set(device, STATUS, 0);
        self.set(device, STATUS, 3);
        // VERSION_1 and INDIRECT_DESC; for disks also FLUSH.
        let flush = u32::from(device.label.contains("blk")) << 9;
        for (select, features) in [(0, 1 << 28 | flush), (1, 1)] {
            self.set(device, DRIVER_FEATURES_SEL, select);
            self.set(device, DRIVER_FEATURES, features);
        }
        self.set(device, STATUS, 11);
        for addr in [AVAILABLE, USED] {
            self.write(addr, 0);
        }
        self.set(device, QUEUE_SEL, device.queue);
        self.set(device, QUEUE_NUM, SIZE);
        for (register, addr) in
            [(QUEUE_DESC_LOW, RINGS), (QUEUE_AVAIL_LOW, AVAILABLE), (QUEUE_USED_LOW, USED)]
        {
            self.set(device, register, addr);
            self.set(device, register + 4, 0);
        }
        self.set(device, QUEUE_READY, 1);
        self.set(device, STATUS, 15);
        self.0.push(DriverStep::Wait(device.register(STATUS), !0, 15));
    }

    pub fn describe(&mut self, index: u32, addr: u32, len: u32, flags: u32, next: u32) {
        let words = [addr, 0, len, flags | next << 16];
        for (at, word) in (RINGS + 16 * index..).step_by(4).zip(words) {
            self.write(at, word);
        }
    }

    /// Makes the chain from `head` available as the first one of `count`, and notifies the device.
    pub fn offer(&mut self, device: ScriptedDevice, head: u32, count: u32) {
        self.write(AVAILABLE + 4, head);
        self.write(AVAILABLE, count << 16);
        self.set(device, QUEUE_NOTIFY, device.queue);
    }

    /// Waits until the device requests a reset.
    pub fn await_stop(&mut self, device: ScriptedDevice) {
        self.0.push(DriverStep::Wait(device.register(STATUS), NEEDS_RESET, NEEDS_RESET));
        self.0.push(DriverStep::Print(b'S'));
    }

    /// Uses a device correctly: reads 16 bytes of randomness, or the disk's first sector. The
    /// device is then reset, because it may read its rings again, which are those of the next
    /// device, too.
    pub fn use_well(&mut self, device: ScriptedDevice) {
        self.start(device);
        if device.label.contains("rng") {
            self.describe(0, BUFFERS, 16, WRITE, 0);
        } else {
            let status = BUFFERS + 0x2000;
            for word in 0..4 {
                self.write(BUFFERS + 4 * word, 0);
            }
            self.write(status, 0xff);
            self.describe(0, BUFFERS, 16, NEXT, 1);
            self.describe(1, BUFFERS + 0x1000, 512, NEXT | WRITE, 2);
            self.describe(2, status, 1, WRITE, 0);
        }
        self.offer(device, 0, 1);
        self.0.push(DriverStep::Wait(USED, 0xffff_0000, 1 << 16));
        if !device.label.contains("rng") {
            self.0.push(DriverStep::Wait(BUFFERS + 0x2000, 0xff, 0));
        }
        self.set(device, STATUS, 0);
        self.0.push(DriverStep::Wait(device.register(STATUS), !0, 0));
        self.0.push(DriverStep::Print(b'W'));
    }

    /// Requests a flush of a disk and halts, so that a guest whose flush hangs needs no processor.
    pub fn flush(&mut self, disk: ScriptedDevice) {
        let status = BUFFERS + 0x2000;
        self.start(disk);
        // The type of the request, and the rest of its header.
        for (word, value) in (0..4).zip([4, 0, 0, 0]) {
            self.write(BUFFERS + 4 * word, value);
        }
        self.write(status, 0xff);
        self.describe(0, BUFFERS, 16, NEXT, 1);
        self.describe(1, status, 1, WRITE, 0);
        self.offer(disk, 0, 1);
        self.0.push(DriverStep::Halt);
    }

    /// Writes zeros to a sector of a disk again and again, without an end.
    pub fn write_zeros_forever(&mut self, disk: ScriptedDevice, sector: u32) {
        let (again, status) = (self.0.len() as u32, BUFFERS + 0x2000);
        self.start(disk);
        // The type of the request, and the rest of its header.
        for (word, value) in (0..4).zip([1, 0, sector, 0]) {
            self.write(BUFFERS + 4 * word, value);
        }
        self.describe(0, BUFFERS, 16, NEXT, 1);
        self.describe(1, BUFFERS + 0x1000, 512, NEXT, 2);
        self.describe(2, status, 1, WRITE, 0);
        self.offer(disk, 0, 1);
        self.0.push(DriverStep::Wait(USED, 0xffff_0000, 1 << 16));
        self.0.push(DriverStep::GoTo(again));
    }

    /// Waits until the driver of `device` reads `value` at `offset` of its configuration space.
    pub fn await_config(&mut self, device: ScriptedDevice, offset: u32, value: u32) {
        self.0.push(DriverStep::Wait(device.register(CONFIG + offset), !0, value));
    }

    /// Discards `gib` GiB of a disk from its start, up to 128, 16 with each request. Prints a D
    /// when all requests have succeeded.
    pub fn discard(&mut self, disk: ScriptedDevice, gib: u32) {
        const DISCARD: u32 = 11;
        const GIB_SECTORS: u32 = 1 << 21;
        let (ranges, status) = (BUFFERS + 0x1000, BUFFERS + 0x2000);
        self.start(disk);
        let sectors: Vec<u32> = (0..gib).map(|n| n * GIB_SECTORS).collect();
        for (request, sectors) in (1..).zip(sectors.chunks(16)) {
            for (word, value) in (0..4).zip([DISCARD, 0, 0, 0]) {
                self.write(BUFFERS + 4 * word, value);
            }
            let words = sectors.iter().flat_map(|sector| [*sector, 0, GIB_SECTORS, 0]);
            (ranges..).step_by(4).zip(words).for_each(|(at, word)| self.write(at, word));
            self.write(status, 0xff);
            self.describe(0, BUFFERS, 16, NEXT, 1);
            self.describe(1, ranges, 16 * sectors.len() as u32, NEXT, 2);
            self.describe(2, status, 1, WRITE, 0);
            self.offer(disk, 0, request);
            self.0.push(DriverStep::Wait(USED, 0xffff_0000, request << 16));
            self.0.push(DriverStep::Wait(status, 0xff, 0));
        }
        self.0.push(DriverStep::Print(b'D'));
    }

    /// Returns an ELF file that performs all steps, then resets.
    pub fn kernel(&self) -> Vec<u8> {
        const TABLE_AT: u32 = 80;
        // mov esi, table
        let mut code = vec![0xbe];
        code.extend((CODE_AT + TABLE_AT).to_le_bytes());
        // next: mov eax, [esi]; mov ebx, [esi+4]; mov ecx, [esi+8]; mov edx, [esi+12]; add esi, 16
        code.extend([0x8b, 0x06, 0x8b, 0x5e, 4, 0x8b, 0x4e, 8, 0x8b, 0x56, 12, 0x83, 0xc6, 16]);
        // cmp eax, 1; je write; cmp eax, 2; je wait; cmp eax, 3; je print; cmp eax, 4; je goto;
        // cmp eax, 5; je halt
        code.extend([0x83, 0xf8, 1, 0x74, 26, 0x83, 0xf8, 2, 0x74, 25]);
        code.extend([0x83, 0xf8, 3, 0x74, 30, 0x83, 0xf8, 4, 0x74, 34]);
        code.extend([0x83, 0xf8, 5, 0x74, 33]);
        // mov al, 0xfe; out 0x64, al; jmp $
        code.extend([0xb0, 0xfe, 0xe6, 0x64, 0xeb, 0xfe]);
        // write: mov [ebx], ecx; jmp next
        code.extend([0x89, 0x0b, 0xeb, 0xcf]);
        // wait: mov edi, [ebx]; and edi, edx; cmp edi, ecx; jne wait; jmp next
        code.extend([0x8b, 0x3b, 0x21, 0xd7, 0x39, 0xcf, 0x75, 0xf8, 0xeb, 0xc5]);
        // print: mov al, cl; mov dx, 0x3f8; out dx, al; jmp next
        code.extend([0x88, 0xc8, 0x66, 0xba, 0xf8, 0x03, 0xee, 0xeb, 0xbc]);
        // goto: mov esi, ebx; jmp next
        code.extend([0x89, 0xde, 0xeb, 0xb8]);
        // halt: hlt; jmp halt
        code.extend([0xf4, 0xeb, 0xfd]);
        code.resize(TABLE_AT as usize, 0);
        for step in &self.0 {
            let words = match *step {
                DriverStep::Write(addr, value) => [1, addr, value, 0],
                DriverStep::Wait(addr, mask, value) => [2, addr, value, mask],
                DriverStep::Print(character) => [3, 0, character.into(), 0],
                DriverStep::GoTo(step) => [4, CODE_AT + TABLE_AT + 16 * step, 0, 0],
                DriverStep::Halt => [5, 0, 0, 0],
            };
            code.extend(words.iter().flat_map(|w| w.to_le_bytes()));
        }
        code.extend([0; 16]);
        Elf::new(&code).bytes()
    }
}
