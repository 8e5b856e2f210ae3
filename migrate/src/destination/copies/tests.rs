//! Copies of disks: the size of one operation, and the limits of waits.

use driftline_dirty_tracker::{Gfn, PAGE_SIZE};
use zerocopy::IntoBytes;

use super::*;
use crate::protocol::message::{DriveMessage, RawRun, WireMessage, blocks_head};
use crate::protocol::tag::Tag;

/// Longer than any operation takes here, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// A copy that reports the ranges that are zeroed.
struct Zeroed {
    zeroed: Sender<(u64, u64)>,
    /// Lets one operation end for each message, and every operation once it is closed.
    gate: Mutex<Receiver<()>>,
}

impl DriveCopy for Zeroed {
    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }
    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let _ = self.gate.lock().recv();
        let _ = self.zeroed.send((offset, len));
        Ok(())
    }
    fn make_durable(&self) -> io::Result<()> {
        Ok(())
    }
    fn yield_to_guest(&self) -> io::Result<()> {
        Ok(())
    }
    fn keep(&self) {}
}

/// Returns copies, their zeroed ranges, and the gate of their operations.
fn copies(bytes: u64, limits: CopyLimits) -> (Copies, Receiver<(u64, u64)>, Sender<()>) {
    let ((zeroed, zeroed_ranges), (open, gate)) = (mpsc::channel(), mpsc::channel());
    let copy: Box<dyn DriveCopy> = Box::new(Zeroed { zeroed, gate: Mutex::new(gate) });
    let head = DriveHead { id: "d".into(), bytes, readonly: false };
    let copies = Copies::new(vec![copy], &[head], limits, Arc::default(), Arc::default());
    (copies.unwrap(), zeroed_ranges, open)
}

/// Zeroes the first `count` blocks.
fn zero(copies: &mut Copies, count: u64) -> Result<Duration, Cause> {
    let run = RawRun::from(FrameRun { start: Gfn(0), count });
    let bytes = [blocks_head(0, 1).as_bytes(), run.as_bytes()].concat();
    match WireMessage::parse(Tag::BlockZeros, &bytes).unwrap() {
        WireMessage::Drive(DriveMessage::BlockZeros { runs, .. }) => {
            copies.take(DriveStep::Zero { drive: 0, runs })
        }
        _ => panic!("another message"),
    }
}

#[test]
fn long_runs_of_zeros_are_written_in_parts() {
    // The last block is partial.
    let bytes = (200 << 20) + 512;
    let (mut copies, zeroed_ranges, open) = copies(bytes, CopyLimits::of(LONG));
    drop(open);
    zero(&mut copies, bytes.div_ceil(PAGE_SIZE)).unwrap();
    copies.make_durable().unwrap();
    let parts: Vec<(u64, u64)> = zeroed_ranges.try_iter().collect();
    let part = 64 << 20;
    let last = (3 * part, bytes - 3 * part);
    assert_eq!(parts, [(0, part), (part, part), (2 * part, part), last]);
}

/// Returns the error of waiting for copies while no operation ends.
fn error_while_no_operation_ends(limits: CopyLimits) -> String {
    let (mut copies, _zeroed_ranges, _open) = copies(64 << 10, limits);
    for _ in 0..BUFFERS {
        zero(&mut copies, 1).unwrap();
    }
    copies.make_durable().unwrap_err().to_string()
}

#[test]
fn long_wait_of_short_operations_fails() {
    let wait = Duration::from_millis(300);
    let error = error_while_no_operation_ends(CopyLimits { operation: LONG, wait });
    assert!(error.contains("its storage has not kept up for 300ms"), "{error}");
}

#[test]
fn long_operation_in_a_short_wait_fails() {
    let operation = Duration::from_millis(300);
    let error = error_while_no_operation_ends(CopyLimits { operation, wait: LONG });
    assert!(error.contains("its storage has not answered for 300ms"), "{error}");
}

#[test]
fn time_waiting_for_storage_is_returned() {
    let wait = Duration::from_millis(100);
    // On a busy machine the operation may end before the wait begins. Then the test tries again.
    let waited_for_storage = || {
        let (mut copies, _zeroed_ranges, open) = copies(64 << 10, CopyLimits::of(LONG));
        for _ in 0..BUFFERS {
            zero(&mut copies, 1).unwrap();
        }
        let storage = std::thread::spawn(move || {
            std::thread::sleep(wait);
            drop(open);
        });
        let begun = Instant::now();
        let waited = zero(&mut copies, 1).unwrap();
        assert!(waited <= begun.elapsed());
        storage.join().unwrap();
        waited >= wait / 2
    };
    let until = Instant::now() + LONG;
    while !waited_for_storage() {
        assert!(Instant::now() < until, "no wait was returned");
    }
}
