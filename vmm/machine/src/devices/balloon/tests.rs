//! Tests that drive the balloon through its queues, its configuration space and its handle.

mod discarding;
mod polling;

use std::thread;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use virtio_bindings::virtio_mmio::*;
use vm_memory::{Bytes, GuestAddress};

use super::frames::MAX_FRAME_NUMBERS;
use super::*;
use crate::devices::virtio::conformance::{self, TestedDevice};
use crate::devices::virtio::driver::{Driver, MEM_BYTES};
use crate::devices::virtio::{DriverBuffer, Transport};

const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const HINT: usize = 2;
const REPORT: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(20);
const POISON: u32 = VIRTIO_MMIO_CONFIG + 12;
const COMMAND: u32 = VIRTIO_MMIO_CONFIG + 8;

fn make() -> (Box<dyn Device>, BalloonControl) {
    make_with(&BalloonConfig::default())
}

fn make_with(config: &BalloonConfig) -> (Box<dyn Device>, BalloonControl) {
    let (balloon, control) = open(config, Arc::default()).unwrap();
    (Box::new(balloon), control)
}

fn started() -> (Driver, BalloonControl) {
    let (balloon, control) = make();
    (Driver::started(balloon), control)
}

/// Returns memory with content that the device can discard.
fn filled(driver: &mut Driver, frames: u32) -> DriverBuffer {
    let piece = driver.writable(frames * 4096);
    driver
        .memory
        .ram()
        .write_slice(&vec![0xa5; piece.len as usize], GuestAddress(piece.addr))
        .unwrap();
    piece
}

fn numbers(driver: &mut Driver, frames: &[u32]) -> DriverBuffer {
    let bytes: Vec<u8> = frames.iter().flat_map(|f| f.to_le_bytes()).collect();
    driver.readable(&bytes)
}

fn gfn(piece: DriverBuffer) -> u32 {
    (piece.addr / PAGE_SIZE) as u32
}

fn is(driver: &Driver, piece: DriverBuffer, byte: u8) -> bool {
    driver.bytes(piece).iter().all(|b| *b == byte)
}

