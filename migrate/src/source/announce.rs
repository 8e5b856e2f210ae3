//! What pass 0 will bring, told beforehand, so that the destination has memory for it when it
//! comes.

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use driftline_format::is_zero;
use driftline_guest::GuestRam;
use vm_memory::{Bytes, GuestAddress};
use zerocopy::IntoBytes;

use crate::error::Cause;
use crate::protocol::limits::{MAX_EXPECTED, MAX_EXPECTED_RUNS};
use crate::protocol::message::{RawRun, runs_head};
use crate::protocol::tag::Tag;
use crate::transport::link::Link;
use crate::transport::wire::Wire;

/// Frames that are looked at together, 2 MiB.
const PIECE: u64 = 512;
/// Shorter runs get their memory at no great cost when they come.
const LEAST: u64 = 64;

/// Says which frames pass 0 will bring.
pub(super) fn announce(
    wire: &mut Wire<Link>,
    ram: &GuestRam,
    populated: &[FrameRun],
) -> Result<(), Cause> {
    for runs in expected(ram, populated).chunks(MAX_EXPECTED_RUNS as usize) {
        wire.send_parts(Tag::Expect, &[runs_head(runs.len()).as_bytes(), runs.as_bytes()])?;
    }
    Ok(())
}

/// The longer of the populated runs without the pieces that begin and end with zeros: memory that
/// was used once and is free again, which the destination need not have.
fn expected(ram: &GuestRam, populated: &[FrameRun]) -> Vec<RawRun> {
    let mut runs = Vec::new();
    for run in populated.iter().filter(|run| run.count >= LEAST) {
        let mut open: Option<FrameRun> = None;
        for piece in run.chunks(PIECE) {
            open = match (open, is_used(ram, piece)) {
                (Some(run), true) => Some(FrameRun { count: run.count + piece.count, ..run }),
                (None, true) => Some(piece),
                (done, false) => {
                    runs.extend(done.map(RawRun::from));
                    None
                }
            };
        }
        runs.extend(open.map(RawRun::from));
    }
    runs.truncate(MAX_EXPECTED);
    runs
}

fn is_used(ram: &GuestRam, piece: FrameRun) -> bool {
    let mut frame = [0; PAGE_SIZE as usize];
    let mut has_content = |gfn: Gfn| {
        // What cannot be read will fail where it is sent.
        ram.read_slice(&mut frame, GuestAddress(gfn.gpa())).is_err() || !is_zero(&frame)
    };
    has_content(piece.start) || has_content(Gfn(piece.end().0 - 1))
}
