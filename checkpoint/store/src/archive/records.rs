//! The payloads of an archive's own records, and the limits of all of its records. `FORMAT.md`
//! specifies the bytes.

use driftline_dirty_tracker::{FrameRun, PAGE_SIZE};
use driftline_format::{RECORD_HEAD_LEN, RecordHead};
use driftline_guest::SectionTag;
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

/// Maximum number of frames in a record of contents: 2 MiB, which is packed and unpacked as a
/// whole.
pub(super) const MAX_FRAMES: usize = 512;
/// Length of the contents of that many frames, in bytes.
pub(super) const MAX_CONTENTS: usize = MAX_FRAMES * PAGE_SIZE as usize;
/// Maximum length of the packed contents, in bytes: zstd makes incompressible data larger by a
/// 256th.
const MAX_PACKED: usize = MAX_CONTENTS + MAX_CONTENTS / 128;
const END_LEN: usize = size_of::<RawEnd>();

/// A run of frames: the first frame, and the number of frames.
type RawArchiveRun = [U64; 2];

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawEnd {
    epoch: U64,
    frames: U64,
    records: U32,
    digest: U32,
}

/// Returns the maximum length of a record of `tag`, in bytes.
fn limit(tag: u16) -> u32 {
    match tag {
        TAG_CONTENTS => {
            (size_of::<U64>() + MAX_FRAMES * (size_of::<RawArchiveRun>() + 4) + MAX_PACKED) as u32
        }
        TAG_END => END_LEN as u32,
        tag => records::limit(tag),
    }
}

/// Returns whether `tag` is one of an archive's own that this program knows.
pub(super) fn is_known(tag: u16) -> bool {
    matches!(tag, TAG_EPOCH | TAG_LAYOUT | TAG_DRIVES | TAG_CONTENTS | TAG_END)
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

/// Replaces `payload` with frames of one object, ascending by number, at most [`MAX_FRAMES`]: their
/// places, the checksums of their contents, and the `packed` contents.
pub(super) fn encode_contents(
    runs: &[FrameRun],
    crcs: impl Iterator<Item = u32>,
    packed: &[u8],
    payload: &mut Vec<u8>,
) {
    payload.clear();
    payload.extend_from_slice(&(runs.len() as u64).to_le_bytes());
    for run in runs {
        let raw: RawArchiveRun = [place(run.start).1.0.into(), run.count.into()];
        payload.extend_from_slice(raw.as_bytes());
    }
    crcs.for_each(|crc| payload.extend_from_slice(&crc.to_le_bytes()));
    payload.extend_from_slice(packed);
}

/// The content of a record of contents.
pub(super) struct Contents<'p> {
    /// Number of frames, at most [`MAX_FRAMES`].
    pub(super) frames: usize,
    /// Checksums, four bytes for each frame.
    pub(super) crcs: &'p [u8],
    /// Compressed contents of all frames.
    pub(super) packed: &'p [u8],
}

/// Decodes the payload of a record of contents of `object`, and replaces `runs` with its runs.
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
    let (raw, rest) = table::<RawArchiveRun>(payload)?;
    let (mut frames, most) = (0_u64, MAX_FRAMES as u64);
    for [start, count] in raw {
        let run = objects.run(object, start.get(), count.get())?;
        // This ensures that a frame is there once, in whatever order threads unpack the records.
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

/// The end of an archive: totals that the archive must match.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct End {
    pub(super) epoch: u64,
    /// Number of frames with contents.
    pub(super) frames: u64,
    /// Number of records, including this one.
    pub(super) records: u32,
    /// Digest of the header and the heads of all records before this one.
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

    /// Decodes an end. Fails if its epoch's number is higher than a store's can be.
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
