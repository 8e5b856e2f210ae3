//! A guest whose driver breaks the rules of virtio, by every device and in every way that there is a name
//! for: the VMM says which device and why, and stops that one; the machine and its other devices go on.
//!
//! The guest is a table of register and memory writes with the few instructions that go through it, so
//! what a driver does here it does through the machine: exits, ioeventfds, the devices' threads.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "kvm/elf.rs"]
mod elf;

use std::fs::File;

use common::{Place, Tap, driftline, text};
use elf::{CODE_AT, Elf};
use vmm::testing::{kvm_or_skip, skip};

/// Where devices' registers begin, and a device's register numbers.
const DEVICES: u32 = 0xd000_0000;
const DRIVER_FEATURES: u32 = 0x20;
const DRIVER_FEATURES_SEL: u32 = 0x24;
const QUEUE_SEL: u32 = 0x30;
const QUEUE_NUM: u32 = 0x38;
const QUEUE_READY: u32 = 0x44;
const QUEUE_NOTIFY: u32 = 0x50;
const STATUS: u32 = 0x70;
const QUEUE_DESC_LOW: u32 = 0x80;
const QUEUE_AVAIL_LOW: u32 = 0x90;
const QUEUE_USED_LOW: u32 = 0xa0;

const NEEDS_RESET: u32 = 64;
const NEXT: u32 = 1;
const WRITE: u32 = 2;
const INDIRECT: u32 = 4;
/// Entries of all queues.
const SIZE: u32 = 8;
/// The guest's memory ends here.
const MEM_BYTES: u32 = 32 << 20;
/// Where rings are: descriptors, available ring, used ring, a page apart; then the buffers.
const RINGS: u32 = 0x20_0000;
const AVAILABLE: u32 = RINGS + 0x1000;
const USED: u32 = RINGS + 0x2000;
const BUFFERS: u32 = 0x30_0000;

/// The end of what the guest does, or one thing that it does: write 32 bits, wait for them, print a
/// character.
#[derive(Clone, Copy)]
enum Step {
    Write(u32, u32),
    Wait(u32, u32, u32),
    Print(u8),
}

/// A device of the guest's.
#[derive(Clone, Copy)]
struct Target {
    /// Its place.
    index: u32,
    /// The queue that is misused.
    queue: u32,
    /// As messages name it.
    label: &'static str,
}

impl Target {
    fn register(self, register: u32) -> u32 {
        DEVICES + 0x1000 * self.index + register
    }
}

#[derive(Default)]
struct Script(Vec<Step>);

impl Script {
    fn write(&mut self, addr: u32, value: u32) {
        self.0.push(Step::Write(addr, value));
    }

    fn set(&mut self, device: Target, register: u32, value: u32) {
        self.write(device.register(register), value);
    }

