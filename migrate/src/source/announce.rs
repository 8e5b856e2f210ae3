//! Announces what pass 0 will send, so that the destination can preallocate memory.

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

/// Frames that are examined together, 2 MiB.
const PIECE: u64 = 512;
/// Minimum number of frames of an announced run. Shorter runs cost little without preallocation.
const LEAST: u64 = 64;

/// Sends EXPECT for the frames that pass 0 will send.
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

/// Returns the long populated runs, without pieces whose first and last frames are zero. The guest
/// has probably used and freed such pieces, and the destination need not allocate them.
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
        // A frame that cannot be read fails later, when it is sent.
        ram.read_slice(&mut frame, GuestAddress(gfn.gpa())).is_err() || !is_zero(&frame)
    };
    has_content(piece.start) || has_content(Gfn(piece.end().0 - 1))
}
