//! Rate limits under a guest that makes one request after the other, as fast as it can.

use std::net::{Ipv6Addr, SocketAddrV6, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use driftline_guest::{
    Clock, GuestContents, GuestFactory, GuestIdentity, HandOver, Lifecycle, NextHost, Stateful,
};
use driftline_machine::config::{
    DeviceConfig, LimitChange, LimitsChange, MacAddr, MachineConfig, NetConfig, NetLimits,
    RateLimit, RateLimits,
};
use driftline_machine::devices::DeviceStats;
use driftline_machine::machine::{KvmMachine, MachineFactory};
use driftline_machine::testing::{Elf, TestTap, disk, full, skip};
use driftline_machine::vm::Vm;
use tempfile::{NamedTempFile, TempDir};

use crate::harness::*;
use crate::state::copy;

/// Guest address of the first device's registers.
const REGISTERS: u32 = 0xd000_0000;
/// Guest addresses of the descriptors, the available ring and the used ring; then the buffers.
const RINGS: u32 = 0x20_0000;
const AVAILABLE: u32 = RINGS + 0x1000;
const USED: u32 = RINGS + 0x2000;
const BUFFERS: u32 = 0x30_0000;
const QUEUE_NOTIFY: u32 = 0x50;
const NEXT: u32 = 1;
const WRITE: u32 = 2;
/// Bytes of a read.
const READ: u32 = 64 << 10;
/// Bytes of a frame.
const FRAME: u32 = 1500;

/// Assembles a guest that sets up queue `queue` of the first device, and offers the chain of these
/// buffers (length and flags of each) again as soon as the device has given it back.
fn requester(queue: u32, buffers: &[(u32, u32)]) -> Vec<u8> {
    let mut code = Vec::new();
    // mov dword [addr], value
    let store = |code: &mut Vec<u8>, addr: u32, value: u32| {
        code.extend([0xc7, 0x05]);
        code.extend(addr.to_le_bytes());
        code.extend(value.to_le_bytes());
    };
    // A reset, then VERSION_1 and no other feature.
    for (register, value) in [(0x70, 0), (0x70, 3), (0x24, 1), (0x20, 1), (0x70, 11)] {
        store(&mut code, REGISTERS + register, value);
    }
    let rings = [(0x80, RINGS), (0x90, AVAILABLE), (0xa0, USED)];
    for (register, value) in
        [&[(0x30, queue), (0x38, 8)], &rings[..], &[(0x44, 1), (0x70, 15)]].concat()
    {
        store(&mut code, REGISTERS + register, value);
    }
    let mut addr = BUFFERS;
    for ((len, flags), i) in buffers.iter().zip(0u32..) {
        let at = RINGS + 16 * i;
        store(&mut code, at, addr);
        store(&mut code, at + 8, *len);
        store(&mut code, at + 12, flags | (i + 1) << 16);
        addr += len.next_multiple_of(4096);
    }
    // mov ecx, 0; next: inc ecx; mov [AVAILABLE + 2], cx. All entries of the ring are 0: the chain.
    code.extend([0xb9, 0, 0, 0, 0, 0x41, 0x66, 0x89, 0x0d]);
    code.extend((AVAILABLE + 2).to_le_bytes());
    store(&mut code, REGISTERS + QUEUE_NOTIFY, queue);
    // wait: mov ax, [USED + 2]; cmp ax, cx; jne wait; jmp next
    code.extend([0x66, 0xa1]);
    code.extend((USED + 2).to_le_bytes());
    code.extend([0x66, 0x39, 0xc8, 0x75, 0xf5, 0xeb, 0xe1]);
    Elf::new(&code).bytes()
}

/// A guest that reads a disk with these limits.
fn reader(limits: RateLimits, dir: &TempDir) -> (MachineConfig, NamedTempFile) {
    let file = NamedTempFile::new_in(dir.path()).unwrap();
    file.as_file().set_len(MIB).unwrap();
    let mut config = kernel(&requester(0, &[(16, NEXT), (READ, NEXT | WRITE), (1, WRITE)]), dir);
    let mut disk = disk("disk0", file.path(), MIB);
    disk.limits = limits;
    config.devices = vec![DeviceConfig::Disk(disk)];
    (config, file)
}

/// Returns the bytes that the guest has read, or sent and received.
fn moved(machine: &KvmMachine) -> u64 {
    match machine.info().devices.first() {
        Some(DeviceStats::Disk { read_bytes, .. }) => *read_bytes,
        Some(DeviceStats::Net { sent_bytes, received_bytes, .. }) => sent_bytes + received_bytes,
        None => 0,
    }
}

#[track_caller]
fn wait_until_moved(machine: &KvmMachine, bytes: u64) {
    let end = Instant::now() + LONG;
    while moved(machine) < bytes {
        assert!(Instant::now() < end, "{} of {bytes} bytes", moved(machine));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The guest gets the burst and the bucket, whose refill takes decades, and not a byte more, also
/// after a restore. Then the limits change.
#[test]
fn guest_gets_exactly_its_tokens() {
    if !kvm_or_skip("guest_gets_exactly_its_tokens") {
        return;
    }
    let (dir, console) = (TempDir::new().unwrap(), SerialLog::new());
    let limit = RateLimit { size: MIB, refill_ms: 1 << 40, one_time_burst: MIB / 4 };
    let limits = RateLimits { bandwidth: Some(limit), operations: None };
    let (config, _file) = reader(limits, &dir);
    let machine = launch(config, &console);
    machine.resume().unwrap();
    let all = MIB + MIB / 4;
    wait_until_moved(&machine, all);
    // A pause and a resume make the device look at its queue again.
    for _ in 0..3 {
        machine.pause().unwrap();
        machine.resume().unwrap();
    }
    machine.pause().unwrap();
    assert_eq!(moved(&machine), all);
    let sections = machine.save_state().unwrap();
    let factory = MachineFactory::new(console.host());
    let new = factory.create(machine.vm_id(), &machine.config()).unwrap();
    copy(&machine, &new, machine.populated().unwrap());
    machine.release(NextHost::Another).unwrap();
    new.restore_state(&sections, Clock::Continue).unwrap();
    new.acquire().unwrap();
    for _ in 0..3 {
        new.resume().unwrap();
        new.pause().unwrap();
    }
    assert_eq!(moved(&new), 0, "the bucket and its burst were empty");
    new.resume().unwrap();
    assert_eq!(new.rate_limits().len(), 1);
    let control = &new.rate_limits()[0];
    assert_eq!(control.device(), "disk0");
    let end = Instant::now() + LONG;
    assert_eq!(control.limits(end).unwrap(), [limits]);
    let bandwidth = LimitChange::Set(RateLimit { one_time_burst: 0, ..limit });
    let change = LimitsChange { bandwidth, ..LimitsChange::default() };
    control.change(&[change], end).unwrap();
    wait_until_moved(&new, MIB);
    new.pause().unwrap();
    assert_eq!(moved(&new), MIB);
    new.resume().unwrap();
    let change = LimitsChange { bandwidth: LimitChange::Remove, ..change };
    control.change(&[change], end).unwrap();
    wait_until_moved(&new, 4 * MIB);
}

/// Lets the guest run for ten seconds, and compares the bytes with those of the limit.
fn check_rate(machine: &Arc<KvmMachine>, what: &str, rate: u64) {
    const TIME: Duration = Duration::from_secs(10);
    machine.resume().unwrap();
    wait_until_moved(machine, 1);
    let (begun, before) = (Instant::now(), moved(machine));
    std::thread::sleep(TIME);
    let (time, bytes) = (begun.elapsed(), moved(machine) - before);
    let wanted = rate as f64 * time.as_secs_f64();
    let off = 100.0 * (bytes as f64 / wanted - 1.0);
    eprintln!("{what}: {bytes} bytes in {time:.3?}, {off:+.2} % off {rate} bytes/s");
    assert!(off.abs() <= 10.0, "{what}: {off:+.2} %");
}

/// Depends on the host's clock, so it runs only in the long form, on an idle host.
#[test]
fn rate_holds_over_ten_seconds() {
    let test = "rate_holds_over_ten_seconds";
    if !kvm_or_skip(test) {
        return;
    }
    if !full() {
        return skip(test, "it takes a minute on an idle host: DRIFTLINE_FULL=1");
    }
    let dir = TempDir::new().unwrap();
    let bandwidth =
        |rate| RateLimits { bandwidth: Some(RateLimit::per_second(rate)), operations: None };
    let (config, _file) = reader(bandwidth(20 * MIB), &dir);
    check_rate(&launch(config, &SerialLog::new()), "disk, bandwidth", 20 * MIB);
    let operations = RateLimits { bandwidth: None, operations: Some(RateLimit::per_second(160)) };
    let (config, _file) = reader(operations, &dir);
    check_rate(&launch(config, &SerialLog::new()), "disk, operations", 160 * u64::from(READ));
    check_rate_of_network(&dir, bandwidth(1 << 20), 1 << 20);
}

/// Compares the bytes of frames that a guest sends, and of those that it receives, with the limit.
fn check_rate_of_network(dir: &TempDir, limit: RateLimits, rate: u64) {
    let directions = [
        ("network, transmit", 1, 0, NetLimits { transmit: limit, ..NetLimits::default() }),
        ("network, receive", 0, WRITE, NetLimits { receive: limit, ..NetLimits::default() }),
    ];
    for (what, queue, flags, limits) in directions {
        let tap = match TestTap::new(&format!("rate{queue}")) {
            Ok(tap) => tap,
            Err(why) => return skip(what, &why.to_string()),
        };
        let up = Command::new("ip").args(["link", "set", &tap.0, "up"]).status().unwrap();
        assert!(up.success());
        let (id, mac) = ("net0".to_owned(), MacAddr([2, 0, 0, 0, 0, 1]));
        let name = tap.0.clone();
        let net = NetConfig { id, tap: name, mac, queues: 1, mtu: None, limits, metadata: None };
        let mut config = kernel(&requester(queue, &[(12 + FRAME, flags)]), dir);
        config.devices = vec![DeviceConfig::Net(net)];
        let machine = launch(config, &SerialLog::new());
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let _end = EndOnDrop(&over);
            if flags == WRITE {
                let (flood, over) = (Flood::new(&tap), &over);
                scope.spawn(move || flood.run(over));
            }
            check_rate(&machine, what, rate);
        });
    }
}

/// Ends a thread when the test ends, also if it fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sends frames to the guest, more than the limit lets through. They go to a link-local multicast
/// address, so that they need no route and reach no other interface.
struct Flood {
    socket: UdpSocket,
    to: SocketAddrV6,
}

impl Flood {
    /// Waits until the interface has its address, without which nothing can be sent.
    fn new(tap: &TestTap) -> Self {
        let index = std::fs::read_to_string(format!("/sys/class/net/{}/ifindex", tap.0)).unwrap();
        let all = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
        let to = SocketAddrV6::new(all, 9, 0, index.trim().parse().unwrap());
        let new = Self { socket: UdpSocket::bind("[::]:0").unwrap(), to };
        let end = Instant::now() + LONG;
        while let Err(e) = new.send() {
            assert!(Instant::now() < end, "no frame can be sent to {}: {e}", tap.0);
            thread::sleep(Duration::from_millis(10));
        }
        new
    }

    fn send(&self) -> std::io::Result<usize> {
        // A frame has 62 bytes of headers.
        self.socket.send_to(&[7; FRAME as usize - 62], self.to)
    }

    fn run(&self, over: &AtomicBool) {
        while !over.load(Ordering::Relaxed) {
            // Fails while the interface's queue is full.
            let _ = self.send();
            thread::sleep(Duration::from_micros(200));
        }
    }
}
