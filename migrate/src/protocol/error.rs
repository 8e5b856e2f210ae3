//! Errors of a peer, or of the connection to it.

use std::io;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, LayoutError};
use driftline_format::FormatError;

use super::ids::Token;
use super::tag::Tag;

/// What is wrong with what a peer sent, or with the connection to it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Bytes that are no header or record, a wrong checksum, or a broken connection.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// A record that is no message.
    #[error("a {} message is malformed: {why}", message.name())]
    Malformed {
        /// Its tag.
        message: Tag,
        /// How.
        why: &'static str,
    },
    /// A CONFIG whose slots are no layout.
    #[error("a CONFIG message is malformed: {0}")]
    Layout(#[from] LayoutError),
    /// A tag that must be understood and is not.
    #[error("a record of the unknown tag {tag} must be understood")]
    UnknownTag {
        /// The tag.
        tag: u16,
    },
    /// A message that may not come there.
    #[error("{} came where {expected} was expected", found.name())]
    Unexpected {
        /// What came.
        found: Tag,
        /// What could have come.
        expected: &'static str,
    },
    /// Frames that the guest does not have.
    #[error(
        "a {} message names {run}, which is not inside one memory slot of the guest",
        message.name()
    )]
    Outside {
        /// PAGES or ZERO.
        message: Tag,
        /// The run.
        run: FrameRun,
    },
    /// Blocks of a disk that is not copied.
    #[error("a {} message names drive {drive}, and {drives} go along", message.name())]
    NoDrive {
        /// BLOCKS or BLOCK_ZEROS.
        message: Tag,
        /// Its place in the list, from 0.
        drive: u32,
        /// How many there are.
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
    /// The two sides counted differently.
    #[error("{what} is {found} by the peer's count and {expected} by this side's")]
    Count {
        /// What was counted.
        what: &'static str,
        /// By the peer.
        found: u64,
        /// By this side.
        expected: u64,
    },
    /// More than a peer may send.
    #[error("{found} {what}, more than the {limit} allowed")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How much came.
        found: u64,
        /// The bound.
        limit: u64,
    },
    /// The source occupies the receiver and moves almost nothing.
    #[error(
        "the source moved {found} bytes of memory and state in {:.1} s, less than the {least} that \
         it has to",
        window.as_secs_f64()
    )]
    TooSlow {
        /// What it moved.
        found: u64,
        /// In which time.
        window: Duration,
        /// What it must move in that time.
        least: u64,
    },
    /// A decision about another migration.
    #[error("a {} message names migration {found}, and this is {expected}", message.name())]
    Token {
        /// COMMIT, PREPARED, RUNNING or ANSWER.
        message: Tag,
        /// As received.
        found: Token,
        /// This one.
        expected: Token,
    },
    /// The peer refused before anything was begun.
    #[error("the peer refused: {reason}")]
    Refused {
        /// In its words.
        reason: String,
    },
    /// The peer gave up.
    #[error("the peer aborted: {reason}")]
    Aborted {
        /// In its words.
        reason: String,
    },
}

impl WireError {
    /// Makes the error that `found` came where it may not.
    pub(crate) fn unexpected(found: Tag, expected: &'static str) -> Self {
        Self::Unexpected { found, expected }
    }

    /// Whether this is a timeout: the peer made no progress.
    pub(crate) fn is_silence(&self) -> bool {
        matches!(self, Self::Format(FormatError::Io(e)) if e.kind() == io::ErrorKind::TimedOut)
    }

    /// Whether the connection ended or broke, which excludes timeouts and what came over it.
    pub(crate) fn is_loss(&self) -> bool {
        match self {
            // Errors that the link itself makes (limits, a stop) have no error number.
            Self::Format(FormatError::Io(e)) => {
                e.kind() == io::ErrorKind::UnexpectedEof || e.raw_os_error().is_some()
            }
            _ => false,
        }
    }
}

impl From<io::Error> for WireError {
    fn from(e: io::Error) -> Self {
        Self::Format(FormatError::Io(e))
    }
}
