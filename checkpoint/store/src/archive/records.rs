//! The payloads of an archive's own records, and the bounds of all of them. Bytes: FORMAT.md.

use driftline_dirty_tracker::{FrameRun, PAGE_SIZE};
use driftline_format::{RECORD_HEAD_LEN, RecordHead};
use driftline_guest::section_tags;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::address::place;
use crate::error::Damage;
use crate::limits::MAX_EPOCH;
use crate::object::Objects;
use crate::records;
use crate::records::{Digest, TAG_DRIVES, TAG_EPOCH, TAG_LAYOUT, TAG_STORE, table, wrong_size};

/// Frames and their contents.
pub(super) const TAG_CONTENTS: u16 = 0x8020;
/// The end of an archive.
pub(super) const TAG_END: u16 = 0x80fe;

/// Most frames in a record of contents: 2 MiB, which is packed and unpacked at once.
pub(super) const MAX_FRAMES: usize = 512;
/// Bytes of so many.
pub(super) const MAX_CONTENTS: usize = MAX_FRAMES * PAGE_SIZE as usize;
/// Most bytes that they are packed into: zstd makes what it cannot pack larger by a 256th.
const MAX_PACKED: usize = MAX_CONTENTS + MAX_CONTENTS / 128;
const END_LEN: usize = size_of::<RawEnd>();

/// A run of frames: the first, and how many.
type RawRun = [U64; 2];

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawEnd {
    epoch: U64,
    frames: U64,
    records: U32,
    digest: U32,
}

/// The most bytes that a record of `tag` may have.
fn limit(tag: u16) -> u32 {
    match tag {
        TAG_CONTENTS => {
            (size_of::<U64>() + MAX_FRAMES * (size_of::<RawRun>() + 4) + MAX_PACKED) as u32
        }
        TAG_END => END_LEN as u32,
        tag => records::limit(tag),
    }
}

/// Whether a record is one of an archive's own that this program knows.
pub(super) fn is_known(tag: u16) -> bool {
    matches!(tag, TAG_EPOCH | TAG_LAYOUT | TAG_DRIVES | TAG_CONTENTS | TAG_END)
}

/// Reads a record's head; its length is one that a record of its tag may have.
pub(super) fn decode_head(
    bytes: &[u8; RECORD_HEAD_LEN],
    sequence: u32,
) -> Result<RecordHead, Damage> {
    let head = RecordHead::read_from(&bytes[..], sequence)?;
    if head.to_bytes() != *bytes {
        let what = "the undefined part of a record's head";
        return Err(Damage::Mismatch { what, found: 1, expected: 0 });
    }
    if is_known(head.tag) || head.tag == section_tags::CONFIG.0 {
        // Those of contents are objects; which there are, is known later.
        if head.instance != 0 && head.tag != TAG_CONTENTS {
            let (what, found) = ("the instance of a record that has none", head.instance.into());
            return Err(Damage::Mismatch { what, found, expected: 0 });
        }
        if !head.must_understand {
            let what = "the flag that a record must be understood";
            return Err(Damage::Mismatch { what, found: 0, expected: 1 });
        }
    }
    // What is passed over is not read.
    if head.tag >= TAG_STORE && !is_known(head.tag) && !head.must_understand {
        return Ok(head);
    }
    Ok(head.bounded(limit(head.tag))?)
}

/// Replaces `payload` with frames of one object, ascending by number, at most [`MAX_FRAMES`]: where
/// they are, the checksums of their contents, and those, `packed`.
pub(super) fn encode_contents(
    runs: &[FrameRun],
    crcs: impl Iterator<Item = u32>,
    packed: &[u8],
    payload: &mut Vec<u8>,
) {
    payload.clear();
    payload.extend_from_slice(&(runs.len() as u64).to_le_bytes());
    for run in runs {
        let raw: RawRun = [place(run.start).1.0.into(), run.count.into()];
        payload.extend_from_slice(raw.as_bytes());
    }
    crcs.for_each(|crc| payload.extend_from_slice(&crc.to_le_bytes()));
    payload.extend_from_slice(packed);
}

/// What a record of contents has.
pub(super) struct Contents<'p> {
    /// At most [`MAX_FRAMES`].
    pub(super) frames: usize,
    /// Four bytes for each of them.
    pub(super) crcs: &'p [u8],
    /// Contents of all of them.
    pub(super) packed: &'p [u8],
}

/// Takes apart the payload of a record of contents of `object`; `runs` are replaced with its own.
/// `before` is the last run of the record before.
pub(super) fn decode_contents<'p>(
    payload: &'p [u8],
    object: u16,
    objects: Objects<'_>,
    before: &mut Option<FrameRun>,
    runs: &mut Vec<FrameRun>,
) -> Result<Contents<'p>, Damage> {
    runs.clear();
    if usize::from(object) >= objects.count() {
        return Err(Damage::Object { object });
    }
    let (raw, rest) = table::<RawRun>(payload)?;
    let (mut frames, most) = (0_u64, MAX_FRAMES as u64);
    for [start, count] in raw {
        let run = objects.run(object, start.get(), count.get())?;
        // So that a frame is there once, whoever unpacks which record first.
        if let Some(before) = before.filter(|before| before.end() > run.start) {
            return Err(Damage::Order { run, before });
        }
        *before = Some(run);
        frames = frames.saturating_add(run.count);
        if frames > most {
            let what = "the number of frames in a record";
            return Err(Damage::Mismatch { what, found: frames, expected: most });
        }
        runs.push(run);
    }
    let frames = frames as usize;
    let Some((crcs, packed)) = rest.split_at_checked(frames * 4) else {
        return Err(wrong_size("the length of frames' checksums", rest.len(), frames * 4));
    };
    Ok(Contents { frames, crcs, packed })
}

/// How an archive ends: what all of it must have been.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct End {
    pub(super) epoch: u64,
    /// With contents.
    pub(super) frames: u64,
    /// This one included.
    pub(super) records: u32,
    /// Over the header and the heads of all records before.
    pub(super) digest: Digest,
}

impl End {
    pub(super) fn encode(&self) -> Vec<u8> {
        let raw = RawEnd {
            epoch: self.epoch.into(),
            frames: self.frames.into(),
            records: self.records.into(),
            digest: self.digest.0.into(),
        };
        raw.as_bytes().to_vec()
    }

    /// Refuses an epoch that no store has.
    pub(super) fn decode(payload: &[u8]) -> Result<Self, Damage> {
        let raw = RawEnd::read_from_bytes(payload)
            .map_err(|_| wrong_size("the length of an archive's end", payload.len(), END_LEN))?;
        let (what, found) = ("an epoch's number", raw.epoch.get());
        if found > MAX_EPOCH {
            return Err(Damage::Mismatch { what, found, expected: MAX_EPOCH });
        }
        let (frames, records) = (raw.frames.get(), raw.records.get());
        Ok(Self { epoch: found, frames, records, digest: Digest(raw.digest.get()) })
    }
}