#[test]
fn conforms_to_virtio() {
    let inflate = |driver: &mut Driver, _| {
        let frame = gfn(filled(driver, 1));
        vec![numbers(driver, &[frame])]
    };
    let wanted = |driver: &mut Driver, _| vec![filled(driver, 1)];
    type RequestBuffers<'r> = &'r dyn Fn(&mut Driver, u64) -> Vec<DriverBuffer>;
    let requests: [(usize, RequestBuffers<'_>); 4] =
        [(INFLATE, &inflate), (DEFLATE, &inflate), (HINT, &wanted), (REPORT, &wanted)];
    for (queue, request) in requests {
        conformance::check(&TestedDevice { make: &|| make().0, queue, request });
    }
}

#[test]
fn inflate_discards_only_listed_frames() {
    let (mut driver, control) = started();
    let piece = filled(&mut driver, 8);
    let first = gfn(piece);
    // Frame numbers in any order, one of them twice.
    let named = numbers(&mut driver, &[first + 5, first + 1, first + 2, first + 5]);
    driver.request(INFLATE, &[named]);
    for i in 0..8 {
        let frame = DriverBuffer { addr: piece.addr + i * PAGE_SIZE, len: 4096, writable: false };
        assert!(is(&driver, frame, if [1, 2, 5].contains(&i) { 0 } else { 0xa5 }), "frame {i}");
    }
    assert_eq!(control.stats().discarded_bytes, 3 * PAGE_SIZE);
    // After a deflate, one frame is inflated again: it has no memory left to discard.
    driver.request(DEFLATE, &[named]);
    let one = numbers(&mut driver, &[first + 1]);
    driver.memory.ram().write_obj(1u8, GuestAddress(piece.addr + 5 * PAGE_SIZE)).unwrap();
    driver.request(INFLATE, &[one]);
    assert_eq!(
        driver.memory.ram().read_obj::<u8>(GuestAddress(piece.addr + 5 * PAGE_SIZE)).unwrap(),
        1
    );
}

#[test]
fn frames_outside_memory_stop_the_device() {
    let (mut driver, _) = started();
    let piece = filled(&mut driver, 1);
    let frames = (MEM_BYTES / PAGE_SIZE) as u32;
    for outside in [frames, 0xc_0000, 0xd_0000, 0x10_0000, u32::MAX] {
        let named = numbers(&mut driver, &[gfn(piece), outside]);
        driver.post(INFLATE, &[named]);
        driver.kick(INFLATE);
        driver.wait_stopped("a frame that is no memory");
        assert!(is(&driver, piece, 0xa5), "nothing was done");
        driver.start(!0);
    }
    let odd = driver.readable(&[0; 6]);
    let many = driver.readable(&vec![0; 4 * MAX_FRAME_NUMBERS as usize + 4]);
    for wrong in [odd, many] {
        driver.post(INFLATE, &[wrong]);
        driver.kick(INFLATE);
        driver.wait_stopped("no frame numbers");
        driver.start(!0);
    }
    let no_id = driver.readable(&[0; 2]);
    driver.post(HINT, &[no_id]);
    driver.kick(HINT);
    driver.wait_stopped("no command's number");
}

#[test]
fn only_whole_reported_frames_are_discarded() {
    let (mut driver, control) = started();
    let piece = filled(&mut driver, 4);
    let part = DriverBuffer { addr: piece.addr + 100, len: 3 * 4096, writable: true };
    driver.request(REPORT, &[part]);
    let at = |i: u64| DriverBuffer { addr: piece.addr + i * PAGE_SIZE, len: 4096, writable: false };
    assert!(is(&driver, at(0), 0xa5) && is(&driver, at(3), 0xa5));
    assert!(is(&driver, at(1), 0) && is(&driver, at(2), 0));
    assert_eq!(control.stats().discarded_bytes, 2 * PAGE_SIZE);
}

#[test]
fn poisoned_frames_are_not_discarded() {
    for (poison, expected) in [(0, 0), (0xaaaa_aaaa, 0xa5)] {
        let (mut driver, control) = started();
        driver.write(POISON, poison);
        assert_eq!(driver.read(POISON), poison);
        let piece = filled(&mut driver, 1);
        driver.request(REPORT, &[piece]);
        assert!(is(&driver, piece, expected), "poison {poison:#x}");
        if poison != 0 {
            assert!(control.free_frames(TIMEOUT).is_empty());
            // Frames in the balloon are written before they are read.
            let named = numbers(&mut driver, &[gfn(piece)]);
            driver.request(INFLATE, &[named]);
            assert!(is(&driver, piece, 0));
        }
    }
}

#[track_caller]
fn wait_command(driver: &Driver, than: u32) -> u32 {
    let end = Instant::now() + TIMEOUT;
    loop {
        match driver.read(COMMAND) {
            command if command != than => return command,
            _ => assert!(Instant::now() < end, "the command stays {than}"),
        }
        thread::sleep(Duration::from_micros(200));
    }
}

/// Performs the driver's part of a run of hints.
fn hint(driver: &mut Driver, command: u32, free: &[DriverBuffer], stop: bool) {
    let id = driver.readable(&command.to_le_bytes());
    driver.request(HINT, &[id]);
    for piece in free {
        driver.request(HINT, &[*piece]);
    }
    if stop {
        let stop = driver.readable(&STOP.to_le_bytes());
        driver.request(HINT, &[stop]);
    }
}

fn frames_of(pieces: &[DriverBuffer]) -> Vec<FrameRun> {
    let mut set = FrameSet::new();
    for p in pieces {
        set.insert(FrameRun { start: Gfn(gfn(*p).into()), count: u64::from(p.len) / PAGE_SIZE });
    }
    set.iter().collect()
}

#[test]
fn hints_belong_to_their_command_and_change_nothing() {
    let (mut driver, control) = started();
    let free = [filled(&mut driver, 3), filled(&mut driver, 1), filled(&mut driver, 7)];
    let (mut idle, mut last) = (STOP, STOP);
    for round in 0..3 {
        assert_eq!(driver.read(COMMAND), idle);
        // Hints without a request.
        hint(&mut driver, last, &free[..1], true);
        let copier = thread::spawn({
            let control = control.clone();
            move || control.free_frames(TIMEOUT)
        });
        let command = wait_command(&driver, idle);
        assert!(command > last && command > DONE, "a number of its own");
        // First the rest of the earlier run.
        hint(&mut driver, last, &free[1..2], true);
        hint(&mut driver, command, &free[round..], true);
        let hinted: Vec<FrameRun> = copier.join().unwrap().iter().collect();
        assert_eq!(hinted, frames_of(&free[round..]));
        idle = DONE;
        assert_eq!(driver.read(COMMAND), idle, "the driver may have its frames back");
        assert!(free.iter().all(|piece| is(&driver, *piece, 0xa5)));
        last = command;
    }
}

#[test]
fn unfinished_hints_are_returned_at_the_limit() {
    let (mut driver, control) = started();
    let free = filled(&mut driver, 5);
    let copier = thread::spawn({
        let control = control.clone();
        move || control.free_frames(Duration::from_secs(2))
    });
    let command = wait_command(&driver, STOP);
    hint(&mut driver, command, &[free], false);
    let hinted: Vec<FrameRun> = copier.join().unwrap().iter().collect();
    assert_eq!(hinted, frames_of(&[free]));
    assert_eq!(driver.read(COMMAND), DONE);
    // A driver that is absent, or does not support hints, is not waited for.
    driver.start(!FREE_PAGE_HINT);
    let since = Instant::now();
    assert!(control.free_frames(TIMEOUT).is_empty());
    assert!(since.elapsed() < TIMEOUT);
}

#[test]
fn target_reaches_the_driver_also_after_a_move() {
    let (driver, control) = started();
    let target = |driver: &Driver| driver.read(VIRTIO_MMIO_CONFIG);
    assert_eq!(target(&driver), 0);
    control.set_target(3 << 20);
    let end = Instant::now() + TIMEOUT;
    while target(&driver) != 768 {
        assert!(Instant::now() < end, "the target never reaches the driver");
        thread::sleep(Duration::from_micros(200));
    }
    let interrupts =
        |driver: &Driver| driver.read(VIRTIO_MMIO_INTERRUPT_STATUS) & VIRTIO_MMIO_INT_CONFIG;
    assert_ne!(interrupts(&driver), 0);
    driver.write(VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INT_CONFIG);
    driver.write(VIRTIO_MMIO_CONFIG + 4, 700);
    assert_eq!(control.stats().actual_bytes, 700 * PAGE_SIZE);

    // The guest is paused and moves. Only then can the driver be told.
    driver.quiesce();
    control.set_target(2 << 20);
    let state = driver.transport.save().unwrap();
    let (balloon, elsewhere) = make();
    let ram = driver.memory.ram().clone();
    let moved = Transport::spawn("moved", balloon, ram).unwrap();
    moved.restore(state).unwrap();
    let sizes = elsewhere.stats();
    assert_eq!((sizes.target_bytes, sizes.actual_bytes), (2 << 20, 700 * PAGE_SIZE));
    let driver = driver.moved_to(moved);
    assert_eq!((target(&driver), interrupts(&driver)), (768, 0));
    driver.transport.resume();
    while target(&driver) != 512 {
        assert!(Instant::now() < end, "the target never reaches the driver");
        thread::sleep(Duration::from_micros(200));
    }
    assert_ne!(interrupts(&driver), 0);
}
