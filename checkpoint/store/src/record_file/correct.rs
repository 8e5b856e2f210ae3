//! Test support: corrects checksums and counts of a damaged archive or state of a snapshot, so that
//! tests reach the checks after those of the checksums and counts.

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_format::{HEADER_LEN, RECORD_HEAD_LEN};

use crate::correct::{correct_header, correct_record, put, word};
use crate::record_file::contents::{MAX_FRAMES, TAG_CONTENTS};
use crate::record_file::records::TAG_END;

/// Corrects the checksums of frames in a record of contents, if it can be unpacked. Returns the
/// number of frames.
fn correct_contents(payload: &mut [u8]) -> u64 {
    let runs = word(payload, 0).min(MAX_FRAMES as u64) as usize;
    let frames = (0..runs).fold(0, |sum: u64, i| sum.saturating_add(word(payload, 16 + i * 16)));
    let (crcs, count) = (8 + runs * 16, frames.min(MAX_FRAMES as u64) as usize);
    let Some(packed) = payload.get(crcs + count * 4..) else { return frames };
    let Ok(contents) = zstd::bulk::decompress(packed, count * PAGE_SIZE as usize) else {
        return frames;
    };
    for (i, page) in contents.chunks_exact(PAGE_SIZE as usize).enumerate() {
        put(payload, crcs + i * 4, &crc32c::crc32c(page).to_le_bytes());
    }
    frames
}

/// Walks over `bytes` as if they were a file of records and corrects every checksum, sequence
/// number, record length that reaches past the end, and the totals at the end. Leaves all other
/// errors as they are.
pub fn correct_record_file(bytes: &mut [u8]) {
    let Some(mut digest) = correct_header(bytes) else { return };
    let (mut at, mut sequence, mut frames) = (HEADER_LEN, 0_u32, 0_u64);
    while at + RECORD_HEAD_LEN <= bytes.len() {
        let (from, tag) = (at + RECORD_HEAD_LEN, word(bytes, at) as u16);
        let length = (word(bytes, at + 8) as u32 as usize).min(bytes.len() - from);
        let payload = &mut bytes[from..from + length];
        match tag {
            TAG_CONTENTS => frames = frames.saturating_add(correct_contents(payload)),
            TAG_END if length == 24 => {
                put(payload, 8, &frames.to_le_bytes());
                put(payload, 16, &sequence.wrapping_add(1).to_le_bytes());
                put(payload, 20, &digest.to_le_bytes());
            }
            _ => {}
        }
        let end = correct_record(bytes, at, sequence);
        digest = crc32c::crc32c_append(digest, &bytes[at..from - 4]);
        sequence = sequence.wrapping_add(1);
        at = end;
    }
}
