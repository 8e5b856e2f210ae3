//! Fuzzes the state file of a snapshot, with arbitrary bytes as they are and with corrected
//! checksums: it is refused, or its content is the same after it was encoded and read again.
#![no_main]

use std::path::Path;

use driftline_store::testing::{MemoryDisk, correct_record_file};
use driftline_store::{Backend, SnapshotState};
use libfuzzer_sys::fuzz_target;

fn check(bytes: &[u8]) {
    let disk = MemoryDisk::default();
    disk.put("state", bytes.to_vec());
    let read = || SnapshotState::with_file(&*disk.open("state").unwrap(), Path::new("state"));
    let Ok(state) = read() else { return };
    let encoded = state.encode().unwrap();
    // The file may have optional features and records, which are skipped.
    assert!(encoded.len() <= bytes.len());
    disk.put("state", encoded);
    assert_eq!(read().unwrap(), state);
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    let mut corrected = bytes.to_vec();
    correct_record_file(&mut corrected);
    check(&corrected);
});
