//! Copies of drives: how much goes into one operation, and how long waits may take.

use std::thread::sleep;

use dirty_tracker::{Gfn, PAGE_SIZE};
use zerocopy::IntoBytes;

use super::*;
use crate::message::{DriveMessage, Message, RawRun, Tag, blocks_head};

/// A copy that says where it was made zero, and takes `takes` for that.
struct Zeroed {
    tell: Sender<(u64, u64)>,
    takes: Duration,
}

impl DriveCopy for Zeroed {
    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }
    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        sleep(self.takes);
        let _ = self.tell.send((offset, len));
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

fn copies(bytes: u64, takes: Duration, limit: Duration) -> (Copies, Receiver<(u64, u64)>) {
    let (tell, told) = mpsc::channel();
    let copy: Box<dyn DriveCopy> = Box::new(Zeroed { tell, takes });
    let head = DriveHead { id: "d".into(), bytes, readonly: false };
    (Copies::new(vec![copy], &[head], limit, Arc::default(), Arc::default()).unwrap(), told)
}

/// Has `count` blocks from the first one on made zero.
fn zero(copies: &mut Copies, count: u64) -> Result<Duration, Cause> {
    let run = RawRun::from(FrameRun { start: Gfn(0), count });
    let bytes = [blocks_head(0, 1).as_bytes(), run.as_bytes()].concat();
    match Message::parse(Tag::BlockZeros, &bytes).unwrap() {
        Message::Drive(DriveMessage::BlockZeros { runs, .. }) => {
            copies.take(DriveStep::Zero { drive: 0, runs })
        }
        _ => panic!("another message"),
    }
}

#[test]
fn long_runs_of_zeros_are_written_in_parts() {
    // With a last block that the drive has in part.
    let bytes = (200 << 20) + 512;
    let limit = Duration::from_secs(60);
    let (mut copies, told) = copies(bytes, Duration::ZERO, limit);
    zero(&mut copies, bytes.div_ceil(PAGE_SIZE)).unwrap();
    copies.settle().unwrap();
    let parts: Vec<(u64, u64)> = told.try_iter().collect();
    let part = 64 << 20;
    let last = (3 * part, bytes - 3 * part);
    assert_eq!(parts, [(0, part), (part, part), (2 * part, part), last]);
}

#[test]
fn wait_is_bounded_though_each_operation_is_in_time() {
    let limit = Duration::from_millis(600);
    let (mut copies, _told) = copies(64 << 10, limit / 2, limit);
    for _ in 0..PIECES {
        zero(&mut copies, 1).unwrap();
    }
    // Eight of them take longer than the limit and its margin.
    let said = copies.settle().unwrap_err().to_string();
    assert!(said.contains("its storage has not"), "{said}");
}

#[test]
fn time_spent_on_waiting_for_storage_is_told() {
    let takes = Duration::from_millis(100);
    let (mut copies, _told) = copies(64 << 10, takes, Duration::from_secs(60));
    let waited: Duration = (0..3 * PIECES).map(|_| zero(&mut copies, 1).unwrap()).sum();
    assert!(waited >= takes * PIECES as u32, "{waited:?}");
}
