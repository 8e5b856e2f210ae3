//! For tests: makes checksums, counts and lengths of a damaged epoch file right again, so that the
//! checks behind them are reached.

use super::records::{TAG_FRAMES, TAG_TRAILER, TAG_ZEROS, TRAILER_LEN};
use crate::format::{HEADER_LEN, RECORD_HEAD_LEN};

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    let there = &bytes[at.min(bytes.len())..bytes.len().min(at.saturating_add(8))];
    word[..there.len()].copy_from_slice(there);
    u64::from_le_bytes(word)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Frames in the run table of a payload, as far as it goes.
fn count_frames(payload: &[u8]) -> u64 {
    let runs = word(payload, 0).min(payload.len() as u64 / 16);
    (0..runs as usize).fold(0, |sum: u64, i| sum.wrapping_add(word(payload, 16 + i * 16)))
}

/// Walks over `bytes` as if they were an epoch file and repairs every checksum, sequence number,
/// record length that reaches past the end, and the trailer's totals. Whatever else is wrong stays
/// so. Bytes behind a trailer are cut off.
pub fn reseal(bytes: &mut Vec<u8>) {
    if bytes.len() < HEADER_LEN {
        return;
    }
    let crc = crc32c::crc32c(&bytes[..HEADER_LEN - 4]);
    put(bytes, HEADER_LEN - 4, &crc.to_le_bytes());
    let mut digest = crc;
    let (mut at, mut sequence, mut frames, mut zeros) = (HEADER_LEN, 0u32, 0u64, 0u64);
    while at + RECORD_HEAD_LEN <= bytes.len() {
        let from = at + RECORD_HEAD_LEN;
        let tag = word(bytes, at) as u16;
        let length = (word(bytes, at + 8) as u32 as usize).min(bytes.len() - from);
        put(bytes, at + 8, &(length as u32).to_le_bytes());
        put(bytes, at + 16, &sequence.to_le_bytes());
        let end = from + length;
        if tag == TAG_TRAILER && length == TRAILER_LEN {
            bytes.truncate(end);
            for (place, value) in [(0, end as u64), (8, frames), (16, zeros)] {
                put(bytes, from + place, &value.to_le_bytes());
            }
            put(bytes, from + 32, &(sequence + 1).to_le_bytes());
            put(bytes, from + 36, &digest.to_le_bytes());
        }
        match tag {
            TAG_FRAMES => frames = frames.wrapping_add(count_frames(&bytes[from..end])),
            TAG_ZEROS => zeros = zeros.wrapping_add(count_frames(&bytes[from..end])),
            _ => {}
        }
        let crc = crc32c::crc32c(&bytes[from..end]);
        put(bytes, at + 12, &crc.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[at..at + RECORD_HEAD_LEN - 4]);
        put(bytes, at + RECORD_HEAD_LEN - 4, &crc.to_le_bytes());
        digest = crc32c::crc32c_append(digest, &bytes[at..from - 4]);
        sequence = sequence.wrapping_add(1);
        at = end;
    }
}