    /// From a reset to a ready driver, with one queue and fresh rings.
    fn start(&mut self, device: Target) {
        self.set(device, STATUS, 0);
        self.set(device, STATUS, 3);
        // VERSION_1, and for indirect tables their own.
        for (select, features) in [(0, 1 << 28), (1, 1)] {
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
        self.0.push(Step::Wait(device.register(STATUS), !0, 15));
    }

    fn describe(&mut self, index: u32, addr: u32, len: u32, flags: u32, next: u32) {
        let words = [addr, 0, len, flags | next << 16];
        for (at, word) in (RINGS + 16 * index..).step_by(4).zip(words) {
            self.write(at, word);
        }
    }

    /// Makes the chain from `head` available, as the first one of `count`, and notifies.
    fn offer(&mut self, device: Target, head: u32, count: u32) {
        self.write(AVAILABLE + 4, head);
        self.write(AVAILABLE, count << 16);
        self.set(device, QUEUE_NOTIFY, device.queue);
    }

    /// Waits until the device asks for a reset.
    fn await_stop(&mut self, device: Target) {
        self.0.push(Step::Wait(device.register(STATUS), NEEDS_RESET, NEEDS_RESET));
        self.0.push(Step::Print(b'S'));
    }

    /// Uses a device as it is meant: 16 bytes of randomness, or the disk's first sector.
    fn use_well(&mut self, device: Target) {
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
        self.0.push(Step::Wait(USED, 0xffff_0000, 1 << 16));
        if !device.label.contains("rng") {
            self.0.push(Step::Wait(BUFFERS + 0x2000, 0xff, 0));
        }
        self.0.push(Step::Print(b'W'));
    }

    /// An ELF file that does all of it, and resets.
    fn kernel(&self) -> Vec<u8> {
        const TABLE_AT: u32 = 64;
        // mov esi, table
        let mut code = vec![0xbe];
        code.extend((CODE_AT + TABLE_AT).to_le_bytes());
        // next: mov eax, [esi]; mov ebx, [esi+4]; mov ecx, [esi+8]; mov edx, [esi+12]; add esi, 16
        code.extend([0x8b, 0x06, 0x8b, 0x5e, 4, 0x8b, 0x4e, 8, 0x8b, 0x56, 12, 0x83, 0xc6, 16]);
        // cmp eax, 1; je write; cmp eax, 2; je wait; cmp eax, 3; je print; mov al, 0xfe; out 0x64, al; jmp $
        code.extend([0x83, 0xf8, 1, 0x74, 16, 0x83, 0xf8, 2, 0x74, 15, 0x83, 0xf8, 3, 0x74, 20]);
        code.extend([0xb0, 0xfe, 0xe6, 0x64, 0xeb, 0xfe]);
        // write: mov [ebx], ecx; jmp next
        code.extend([0x89, 0x0b, 0xeb, 0xd9]);
        // wait: mov edi, [ebx]; and edi, edx; cmp edi, ecx; jne wait; jmp next
        code.extend([0x8b, 0x3b, 0x21, 0xd7, 0x39, 0xcf, 0x75, 0xf8, 0xeb, 0xcf]);
        // print: mov al, cl; mov dx, 0x3f8; out dx, al; jmp next
        code.extend([0x88, 0xc8, 0x66, 0xba, 0xf8, 0x03, 0xee, 0xeb, 0xc6]);
        code.resize(TABLE_AT as usize, 0);
        for step in &self.0 {
            let words = match *step {
                Step::Write(addr, value) => [1, addr, value, 0],
                Step::Wait(addr, mask, value) => [2, addr, value, mask],
                Step::Print(character) => [3, 0, character.into(), 0],
            };
            code.extend(words.iter().flat_map(|w| w.to_le_bytes()));
        }
        code.extend([0; 16]);
        Elf::new(&code).bytes()
    }
}

/// What a driver does, and a part of what is said of it.
type Crime = (&'static str, fn(&mut Script, Target), &'static str);

const CRIMES: [Crime; 11] = [
    (
        "a loop",
        |s, d| {
            s.describe(0, BUFFERS, 64, NEXT, 1);
            s.describe(1, BUFFERS, 64, NEXT, 0);
            s.offer(d, 0, 1);
        },
        "the descriptor chain from 0 is broken: it loops",
    ),
    (
        "a next descriptor that does not exist",
        |s, d| {
            s.describe(0, BUFFERS, 64, NEXT, SIZE);
            s.offer(d, 0, 1);
        },
        "the descriptor chain from 0 is broken",
    ),
    (
        "a head that does not exist",
        |s, d| s.offer(d, SIZE, 1),
        "the descriptor chain from 8 is broken",
    ),
    ("an available index that runs away", |s, d| s.offer(d, 0, SIZE + 1), "of 8 entries: "),
    (
        "a length past memory",
        |s, d| {
            s.describe(0, MEM_BYTES - 0x1000, 0x2000, 0, 0);
            s.offer(d, 0, 1);
        },
        "a buffer of 8192 bytes at 0x1fff000 does not lie in guest memory",
    ),
    (
        "registers as a buffer",
        |s, d| {
            s.describe(0, DEVICES, 16, WRITE, 0);
            s.offer(d, 0, 1);
        },
        "a buffer of 16 bytes at 0xd0000000 does not lie in guest memory",
    ),
    (
        "an indirect table in no memory",
        |s, d| {
            s.describe(0, MEM_BYTES, 32, INDIRECT, 0);
            s.offer(d, 0, 1);
        },
        "the descriptor chain from 0 is broken",
    ),
    (
        "a queue moved while in use",
        |s, d| s.set(d, QUEUE_DESC_LOW, RINGS + 0x4000),
        "(register 0x80) while it is in use",
    ),
    (
        "a queue resized while in use",
        |s, d| s.set(d, QUEUE_NUM, 4),
        "(register 0x38) while it is in use",
    ),
    (
        "a queue that does not exist",
        |s, d| {
            s.set(d, QUEUE_SEL, 77);
            s.set(d, QUEUE_READY, 1);
        },
        "its driver sets up queue 77, which does not exist",
    ),
    (
        "rings in no memory",
        |s, d| {
            s.set(d, QUEUE_READY, 0);
            s.set(d, QUEUE_USED_LOW, MEM_BYTES - 16);
            s.set(d, QUEUE_READY, 1);
        },
        "its used ring of 70 bytes at 0x1fffff0 is not in guest memory",
    ),
];

/// What the device may only read, given to one that has to write; and what is said of it.
fn read_only(label: &str) -> Option<&'static str> {
    match label.split(' ').next()? {
        "virtio-blk" => Some("has no room for a status"),
        "virtio-rng" => Some("has no room for randomness"),
        // The queues of the others that are misused here are for reading.
        _ => None,
    }
}

