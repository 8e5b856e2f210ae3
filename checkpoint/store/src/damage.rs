//! What is wrong with a file of a store.

use std::str::Utf8Error;
use std::time::Duration;
use std::{fmt, io};

use driftline_dirty_tracker::{FrameRun, Gfn, LayoutError};
use driftline_format::FormatError;
use driftline_guest::VmId;

use crate::address;
use crate::alloc::{SlotError, SlotRun};

/// What is wrong with a file of a store.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// The header or a record is damaged by itself.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// The file is shorter than it must be.
    #[error("truncated: the file ends at byte {length}, where {wanted} more bytes should follow")]
    EndsEarly {
        /// The file's length in bytes.
        length: u64,
        /// Number of bytes that the record needs from this offset on.
        wanted: u64,
    },
    /// A number contradicts another part of the file.
    #[error("{what} is {found} and should be {expected}")]
    Mismatch {
        /// Name of the number.
        what: &'static str,
        /// Number as stored.
        found: u64,
        /// Number as it must be.
        expected: u64,
    },
    /// A number is outside its limits.
    #[error("{what} is {found} and should be {}", Limits(*min, *max))]
    OutOfRange {
        /// Name of the number.
        what: &'static str,
        /// Number as stored.
        found: u64,
        /// Lowest number that is allowed.
        min: u64,
        /// Highest number that is allowed.
        max: u64,
    },
    /// The file belongs to another guest than the others.
    #[error("the file belongs to guest {found}, the others to guest {expected}")]
    OtherVm {
        /// The guest of this file.
        found: VmId,
        /// The guest of the store.
        expected: VmId,
    },
    /// Bytes that must have been written are not there, although what follows them was written
    /// later.
    #[error("nothing was written here, although later records were")]
    Unwritten,
    /// The disk cannot read the bytes.
    #[error("it cannot be read: {cause}")]
    Unreadable {
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The bytes were not read, because failed reads of the file have used up their time.
    #[error(
        "it cannot be read: not tried, since other reads failed for {} s",
        failing.as_secs()
    )]
    NotTried {
        /// Total time of the failed reads.
        failing: Duration,
    },
    /// A frame failed its checksum, and passed it when it was read again.
    #[error("its content changed between two reads: the disk or its cable is failing")]
    Changed,
    /// Blocks of a drive that the epoch does not have.
    #[error("it has pages of object {object}, which the checkpoint does not have")]
    Object {
        /// Number of the drive.
        object: u16,
    },
    /// Slot numbers that no page file has.
    #[error("{slots} cannot hold pages")]
    Slots {
        /// The slots.
        slots: SlotRun,
    },
    /// Slots that cannot be used in the way that the log says.
    #[error("checkpoint {epoch}: {cause}")]
    Used {
        /// The epoch that has them, by the log.
        epoch: u64,
        /// The contradiction.
        #[source]
        cause: SlotError,
    },
    /// The content of a frame is not what was stored.
    #[error(
        "{} of checkpoint {epoch} fails its checksum: it is {found:#010x} and should be \
         {expected:#010x}",
        address::name(*gfn)
    )]
    Frame {
        /// The frame.
        gfn: Gfn,
        /// The epoch that was being read.
        epoch: u64,
        /// Checksum as computed.
        found: u32,
        /// Checksum in the log.
        expected: u32,
    },
    /// Compressed contents that the decompressor refuses.
    #[error("the compressed contents of {frames} pages cannot be decompressed: {cause}")]
    Packed {
        /// Number of frames.
        frames: u64,
        /// The decompressor's error.
        #[source]
        cause: io::Error,
    },
    /// Compressed contents of another number of frames.
    #[error(
        "the compressed contents of {frames} pages cannot be decompressed: they are {found} bytes"
    )]
    PackedLength {
        /// Number of frames that they should be.
        frames: u64,
        /// Their length in bytes.
        found: u64,
    },
    /// A record of a kind that is not allowed here, or that this program does not know.
    #[error("a record of tag {tag:#06x} has no place here")]
    Misplaced {
        /// The record's tag.
        tag: u16,
    },
    /// Frames or blocks that the guest does not have.
    #[error("{}", outside(*object, *run))]
    Outside {
        /// 0 for memory, the number of the drive for blocks.
        object: u16,
        /// The frames.
        run: FrameRun,
    },
    /// A record of frames that has no runs.
    #[error("a record of pages has no runs")]
    NoRuns,
    /// Memory slots out of order.
    #[error("a memory slot at page {found:#x} follows one at {before:#x}; slots ascend")]
    SlotOrder {
        /// First frame of the slot that is out of order.
        found: u64,
        /// First frame of the one before it.
        before: u64,
    },
    /// Runs of a record that do not ascend, or that overlap.
    #[error(
        "{} follow {}; the runs of a record ascend",
        address::name_run(*run),
        address::name_run(*before)
    )]
    Order {
        /// The run that is out of order.
        run: FrameRun,
        /// The one before it.
        before: FrameRun,
    },
    /// A drive that an epoch cannot have.
    #[error("drive {number} is invalid: {cause}")]
    Drive {
        /// Number of the drive, from 1 on.
        number: u16,
        /// What is wrong with it.
        #[source]
        cause: DriveDefect,
    },
    /// Memory slots that are not a valid layout.
    #[error("the memory layout is invalid: {0}")]
    Layout(#[from] LayoutError),
}

/// What is wrong with a drive in the log.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DriveDefect {
    /// The name is not text.
    #[error("its name is not UTF-8")]
    Encoding(#[source] Utf8Error),
    /// No configuration can have the name.
    #[error("its name is empty or has control characters")]
    Name,
    /// Two drives have one name.
    #[error("another drive has the same name")]
    Twice,
    /// No drive has such a size.
    #[error("its size is 0 or too large")]
    Size(#[source] Box<LayoutError>),
}

/// Shows the numbers from the first to the second.
struct Limits(u64, u64);

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 == self.1 {
            true => write!(f, "{}", self.0),
            false => write!(f, "between {} and {}", self.0, self.1),
        }
    }
}

/// Fails if `found` is not from `min` to `max`.
pub(crate) fn in_range(what: &'static str, found: u64, min: u64, max: u64) -> Result<(), Damage> {
    match (min..=max).contains(&found) {
        true => Ok(()),
        false => Err(Damage::OutOfRange { what, found, min, max }),
    }
}

fn outside(object: u16, run: FrameRun) -> String {
    let (first, end) = (run.start.0, run.start.0.saturating_add(run.count));
    match object {
        0 => format!("pages {first:#x}..{end:#x} are not in guest memory"),
        drive => format!("blocks {first:#x}..{end:#x} are not in drive {drive}"),
    }
}
