//! Fuzzes an archive of arbitrary bytes, as they are and with corrected checksums: it is refused or
//! restored, and nothing panics.
#![no_main]

use std::path::Path;

use driftline_checkpoint::{RestoreError, restore_archive};
use driftline_guest::Clock;
use driftline_guest::testing::{MemoryGuestFactory, TestDisk};
use driftline_store::testing::{MemoryDisk, correct_record_file};
use driftline_store::{Archive, Backend};
use libfuzzer_sys::fuzz_target;

/// Returns a factory with the drives of the golden archive that has drives.
fn factory() -> MemoryGuestFactory {
    let drives = [("disk0", 20 * 4096 + 512), ("data", 4 * 4096)];
    let disks = drives.map(|(id, bytes)| TestDisk::new(id, bytes).unwrap()).to_vec();
    MemoryGuestFactory { disks, ..Default::default() }
}

/// Checks that an archive that verifies can be restored, unless the guest refuses it. One that
/// neither verifies nor restores leaves the drives as they are.
fn check(bytes: &[u8]) {
    let disk = MemoryDisk::default();
    disk.put("archive", bytes.to_vec());
    let file = disk.open("archive").unwrap();
    let Ok(archive) = Archive::with_file(file, Path::new("archive")) else { return };
    let verified = archive.verify();
    let factory = factory();
    let restored = restore_archive(&archive, &factory, Clock::Continue);
    match (verified, restored) {
        (Ok(_), Err(RestoreError::Store(e))) => panic!("verified, but {e}"),
        (Ok(_), _) | (Err(_), Ok(_)) => {}
        (Err(_), Err(_)) => {
            for disk in &factory.disks {
                assert!(disk.contents().unwrap().iter().all(|byte| *byte == 0), "written to");
            }
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    let mut corrected = bytes.to_vec();
    correct_record_file(&mut corrected);
    check(&corrected);
});
