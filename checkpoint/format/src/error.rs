//! Reasons for refusing bytes from a peer or a file.

use std::io;

use driftline_dirty_tracker::PAGE_SIZE;

use crate::limits::HEADER_LEN;

/// What is wrong with bytes from a peer or a file.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The input ended early, or could not be read or written.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The first eight bytes are not the expected magic.
    #[error("not a Driftline {expected}: it begins with \"{}\"", found.escape_ascii())]
    Magic {
        /// Kind of input that was expected: "migration stream", "log".
        expected: &'static str,
        /// The bytes found.
        found: [u8; 8],
    },
    /// The format is of another version.
    #[error("format version {found} is not the version {expected} that this program reads")]
    Version {
        /// The version found.
        found: u16,
        /// The version that this program reads.
        expected: u16,
    },
    /// The input requires a feature that this program does not have.
    #[error("it requires feature bits {bits:#x}, which this program does not know")]
    Features {
        /// The unknown bits.
        bits: u64,
    },
    /// The header has another length.
    #[error("its header claims {found} bytes; a header of this version has {HEADER_LEN}")]
    HeaderLen {
        /// The length found, in bytes.
        found: u16,
    },
    /// The page size is another one.
    #[error("its page size is {found} bytes; this program has {PAGE_SIZE}")]
    PageSize {
        /// The page size found, in bytes.
        found: u32,
    },
    /// A checksum does not match.
    #[error("the checksum of {what} is {found:#010x} and should be {expected:#010x}")]
    Checksum {
        /// Checked part: header, record head or payload.
        what: &'static str,
        /// Checksum as stored.
        found: u32,
        /// Checksum as computed.
        expected: u32,
    },
    /// A record is longer than its kind allows.
    #[error("a record of tag {tag} claims {length} bytes, more than the {limit} allowed")]
    TooLong {
        /// The record's tag.
        tag: u16,
        /// The record's length as stored, in bytes.
        length: u32,
        /// The reader's limit, in bytes.
        limit: u32,
    },
    /// A file is longer than its kind may be.
    #[error("it has {length} bytes, more than the {limit} allowed")]
    FileTooLong {
        /// The file's length, in bytes.
        length: u64,
        /// The limit, in bytes.
        limit: u64,
    },
    /// A guest's state has more sections than it may.
    #[error("it has {found} state sections, more than the {limit} allowed")]
    TooManySections {
        /// Their number.
        found: usize,
        /// The limit.
        limit: u32,
    },
    /// A record is out of order: one is missing, duplicated or from another place.
    #[error("record {found} is where record {expected} should be")]
    Sequence {
        /// Sequence number as stored.
        found: u32,
        /// Sequence number as counted.
        expected: u32,
    },
}
