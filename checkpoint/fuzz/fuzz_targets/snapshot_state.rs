//! Fuzzes the state file of a snapshot, with arbitrary bytes as they are and with corrected
//! checksums: it is refused, or it is not shorter than its content encodes to.
#![no_main]

use std::path::Path;

use driftline_store::testing::{MemoryDisk, correct_record_file};
use driftline_store::{Backend, MemoryFileLayout, SnapshotState};
use libfuzzer_sys::fuzz_target;

fn check(bytes: &[u8]) {
    let disk = MemoryDisk::default();
    disk.put("state", bytes.to_vec());
    let file = disk.open("state").unwrap();
    let Ok(state) = SnapshotState::with_file(&*file, Path::new("state")) else { return };
    let again = state.encode().unwrap();
    // The file may have optional features and records, which are skipped.
    assert!(again.len() <= bytes.len());
    let layout = MemoryFileLayout::new(&state.layout);
    let end = layout.slots().last().map(|place| place.offset + place.slot.run().bytes());
    assert_eq!(end, Some(layout.bytes()));
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    let mut corrected = bytes.to_vec();
    correct_record_file(&mut corrected);
    check(&corrected);
});
