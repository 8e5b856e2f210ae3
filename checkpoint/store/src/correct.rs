//! Test support: corrects checksums, counts and lengths of damaged files, so that tests reach the
//! checks after those of the checksums, counts and lengths.

use std::collections::BTreeSet;

use driftline_format::{HEADER_LEN, RECORD_HEAD_LEN, is_zero};

use crate::limits::SECTOR;
use crate::records::{COMMIT_LEN, TAG_COMMIT, TAG_EPOCH, TAG_FRAMES, TAG_ZEROS};
use crate::sectors::{DATA, SectorKind, trailer};

pub(super) fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    let there = &bytes[at.min(bytes.len())..bytes.len().min(at.saturating_add(8))];
    word[..there.len()].copy_from_slice(there);
    u64::from_le_bytes(word)
}

pub(super) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Corrects the header's checksum and returns it; `None` if there is no header.
pub(super) fn correct_header(bytes: &mut [u8]) -> Option<u32> {
    let crc = crc32c::crc32c(bytes.get(..HEADER_LEN - 4)?);
    bytes.get_mut(HEADER_LEN - 4..HEADER_LEN)?.copy_from_slice(&crc.to_le_bytes());
    Some(crc)
}

/// Corrects length, sequence and checksums of the record at `at`, and returns where its payload
/// ends.
pub(super) fn correct_record(bytes: &mut [u8], at: usize, sequence: u32) -> usize {
    let from = at + RECORD_HEAD_LEN;
    let length = (word(bytes, at + 8) as u32 as usize).min(bytes.len() - from);
    put(bytes, at + 8, &(length as u32).to_le_bytes());
    put(bytes, at + 16, &sequence.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[from..from + length]);
    put(bytes, at + 12, &crc.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[at..from - 4]);
    put(bytes, from - 4, &crc.to_le_bytes());
    from + length
}

/// Corrects a manifest's checksums, and the length of its record if that reaches past the end.
pub fn correct_manifest(bytes: &mut [u8]) {
    if correct_header(bytes).is_some() && bytes.len() >= HEADER_LEN + RECORD_HEAD_LEN {
        correct_record(bytes, HEADER_LEN, 0);
    }
}

/// Corrects the checksum of a page file's header.
pub fn correct_pages(bytes: &mut [u8]) {
    correct_header(bytes);
}

/// Totals of an epoch so far.
#[derive(Default)]
struct Counted {
    epoch: u64,
    rebased: bool,
    records: u32,
    frames: u64,
    zero_frames: u64,
    /// Offset among all data at which the epoch begins, in bytes.
    first: usize,
}

/// Counts the frames in the run table of a payload, as far as it goes; `count_of` reads one run's.
fn count_frames(payload: &[u8], count_of: impl Fn(usize) -> u64) -> u64 {
    let runs = word(payload, 0).min(payload.len() as u64 / 16);
    (0..runs as usize).fold(0, |sum: u64, i| sum.wrapping_add(count_of(16 + i * 16)))
}

/// Walks over `bytes` as if they were a log and corrects every checksum, sequence number, record
/// length that reaches past the end, and the totals at the end of each epoch. Leaves all other
/// errors as they are, and also sectors of zeros.
pub fn correct_log(bytes: &mut [u8]) {
    let Some(mut digest) = correct_header(bytes) else { return };
    let written: Vec<bool> = bytes.chunks_exact(SECTOR).map(|sector| !is_zero(sector)).collect();
    let mut data: Vec<u8> =
        bytes.chunks_exact(SECTOR).skip(1).flat_map(|sector| &sector[..DATA]).copied().collect();
    let (mut at, mut sequence, mut counted) = (0, 0u32, Counted::default());
    // Sectors in which epochs begin.
    let mut firsts = BTreeSet::from([1]);
    while at + RECORD_HEAD_LEN <= data.len() {
        let (from, tag) = (at + RECORD_HEAD_LEN, word(&data, at) as u16);
        counted.records += 1;
        let length = (word(&data, at + 8) as u32 as usize).min(data.len() - from);
        let commit = tag == TAG_COMMIT && length == COMMIT_LEN;
        if commit {
            let sectors = (from + length).div_ceil(DATA) - counted.first / DATA;
            put(&mut data, from, &counted.epoch.to_le_bytes());
            if !counted.rebased {
                let own = counted.frames.wrapping_mul(4096).wrapping_add((sectors * SECTOR) as u64);
                for (place, value) in [(16, counted.frames), (24, counted.zero_frames), (32, own)] {
                    put(&mut data, from + place, &value.to_le_bytes());
                }
            }
            put(&mut data, from + 40, &counted.records.to_le_bytes());
            put(&mut data, from + 44, &digest.to_le_bytes());
        }
        let end = correct_record(&mut data, at, sequence);
        let payload = &data[from..end];
        match tag {
            TAG_EPOCH => {
                (counted.epoch, counted.rebased) = (word(payload, 0), word(payload, 28) & 1 != 0);
            }
            TAG_FRAMES => {
                let frames = count_frames(payload, |run| word(payload, run) & 0xffff_ffff);
                counted.frames = counted.frames.wrapping_add(frames);
            }
            TAG_ZEROS => {
                let frames = count_frames(payload, |run| word(payload, run));
                counted.zero_frames = counted.zero_frames.wrapping_add(frames);
            }
            _ => {}
        }
        digest = crc32c::crc32c_append(digest, &data[at..from - 4]);
        sequence = sequence.wrapping_add(1);
        at = end;
        if commit {
            at = end.next_multiple_of(DATA);
            counted = Counted { first: at, ..Counted::default() };
            firsts.insert(1 + at / DATA);
        }
    }
    correct_sectors(bytes, &data, &firsts, &written);
}

/// Puts `data` into the sectors and corrects their checksums. Epochs begin in the sectors `firsts`;
/// sectors that were not `written` stay zeros.
fn correct_sectors(bytes: &mut [u8], data: &[u8], firsts: &BTreeSet<usize>, written: &[bool]) {
    for (n, sector) in bytes.chunks_exact_mut(SECTOR).enumerate() {
        if n > 0 {
            sector[..DATA].copy_from_slice(&data[(n - 1) * DATA..n * DATA]);
        }
        let kind = if firsts.contains(&n) { SectorKind::First } else { SectorKind::Other };
        let end = trailer(&sector[..DATA], n as u64, kind);
        sector[DATA..].copy_from_slice(&end);
        if !written[n] {
            sector.fill(0);
        }
    }
}
