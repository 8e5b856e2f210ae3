//! The fixed header of a file or stream, byte by byte.
//!
//! All numbers are little-endian. Every later version can read this header:
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

use std::io::{self, Read, Write};

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::VmId;
use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::FormatError;
use crate::limits::HEADER_LEN;

/// Version of the migration stream that this program uses.
pub const STREAM_VERSION: u16 = 1;
/// Version of the store that this program writes.
const STORE_VERSION: u16 = 1;
/// Version of archives that this program writes.
const ARCHIVE_VERSION: u16 = 1;
/// Version of the states of snapshots that this program writes and reads.
pub const SNAPSHOT_VERSION: u16 = 1;
/// Version of the records of a guest's working set.
const WORKING_SET_VERSION: u16 = 1;
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
/// Magic of the state of a snapshot.
pub const MAGIC_SNAPSHOT: [u8; 8] = *b"DRIFTSNP";
/// Magic of a record of a guest's working set.
pub const MAGIC_WORKING_SET: [u8; 8] = *b"DRIFTWKS";

/// Returns the version of the format whose files begin with `magic`.
fn version_of(magic: [u8; 8]) -> u16 {
    match magic {
        MAGIC_STREAM => STREAM_VERSION,
        MAGIC_ARCHIVE => ARCHIVE_VERSION,
        MAGIC_SNAPSHOT => SNAPSHOT_VERSION,
        MAGIC_WORKING_SET => WORKING_SET_VERSION,
        _ => STORE_VERSION,
    }
}

/// Names the kind of file that begins with `magic`.
fn name_of(magic: [u8; 8]) -> &'static str {
    match magic {
        MAGIC_STREAM => "migration stream",
        MAGIC_LOG => "log",
        MAGIC_PAGES => "page file",
        MAGIC_ARCHIVE => "archive",
        MAGIC_SNAPSHOT => "snapshot",
        MAGIC_WORKING_SET => "working set",
        _ => "store",
    }
}

/// Required feature bits that this program knows.
const KNOWN_FEATURES: u64 = 0;

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
    /// Returns a header of this program's version, without features.
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

    /// Returns the guest's identity.
    pub fn vm_id(&self) -> VmId {
        VmId(Uuid::from_bytes(self.vm_id))
    }

    /// Returns the generation of a store's file, the epoch of an archive or working set, or 0 for a
    /// stream or a snapshot.
    pub fn epoch(&self) -> u64 {
        self.epoch.get()
    }

    /// Returns the version of the format.
    pub fn version(&self) -> u16 {
        self.version.get()
    }

    /// Returns the checksum of the guest's memory layout that `layout_hash` computes.
    pub fn layout_hash(&self) -> u32 {
        self.layout.get()
    }

    /// Returns the CRC32C of the bytes before the header's CRC.
    pub fn checksum(&self) -> u32 {
        crc32c::crc32c(&self.as_bytes()[..HEADER_LEN - 4])
    }

    /// Writes the header.
    ///
    /// # Errors
    ///
    /// The writer's error.
    pub fn write_to(&self, mut w: impl Write) -> io::Result<()> {
        w.write_all(self.as_bytes())
    }

    /// Reads a header. Refuses, in this order: another magic, a wrong checksum, another version,
    /// another length, unknown required features, another page size.
    ///
    /// # Errors
    ///
    /// The first of these checks that fails, or the error of the reader.
    pub fn read_from(r: impl Read, magic: [u8; 8]) -> Result<Self, FormatError> {
        let h = Self::read_any_version(r, magic)?;
        let expected = version_of(magic);
        if h.version.get() != expected {
            return Err(FormatError::Version { found: h.version.get(), expected });
        }
        if usize::from(h.header_len.get()) != HEADER_LEN {
            return Err(FormatError::HeaderLen { found: h.header_len.get() });
        }
        let bits = h.required.get() & !KNOWN_FEATURES;
        if bits != 0 {
            return Err(FormatError::Features { bits });
        }
        if u64::from(h.page_size.get()) != PAGE_SIZE {
            return Err(FormatError::PageSize { found: h.page_size.get() });
        }
        Ok(h)
    }

    /// Reads a header of any version, whose fields other than the version may have other meanings.
    /// Refuses another magic and a wrong checksum.
    ///
    /// # Errors
    ///
    /// The first of these checks that fails, or the error of the reader.
    pub fn read_any_version(mut r: impl Read, magic: [u8; 8]) -> Result<Self, FormatError> {
        let mut h = Self::new_zeroed();
        r.read_exact(h.as_mut_bytes())?;
        if h.magic != magic {
            return Err(FormatError::Magic { expected: name_of(magic), found: h.magic });
        }
        let (found, expected) = (h.crc.get(), h.checksum());
        if found != expected {
            return Err(FormatError::Checksum { what: "the header", found, expected });
        }
        Ok(h)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_detects_every_flipped_bit() {
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
        let mut later = h;
        later.version = 9.into();
        later.crc = later.checksum().into();
        let refused = Header::read_from(later.as_bytes(), MAGIC_STORE).unwrap_err();
        assert!(matches!(refused, FormatError::Version { found: 9, expected: 1 }));
        let read = Header::read_any_version(later.as_bytes(), MAGIC_STORE).unwrap();
        assert_eq!(read.version(), 9);
        assert!(Header::read_from(&bytes[..63], MAGIC_STORE).is_err(), "truncated");
        assert!(Header::read_from(&bytes[..], MAGIC_STREAM).is_err(), "a stream is no store");
    }
}