/// The devices of the guest, in the order of their places, and the options that make them.
fn devices(place: &Place, tap: Option<&Tap>) -> (Vec<Target>, Vec<String>) {
    let disk = place.path("disk");
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let mut options = vec!["--disk".to_owned(), format!("path={}", disk.display())];
    let mut labels = vec![(0, "virtio-blk \"disk0\"")];
    if let Some(tap) = tap {
        options.extend(["--net".to_owned(), format!("tap={}", tap.0)]);
        labels.push((1, "virtio-net \"net0\""));
    }
    let uds = place.text("vsock");
    options.extend(["--vsock".to_owned(), format!("cid=5,uds={uds}"), "--balloon".to_owned()]);
    labels.extend([
        (1, "virtio-vsock \"vsock\""),
        (0, "virtio-rng \"rng\""),
        (0, "virtio-balloon \"balloon\""),
    ]);
    let target = |(index, (queue, label))| Target { index, queue, label };
    ((0..).zip(labels).map(target).collect(), options)
}

/// Runs a guest that does `script`; what it printed, and what was said of it.
fn run(place: &Place, script: &Script, options: &[String], log: &[&str]) -> (String, String) {
    let kernel = place.path("kernel");
    std::fs::write(&kernel, script.kernel()).unwrap();
    let memory = MEM_BYTES.to_string();
    let fixed = ["run", "--mem", &memory, "--kernel", kernel.to_str().unwrap()];
    let out = driftline(&fixed).args(options).args(log).output().unwrap();
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{said}");
    assert!(said.ends_with("driftline: the guest asked for a reset\n"), "{said}");
    (text(&out.stdout), said)
}

#[test]
fn a_driver_that_breaks_the_rules_stops_its_device_and_no_other() {
    const TEST: &str = "a_driver_that_breaks_the_rules_stops_its_device_and_no_other";
    if !kvm_or_skip(TEST) {
        return;
    }
    let place = Place::new();
    let tap = Tap::new("h");
    if let Err(why) = &tap {
        skip(TEST, &format!("without a network interface: {why}"));
    }
    let (targets, options) = devices(&place, tap.as_ref().ok());
    let (mut script, mut expected) = (Script::default(), Vec::new());
    for &device in &targets {
        // Another one goes on meanwhile.
        let witness = if device.label.contains("rng") { "blk" } else { "rng" };
        let witness = *targets.iter().find(|t| t.label.contains(witness)).unwrap();
        let mut commit = |crime: &dyn Fn(&mut Script), says: &str| {
            script.start(device);
            crime(&mut script);
            script.await_stop(device);
            script.use_well(witness);
            expected.push((device.label, says.to_owned()));
        };
        for (_, crime, says) in &CRIMES {
            commit(&|s| crime(s, device), says);
        }
        if let Some(says) = read_only(device.label) {
            let crime = |s: &mut Script| {
                s.describe(0, BUFFERS, 64, 0, 0);
                s.offer(device, 0, 1);
            };
            commit(&crime, says);
        }
    }
    // And it works again for a driver that does as it should.
    script.use_well(targets[0]);
    let (printed, said) = run(&place, &script, &options, &["--log", "vmm=debug"]);
    assert_eq!(printed, "SW".repeat(expected.len()) + "W", "{said}");
    let stops: Vec<&str> = said.lines().filter(|line| line.contains(" is stopped")).collect();
    assert_eq!(stops.len(), expected.len(), "{said}");
    for (stop, (label, says)) in stops.iter().zip(expected) {
        assert!(stop.contains(label) && stop.contains(&says), "{label}: {says}: {stop}");
    }
}

#[test]
fn a_driver_cannot_fill_the_log() {
    if !kvm_or_skip("a_driver_cannot_fill_the_log") {
        return;
    }
    let place = Place::new();
    let (targets, options) = devices(&place, None);
    let mut script = Script::default();
    for _ in 0..50 {
        script.start(targets[0]);
        script.set(targets[0], QUEUE_NUM, 3);
        script.await_stop(targets[0]);
        // Given up by its driver.
        script.set(targets[0], STATUS, 128);
    }
    let (printed, said) = run(&place, &script, &options, &[]);
    assert_eq!(printed, "S".repeat(50));
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 2, "one line of the device, one of the end: {said}");
    assert!(lines[0].contains("virtio-blk \"disk0\" is stopped until its driver resets it: "));
}
