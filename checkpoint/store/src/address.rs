//! What an epoch has frames of: guest memory, object 0, and its drives, each an object from 1 on,
//! in their order.
//!
//! In a log a block has its number in its drive. In this program it has a number of its own among
//! all frames of an epoch: the object in the high 16 bits, so that memory's frames are what they
//! always were, and whatever is done to frames is done to blocks by the same code.

use driftline_dirty_tracker::{FrameRun, Gfn};

/// Numbers of an object: frames have at most 40 bits.
const BITS: u32 = 48;
/// The first number that is no frame's.
pub(crate) const END: u64 = 1 << BITS;

/// Blocks of an object, as they are known among all frames. They must be some that a drive can
/// have.
pub fn of_object(object: u16, run: FrameRun) -> FrameRun {
    FrameRun { start: Gfn(u64::from(object) << BITS | run.start.0), count: run.count }
}

/// Which object a frame is of, and which frame or block it is there.
pub fn place(gfn: Gfn) -> (u16, Gfn) {
    ((gfn.0 >> BITS) as u16, Gfn(gfn.0 & (END - 1)))
}

/// Frames of guest memory.
pub(crate) const MEMORY: std::ops::Range<u64> = 0..END;

/// A frame for messages.
pub(crate) fn name(gfn: Gfn) -> String {
    match place(gfn) {
        (0, gfn) => format!("page {:#x}", gfn.0),
        (drive, block) => format!("block {:#x} of drive {drive}", block.0),
    }
}

/// As [`name`], of a run.
pub(crate) fn name_run(run: FrameRun) -> String {
    match place(run.start) {
        (0, _) => format!("frames {run}"),
        (drive, start) => {
            let (first, end) = (start.0, start.0.saturating_add(run.count));
            format!("blocks {first:#x}..{end:#x} of drive {drive}")
        }
    }
}
