//! An archive of arbitrary bytes: as they are, and with checksums made right. Refused or restored, never a panic.
#![no_main]

use std::path::Path;

use checkpoint::testing::{MemoryDisk, MemoryGuestFactory, reseal_archive};
use checkpoint::{Archive, Backend, Clock, RestoreError, restore_archive};
use libfuzzer_sys::fuzz_target;

/// What verifies restores, but for what the guest says to it.
fn check(bytes: &[u8]) {
    let disk = MemoryDisk::default();
    disk.put("archive", bytes.to_vec());
    let file = disk.open("archive").unwrap();
    let Ok(archive) = Archive::with_file(file, Path::new("archive")) else { return };
    let verified = archive.verify();
    let restored = restore_archive(&archive, &MemoryGuestFactory::default(), Clock::Continue);
    if let (Ok(_), Err(RestoreError::Store(e))) = (verified, restored) {
        panic!("verified, but {e}");
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    let mut sealed = bytes.to_vec();
    reseal_archive(&mut sealed);
    check(&sealed);
});
