//! Feeds hostile streams to the receiver's decoder.
//!
//! Checksums would stop almost every mutation at the first record. So the target also decodes a
//! copy of the input with corrected checksums and sequence numbers, which only the protocol's
//! checks can refuse.
#![no_main]

use libfuzzer_sys::fuzz_target;

const HEADER: usize = 64;
const HEAD: usize = 24;
/// The tag of FRAMES, whose payload checksum covers only the run.
const FRAMES: u16 = 21;
/// The tags of MEMORY and FILES, whose payload checksum does not cover the last byte.
const MEMORY: u16 = 32;
const FILES: u16 = 33;
/// Bytes of a run.
const RUN: usize = 16;

/// Corrects the checksums of the header and of each record, and the sequence numbers.
fn correct_checksums(bytes: &mut [u8]) {
    if bytes.len() < HEADER {
        return;
    }
    let crc = crc32c::crc32c(&bytes[..HEADER - 4]);
    bytes[HEADER - 4..HEADER].copy_from_slice(&crc.to_le_bytes());
    let (mut at, mut sequence) = (HEADER, 0u32);
    while at + HEAD <= bytes.len() {
        let length =
            u32::from_le_bytes([bytes[at + 8], bytes[at + 9], bytes[at + 10], bytes[at + 11]]);
        let end = (at + HEAD).saturating_add(length as usize).min(bytes.len());
        let checked = match u16::from_le_bytes([bytes[at], bytes[at + 1]]) {
            FRAMES => end.min(at + HEAD + RUN),
            MEMORY | FILES => (end - 1).max(at + HEAD),
            _ => end,
        };
        let crc = crc32c::crc32c(&bytes[at + HEAD..checked]);
        bytes[at + 12..at + 16].copy_from_slice(&crc.to_le_bytes());
        bytes[at + 16..at + 20].copy_from_slice(&sequence.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[at..at + 20]);
        bytes[at + 20..at + 24].copy_from_slice(&crc.to_le_bytes());
        sequence += 1;
        at = end;
    }
}

fuzz_target!(|input: &[u8]| {
    let _ = driftline_migrate::inspect(input);
    let mut bytes = input.to_vec();
    correct_checksums(&mut bytes);
    let _ = driftline_migrate::inspect(&bytes[..]);
});
