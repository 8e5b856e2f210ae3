//! What wire and store have in common: the fixed header and the record, byte by byte.
//!
//! All numbers are little-endian. The header stays readable for ever:
//!
//! ```text
//!  0        8     10    12        16                  24                  32
//!  +--------+-----+-----+---------+-------------------+-------------------+
//!  | magic  | ver | len | page sz | required features | optional features |
//!  +--------+-----+-----+---------+-------------------+-------------------+
//!  32                             48                  56        60        64
//!  +------------------------------+-------------------+---------+---------+
//!  | VM id                        | epoch             | layout  | CRC32C  |
//!  +------------------------------+-------------------+---------+---------+
//! ```
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
//! Lengths are bounded by the reader before anything is allocated. What can be stored can be sent:
//! the bounds of a guest's state are here too.

use std::io::{self, Read, Write};

use driftline_dirty_tracker::PAGE_SIZE;
use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use driftline_guest::VmId;

/// The version of the migration stream that this program speaks.
pub const FORMAT_VERSION: u16 = 1;
/// The version of the store that this program writes.
pub const STORE_VERSION: u16 = 2;
/// The version of archives that this program writes.
pub const ARCHIVE_VERSION: u16 = 1;
/// The version of records of what a guest touched first.
pub const TOUCHED_VERSION: u16 = 1;
/// Magic of a migration stream.
pub const MAGIC_STREAM: [u8; 8] = *b"DRIFTMIG";
/// Magic of a store's manifest.
pub const MAGIC_STORE: [u8; 8] = *b"DRIFTSTO";
/// Magic of a store's log.
pub const MAGIC_LOG: [u8; 8] = *b"DRIFTLOG";
/// Magic of a store's page file.
pub const MAGIC_PAGES: [u8; 8] = *b"DRIFTPAG";
/// Magic of an archive.
pub const MAGIC_ARCHIVE: [u8; 8] = *b"DRIFTARC";
/// Magic of a record of what a guest touched first.
pub const MAGIC_TOUCHED: [u8; 8] = *b"DRIFTTCH";
/// Bytes in a header.
pub const HEADER_LEN: usize = 64;
/// Bytes in a record's head.
pub const RECORD_HEAD_LEN: usize = 24;
/// Flag bit of a record that a reader must understand.
pub const MUST_UNDERSTAND: u16 = 1 << 0;

/// Most memory slots of a guest.
pub const MAX_SLOTS: u32 = 1024;
/// Most bytes of a guest's configuration.
pub const MAX_CONFIG: u32 = 64 << 10;
/// Most bytes of one state section.
pub const MAX_SECTION: u32 = 4 << 20;
/// Most state sections of a guest.
pub const MAX_SECTIONS: u32 = 4096;
/// Most bytes of all state sections of a guest.
pub const MAX_STATE: u64 = 64 << 20;

/// The version of the format whose files begin with `magic`.
const fn version_of(magic: [u8; 8]) -> u16 {
    match &magic {
        b"DRIFTMIG" => FORMAT_VERSION,
        b"DRIFTARC" => ARCHIVE_VERSION,
        b"DRIFTTCH" => TOUCHED_VERSION,
        _ => STORE_VERSION,
    }
}

/// What files begin with `magic`.
fn name_of(magic: [u8; 8]) -> &'static str {
    match magic {
        MAGIC_STREAM => "migration stream",
        MAGIC_LOG => "log",
        MAGIC_PAGES => "page file",
        MAGIC_ARCHIVE => "archive",
        MAGIC_TOUCHED => "record of touched frames",
        _ => "store",
    }
}

/// Required feature bits that this program knows, with their names.
pub const KNOWN_FEATURES: &[(u64, &str)] = &[];

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

/// The fixed header.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Header {
    magic: [u8; 8],
    version: U16,
    header_len: U16,
    page_size: U32,
    required: U64,
    optional: U64,
    vm_id: [u8; 16],
    epoch: U64,
    layout: U32,
    crc: U32,
}

