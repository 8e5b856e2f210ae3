//! The frames of an epoch: guest memory is object 0, and each drive is an object from 1 on, in the
//! drives' order.
//!
//! In a log, a block has its number in its drive. In this program, it has a number that is unique
//! among all frames of an epoch: the object is in the high 16 bits. So the numbers of memory's
//! frames stay as they are, and the code for frames also handles blocks.

use driftline_dirty_tracker::{FrameRun, Gfn};

/// Number of bits of a frame's number in its object: frames have at most 40.
const BITS: u32 = 48;
/// First number that is not a frame's.
pub(crate) const END: u64 = 1 << BITS;

/// Returns the blocks `run` of `object` as frames of an epoch. A drive must be able to have these
/// blocks.
pub fn of_object(object: u16, run: FrameRun) -> FrameRun {
    FrameRun { start: Gfn(u64::from(object) << BITS | run.start.0), count: run.count }
}

/// Returns the object of a frame, and the number of the frame or block in that object.
pub fn place(gfn: Gfn) -> (u16, Gfn) {
    ((gfn.0 >> BITS) as u16, Gfn(gfn.0 & (END - 1)))
}

/// The numbers of the frames of guest memory.
pub(crate) const MEMORY: std::ops::Range<u64> = 0..END;

/// Returns a frame's name for messages.
pub(crate) fn name(gfn: Gfn) -> String {
    match place(gfn) {
        (0, gfn) => format!("page {:#x}", gfn.0),
        (drive, block) => format!("block {:#x} of drive {drive}", block.0),
    }
}

/// Returns the name of a run for messages, as [`name`] does for a frame.
pub(crate) fn name_run(run: FrameRun) -> String {
    let (object, start) = place(run.start);
    let (first, end) = (start.0, start.0.saturating_add(run.count));
    match object {
        0 => format!("pages {first:#x}..{end:#x}"),
        drive => format!("blocks {first:#x}..{end:#x} of drive {drive}"),
    }
}
