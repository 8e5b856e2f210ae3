//! The records that only files of records have, and the limits of all records in such files.
//! `FORMAT.md` specifies the bytes.

use driftline_format::{RECORD_HEAD_LEN, RecordHead};
use driftline_guest::SectionTag;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::contents::{MAX_CONTENTS_RECORD, TAG_CONTENTS};
use super::front::{SNAPSHOT_LEN, TAG_SNAPSHOT};
use crate::damage::{Damage, in_range};
use crate::limits::MAX_EPOCH;
use crate::records;
use crate::records::{Digest, TAG_DRIVES, TAG_EPOCH, TAG_LAYOUT, TAG_STORE, wrong_size};

/// The end of a file of records.
pub(crate) const TAG_END: u16 = 0x80fe;

const END_LEN: usize = size_of::<RawEnd>();

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawEnd {
    epoch: U64,
    frames: U64,
    records: U32,
    digest: U32,
}

/// Returns the maximum length of a record of `tag`, in bytes.
pub(crate) fn limit(tag: u16) -> u32 {
    match tag {
        TAG_CONTENTS => MAX_CONTENTS_RECORD as u32,
        TAG_END => END_LEN as u32,
        TAG_SNAPSHOT => SNAPSHOT_LEN as u32,
        tag => records::limit(tag),
    }
}

/// Returns whether `tag` is one of these files' own that this program knows.
pub(super) fn is_known(tag: u16) -> bool {
    matches!(tag, TAG_EPOCH | TAG_LAYOUT | TAG_DRIVES | TAG_CONTENTS | TAG_SNAPSHOT | TAG_END)
}

/// Reads a record's head, and checks its length against the limit of its tag.
pub(super) fn decode_head(
    bytes: &[u8; RECORD_HEAD_LEN],
    sequence: u32,
) -> Result<RecordHead, Damage> {
    let head = RecordHead::read_from(&bytes[..], sequence)?;
    if head.to_bytes() != *bytes {
        let what = "the undefined part of a record's head";
        return Err(Damage::Mismatch { what, found: 1, expected: 0 });
    }
    if is_known(head.tag) || head.tag == SectionTag::CONFIG.0 {
        // The instance of a record of contents is its object, which is checked later.
        if head.instance != 0 && head.tag != TAG_CONTENTS {
            let (what, found) = ("the instance of a record that has none", head.instance.into());
            return Err(Damage::Mismatch { what, found, expected: 0 });
        }
        if !head.must_understand {
            let what = "the flag that a record must be understood";
            return Err(Damage::Mismatch { what, found: 0, expected: 1 });
        }
    }
    // Records that are skipped are not read.
    if head.tag >= TAG_STORE && !is_known(head.tag) && !head.must_understand {
        return Ok(head);
    }
    Ok(head.bounded(limit(head.tag))?)
}

/// The end of a file of records: totals that the file must match.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct End {
    pub(crate) epoch: u64,
    /// Number of frames with contents.
    pub(crate) frames: u64,
    /// Number of records, including this one.
    pub(crate) records: u32,
    /// Digest of the header and the heads of all records before this one.
    pub(crate) digest: Digest,
}

impl End {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let raw = RawEnd {
            epoch: self.epoch.into(),
            frames: self.frames.into(),
            records: self.records.into(),
            digest: self.digest.0.into(),
        };
        raw.as_bytes().to_vec()
    }

    /// Decodes an end. Fails if its epoch's number is higher than a store's can be.
    pub(crate) fn decode(payload: &[u8]) -> Result<Self, Damage> {
        let raw = RawEnd::read_from_bytes(payload)
            .map_err(|_| wrong_size("the length of the end", payload.len(), END_LEN))?;
        let (epoch, frames, records) = (raw.epoch.get(), raw.frames.get(), raw.records.get());
        in_range("a checkpoint's number", epoch, 0, MAX_EPOCH)?;
        Ok(Self { epoch, frames, records, digest: Digest(raw.digest.get()) })
    }
}