impl Header {
    /// A header of this program's version, without features.
    pub fn new(magic: [u8; 8], vm_id: VmId, epoch: u64, layout_hash: u32) -> Self {
        let mut h = Self {
            magic,
            version: version_of(magic).into(),
            header_len: (HEADER_LEN as u16).into(),
            page_size: (PAGE_SIZE as u32).into(),
            required: 0.into(),
            optional: 0.into(),
            vm_id: *vm_id.0.as_bytes(),
            epoch: epoch.into(),
            layout: layout_hash.into(),
            crc: 0.into(),
        };
        h.crc = h.checksum().into();
        h
    }

    /// The guest's identity.
    pub fn vm_id(&self) -> VmId {
        VmId(Uuid::from_bytes(self.vm_id))
    }

    /// Of a store's files the generation, of an archive and of touched frames the epoch, of a stream 0.
    pub fn epoch(&self) -> u64 {
        self.epoch.get()
    }

    /// `Layout::hash` of the guest's memory.
    pub fn layout_hash(&self) -> u32 {
        self.layout.get()
    }

    /// CRC32C of the bytes before the header's CRC.
    pub(crate) fn checksum(&self) -> u32 {
        crc32c::crc32c(&self.as_bytes()[..HEADER_LEN - 4])
    }

    /// Writes the header.
    pub fn write_to(&self, mut w: impl Write) -> io::Result<()> {
        w.write_all(self.as_bytes())
    }

    /// Reads a header and refuses, in this order: another magic, a wrong checksum, another version,
    /// another length, unknown required features, another page size.
    pub fn read_from(mut r: impl Read, magic: [u8; 8]) -> Result<Self, FormatError> {
        let mut h = Self::new_zeroed();
        r.read_exact(h.as_mut_bytes())?;
        if h.magic != magic {
            return Err(FormatError::Magic { expected: name_of(magic), found: h.magic });
        }
        let (found, expected) = (h.crc.get(), h.checksum());
        if found != expected {
            return Err(FormatError::Checksum { what: "the header", found, expected });
        }
        let expected = version_of(magic);
        if h.version.get() != expected {
            return Err(FormatError::Version { found: h.version.get(), expected });
        }
        if usize::from(h.header_len.get()) != HEADER_LEN {
            return Err(FormatError::HeaderLen { found: h.header_len.get() });
        }
        let known = KNOWN_FEATURES.iter().fold(0, |all, (bit, _)| all | bit);
        let bits = h.required.get() & !known;
        if bits != 0 {
            return Err(FormatError::Features { bits });
        }
        if u64::from(h.page_size.get()) != PAGE_SIZE {
            return Err(FormatError::PageSize { found: h.page_size.get() });
        }
        Ok(h)
    }
}

/// A record's head, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHead {
    /// What the payload is.
    pub tag: u16,
    /// A reader that does not know the tag must refuse.
    pub must_understand: bool,
    /// Which of several alike.
    pub instance: u16,
    /// Payload bytes that follow.
    pub length: u32,
    /// CRC32C of the payload.
    pub payload_crc: u32,
    /// Counts the records of a file or stream from 0; wraps.
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
    /// The head as bytes.
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

    /// Reads a head and checks its CRC and sequence; the caller bounds `length` by the tag.
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

    /// Refuses a payload longer than `limit`, before anyone allocates for it.
    pub fn bounded(self, limit: u32) -> Result<Self, FormatError> {
        if self.length > limit {
            return Err(FormatError::TooLong { tag: self.tag, length: self.length, limit });
        }
        Ok(self)
    }

    /// Compares the payload with its checksum.
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
    fn header_survives_and_every_flipped_bit_is_noticed() {
        let h = Header::new(MAGIC_STORE, VmId::random(), 7, 0xabcd);
        let mut bytes = Vec::new();
        h.write_to(&mut bytes).unwrap();
        let back = Header::read_from(&bytes[..], MAGIC_STORE).unwrap();
        assert_eq!((back.vm_id(), back.epoch(), back.layout_hash()), (h.vm_id(), 7, 0xabcd));
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            Header::read_from(&bytes[..], MAGIC_STORE).unwrap_err();
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(Header::read_from(&bytes[..63], MAGIC_STORE).is_err(), "truncated");
        assert!(Header::read_from(&bytes[..], MAGIC_STREAM).is_err(), "a stream is no store");
    }

    #[test]
    fn record_head_survives_and_every_flipped_bit_is_noticed() {
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
