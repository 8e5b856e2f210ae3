//! The record, byte by byte.
//!
//! A record is 24 bytes of head and a payload:
//!
//! ```text
//!  0     2       4          6     8        12            16           20         24
//!  +-----+-------+----------+-----+--------+-------------+------------+----------+--------
//!  | tag | flags | instance | 0   | length | payload CRC | sequence   | head CRC | payload
//!  +-----+-------+----------+-----+--------+-------------+------------+----------+--------
//! ```
//!
//! The reader checks the length against a limit before it allocates memory for the payload.

use std::io::Read;

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::FormatError;
use crate::limits::RECORD_HEAD_LEN;

/// Flag of a record that a reader must understand.
pub const MUST_UNDERSTAND: u16 = 1 << 0;

/// The head of a record, after its checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHead {
    /// Kind of the payload.
    pub tag: u16,
    /// Whether a reader that does not know the tag must refuse the input.
    pub must_understand: bool,
    /// Number that tells records of the same tag apart.
    pub instance: u16,
    /// Length of the payload that follows, in bytes.
    pub length: u32,
    /// CRC32C of the payload.
    pub payload_crc: u32,
    /// Number of the record in its file or stream, from 0; wraps.
    pub sequence: u32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawHead {
    tag: U16,
    flags: U16,
    instance: U16,
    zero: U16,
    length: U32,
    payload_crc: U32,
    sequence: U32,
    head_crc: U32,
}

impl RecordHead {
    /// Returns the head as bytes.
    pub fn to_bytes(self) -> [u8; RECORD_HEAD_LEN] {
        let mut raw = RawHead {
            tag: self.tag.into(),
            flags: (if self.must_understand { MUST_UNDERSTAND } else { 0 }).into(),
            instance: self.instance.into(),
            zero: 0.into(),
            length: self.length.into(),
            payload_crc: self.payload_crc.into(),
            sequence: self.sequence.into(),
            head_crc: 0.into(),
        };
        raw.head_crc = crc32c::crc32c(&raw.as_bytes()[..RECORD_HEAD_LEN - 4]).into();
        let mut bytes = [0; RECORD_HEAD_LEN];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// Reads a head and checks its CRC and sequence; the caller checks `length` against the limit
    /// of the tag.
    ///
    /// # Errors
    ///
    /// A wrong CRC or sequence, or the reader's error.
    pub fn read_from(mut r: impl Read, sequence: u32) -> Result<Self, FormatError> {
        let mut raw = RawHead::new_zeroed();
        r.read_exact(raw.as_mut_bytes())?;
        let expected = crc32c::crc32c(&raw.as_bytes()[..RECORD_HEAD_LEN - 4]);
        let found = raw.head_crc.get();
        if found != expected {
            return Err(FormatError::Checksum { what: "a record's head", found, expected });
        }
        if raw.sequence.get() != sequence {
            let found = raw.sequence.get();
            return Err(FormatError::Sequence { found, expected: sequence });
        }
        Ok(Self {
            tag: raw.tag.get(),
            must_understand: raw.flags.get() & MUST_UNDERSTAND != 0,
            instance: raw.instance.get(),
            length: raw.length.get(),
            payload_crc: raw.payload_crc.get(),
            sequence,
        })
    }

    /// Refuses a payload longer than `limit`, before any memory is allocated for it.
    ///
    /// # Errors
    ///
    /// [`FormatError::TooLong`].
    pub fn bounded(self, limit: u32) -> Result<Self, FormatError> {
        if self.length > limit {
            return Err(FormatError::TooLong { tag: self.tag, length: self.length, limit });
        }
        Ok(self)
    }

    /// Checks the payload against its checksum.
    ///
    /// # Errors
    ///
    /// [`FormatError::Checksum`].
    pub fn check(&self, payload: &[u8]) -> Result<(), FormatError> {
        let expected = crc32c::crc32c(payload);
        if expected != self.payload_crc {
            let found = self.payload_crc;
            return Err(FormatError::Checksum { what: "a record", found, expected });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_head_detects_every_flipped_bit() {
        let head = RecordHead {
            tag: 3,
            must_understand: true,
            instance: 2,
            length: 5,
            payload_crc: crc32c::crc32c(b"hello"),
            sequence: 9,
        };
        let mut bytes = head.to_bytes();
        assert_eq!(RecordHead::read_from(&bytes[..], 9).unwrap(), head);
        assert!(matches!(
            RecordHead::read_from(&bytes[..], 8),
            Err(FormatError::Sequence { found: 9, expected: 8 })
        ));
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            RecordHead::read_from(&bytes[..], 9).unwrap_err();
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(head.check(b"hello").is_ok() && head.check(b"hellp").is_err());
        assert!(head.bounded(4).is_err() && head.bounded(5).is_ok());
    }
}
