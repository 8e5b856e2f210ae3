//! The payload of an archive's records of contents. `FORMAT.md` specifies the bytes.

use driftline_dirty_tracker::{FrameRun, PAGE_SIZE};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::address::place;
use crate::damage::{Damage, in_range};
use crate::object::Objects;
use crate::records::{table, wrong_size};

/// Frames and their contents.
pub(crate) const TAG_CONTENTS: u16 = 0x8020;

/// Maximum number of frames in a record of contents: 2 MiB, which is packed and unpacked as a
/// whole.
pub(crate) const MAX_FRAMES: usize = 512;
/// Length of the contents of that many frames, in bytes.
pub(crate) const MAX_CONTENTS: usize = MAX_FRAMES * PAGE_SIZE as usize;
/// Maximum length of the packed contents, in bytes: zstd makes incompressible data larger by a
/// 256th.
const MAX_PACKED: usize = MAX_CONTENTS + MAX_CONTENTS / 128;
/// Maximum length of a record of contents, in bytes.
pub(crate) const MAX_CONTENTS_RECORD: usize =
    size_of::<U64>() + MAX_FRAMES * (size_of::<RawArchiveRun>() + 4) + MAX_PACKED;

/// A run of frames: the first frame, and the number of frames.
type RawArchiveRun = [U64; 2];

/// Replaces `payload` with frames of one object, ascending by number, at most [`MAX_FRAMES`]: their
/// places, the checksums of their contents, and the `packed` contents.
pub(crate) fn encode_contents(
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
pub(crate) struct Contents<'p> {
    /// Number of frames, at most [`MAX_FRAMES`].
    pub(crate) frames: usize,
    /// Checksums, four bytes for each frame.
    pub(crate) crcs: &'p [u8],
    /// Compressed contents of all frames.
    pub(crate) packed: &'p [u8],
}

/// Decodes the payload of a record of contents of `object`, and replaces `runs` with its runs.
/// `before` is the last run of the record before.
pub(crate) fn decode_contents<'p>(
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
        in_range("the number of pages in a record", frames, 1, most)?;
        runs.push(run);
    }
    let frames = frames as usize;
    let Some((crcs, packed)) = rest.split_at_checked(frames * 4) else {
        return Err(wrong_size("the length of pages' checksums", rest.len(), frames * 4));
    };
    Ok(Contents { frames, crcs, packed })
}
