//! Errors of a peer, or of the connection to it.

use std::io;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, LayoutError};
use driftline_format::FormatError;

use super::ids::Token;
use super::tag::Tag;

/// An error of a peer, or of the connection to it.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// Bytes that are not a header or record, a wrong checksum, or a broken connection.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// A record whose payload is not a valid message.
    #[error("a {} message is malformed: {why}", message.name())]
    Malformed {
        /// Its tag.
        message: Tag,
        /// The violated rule.
        why: &'static str,
    },
    /// A CONFIG whose slots do not form a layout.
    #[error("a CONFIG message is malformed: {0}")]
    Layout(#[from] LayoutError),
    /// An unknown tag in a record that must be understood.
    #[error("a record of the unknown tag {tag} must be understood")]
    UnknownTag {
        /// The tag.
        tag: u16,
    },
    /// A message out of order.
    #[error("{} came where {expected} was expected", found.name())]
    Unexpected {
        /// The message that arrived.
        found: Tag,
        /// The messages that were allowed.
        expected: &'static str,
    },
    /// Frames that the guest does not have.
    #[error(
        "a {} message names {run}, which is not inside one memory slot of the guest",
        message.name()
    )]
    Outside {
        /// A message with frames, or EXPECT.
        message: Tag,
        /// The run.
        run: FrameRun,
    },
    /// Blocks of a disk that is not copied.
    #[error("a {} message names drive {drive}, and {drives} are copied", message.name())]
    NoDrive {
        /// BLOCKS or BLOCK_ZEROS.
        message: Tag,
        /// The disk's index in DRIVES.
        drive: u32,
        /// Number of disks in DRIVES.
        drives: usize,
    },
    /// Blocks that the disk does not have.
    #[error(
        "a {} message names blocks {}..{} of disk \"{id}\", which has {blocks}",
        message.name(), run.start.0, run.end().0
    )]
    OutsideDrive {
        /// BLOCKS or BLOCK_ZEROS.
        message: Tag,
        /// The blocks.
        run: FrameRun,
        /// The disk's name.
        id: String,
        /// Blocks that it has.
        blocks: u64,
    },
    /// The two sides have different counts.
    #[error("{what} is {found} by the peer's count and {expected} by this side's")]
    Count {
        /// The counted quantity.
        what: &'static str,
        /// The peer's count.
        found: u64,
        /// This side's count.
        expected: u64,
    },
    /// More than a peer may send.
    #[error("{found} {what}, more than the {limit} allowed")]
    TooMany {
        /// The counted quantity.
        what: &'static str,
        /// The peer's number of it.
        found: u64,
        /// The protocol's limit.
        limit: u64,
    },
    /// The source occupies the receiver and moves too little.
    #[error(
        "the source moved {found} bytes of memory, disks and state in {:.1} s, less than the \
         {least} that are required",
        window.as_secs_f64()
    )]
    TooSlow {
        /// Bytes that it moved.
        found: u64,
        /// The time window.
        window: Duration,
        /// Least bytes in that time.
        least: u64,
    },
    /// A process of another user hands guest memory over.
    #[error(
        "a process of user {theirs} hands over the memory of its guest, and this receiver of user \
         {ours} takes it only from its own user and from root: run both as one user, or the source \
         as root"
    )]
    ForeignUser {
        /// The peer's user id.
        theirs: u32,
        /// This process's user id.
        ours: u32,
    },
    /// A hand-over message of another migration.
    #[error("a {} message names migration {found}, and this is {expected}", message.name())]
    Token {
        /// COMMIT, PREPARED, RUNNING or ANSWER.
        message: Tag,
        /// The token in the message.
        found: Token,
        /// This migration's token.
        expected: Token,
    },
    /// The peer refused the connection or the migration.
    #[error("the peer refused: {reason}")]
    Refused {
        /// The peer's reason.
        reason: String,
    },
    /// The peer aborted the migration.
    #[error("the peer aborted: {reason}")]
    Aborted {
        /// The peer's reason.
        reason: String,
    },
}

impl WireError {
    /// Returns the error of the message `found` out of order.
    pub(crate) fn unexpected(found: Tag, expected: &'static str) -> Self {
        Self::Unexpected { found, expected }
    }

    /// Whether this is a timeout of the peer.
    pub(crate) fn is_silence(&self) -> bool {
        matches!(self, Self::Format(FormatError::Io(e)) if e.kind() == io::ErrorKind::TimedOut)
    }

    /// Whether the connection ended or broke. Timeouts and malformed messages do not count.
    pub(crate) fn is_loss(&self) -> bool {
        match self {
            // Errors that the link itself makes (limits, a stop) have no error number.
            Self::Format(FormatError::Io(e)) => {
                let ended = [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionAborted];
                ended.contains(&e.kind()) || e.raw_os_error().is_some()
            }
            _ => false,
        }
    }
}

/// Fails unless the peer's count of a quantity is this side's.
pub(crate) fn same(what: &'static str, found: u64, expected: u64) -> Result<(), WireError> {
    if found == expected { Ok(()) } else { Err(WireError::Count { what, found, expected }) }
}

/// Fails if the peer sends more of a quantity than it may.
pub(crate) fn at_most(what: &'static str, found: u64, limit: u64) -> Result<(), WireError> {
    if found <= limit { Ok(()) } else { Err(WireError::TooMany { what, found, limit }) }
}

impl From<io::Error> for WireError {
    fn from(e: io::Error) -> Self {
        Self::Format(FormatError::Io(e))
    }
}
