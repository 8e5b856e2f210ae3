//! An epoch file of arbitrary bytes: refused or restored, never a panic.
#![no_main]

use checkpoint::testing::{MemoryDisk, MemoryGuestFactory, reseal};
use checkpoint::{Clock, RestoreError, Store, restore};
use libfuzzer_sys::fuzz_target;

fn check(bytes: Vec<u8>) {
    // The header names the epoch; the file has to have that name to get past it.
    let epoch = bytes.get(48..56).map_or(1, |e| u64::from_le_bytes(e.try_into().unwrap())).max(1);
    let disk = MemoryDisk::default();
    disk.put(&format!("epoch-{epoch:020}.dl"), bytes);
    let store = Store::with_backend(Box::new(disk), false).unwrap();
    let verified = store.verify(|_, _| ()).is_ok();
    let restored = restore(&store, None, &MemoryGuestFactory::default(), Clock::Continue);
    match restored {
        Err(RestoreError::Store(e)) => assert!(!verified, "verified, but {e}"),
        Ok(_) => assert!(verified),
        Err(_) => {}
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes.to_vec());
    let mut sealed = bytes.to_vec();
    reseal(&mut sealed);
    check(sealed);
});
