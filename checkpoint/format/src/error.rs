//! Why bytes from a peer or a file are refused.

use std::io;

use driftline_dirty_tracker::PAGE_SIZE;

use crate::limits::HEADER_LEN;

/// What is wrong with bytes from a peer or a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// It ended early, or could not be read or written.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The first eight bytes are someone else's.
    #[error("not a Driftline {expected}: it begins with \"{}\"", found.escape_ascii())]
    Magic {
        /// "migration stream", "log".
        expected: &'static str,
        /// What stands there.
        found: [u8; 8],
    },
    /// Another version's format.
    #[error("format version {found} is not the version {expected} that this program reads")]
    Version {
        /// What stands there.
        found: u16,
        /// What this program reads.
        expected: u16,
    },
    /// A required feature that this program does not have.
    #[error("it requires feature bits {bits:#x}, which this program does not know")]
    Features {
        /// The unknown bits.
        bits: u64,
    },
    /// A header of another length.
    #[error("its header claims {found} bytes; a header of this version has {HEADER_LEN}")]
    HeaderLen {
        /// What stands there.
        found: u16,
    },
    /// Another page size.
    #[error("its page size is {found} bytes; this program has {PAGE_SIZE}")]
    PageSize {
        /// What stands there.
        found: u32,
    },
    /// A checksum does not match.
    #[error("the checksum of {what} is {found:#010x} and should be {expected:#010x}")]
    Checksum {
        /// Header, record head or payload.
        what: &'static str,
        /// As stored.
        found: u32,
        /// As computed.
        expected: u32,
    },
    /// A record longer than its kind may be.
    #[error("a record of tag {tag} claims {length} bytes, more than the {limit} allowed")]
    TooLong {
        /// The record's tag.
        tag: u16,
        /// What it claims.
        length: u32,
        /// What the reader allows.
        limit: u32,
    },
    /// A record out of order: one is missing, doubled or from elsewhere.
    #[error("record {found} is where record {expected} should be")]
    Sequence {
        /// As stored.
        found: u32,
        /// As counted.
        expected: u32,
    },
}
