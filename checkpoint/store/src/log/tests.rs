//! A log that is read again reflects the file's current content.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use driftline_dirty_tracker::PAGE_SIZE;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::backend::Backend;
use crate::epoch_taker::EpochTaker;
use crate::testing::MemoryDisk;
use driftline_guest::GuestContents;
use driftline_guest::testing::{MemoryConfig, MemoryGuest};

const LOG: &str = "log-1";

fn store(disk: &MemoryDisk, writable: bool) -> Store {
    Store::with_backend(Box::new(disk.clone()), writable).unwrap()
}

/// Takes one more epoch, by a process of its own, in which this many frames are full of `byte`.
fn grow(disk: &MemoryDisk, guest: &Arc<MemoryGuest>, frames: u64, byte: u8) {
    for n in 0..frames {
        guest.ram().write_slice(&[byte; 4096], GuestAddress(n * PAGE_SIZE)).unwrap();
    }
    EpochTaker::new(guest.clone(), store(disk, true)).take();
}

/// Returns what a reader knows of the log.
fn known(log: &LogFile) -> (Vec<EpochInfo>, LogPosition) {
    (log.epochs.iter().map(|epoch| epoch.info).collect(), log.end)
}

/// Checks that a reader of `before` that reads again when the log is `after` knows the same as
/// a new reader.
fn check(disk: &MemoryDisk, before: &[u8], after: &[u8]) {
    let file = disk.open_for_writing(LOG).unwrap();
    let put = |bytes: &[u8]| {
        file.truncate(0).unwrap();
        file.write_all_at(bytes, 0).unwrap();
    };
    put(before);
    let store = store(disk, false);
    let mut log = LogFile::open(&store, 1).unwrap();
    put(after);
    log.read_appended().unwrap();
    assert_eq!(known(&log), known(&LogFile::open(&store, 1).unwrap()));
    assert!(log.take_damage().is_none());
    // Checks it once more, with what was appended since.
    log.read_appended().unwrap();
    assert_eq!(known(&log), known(&LogFile::open(&store, 1).unwrap()));
}

#[test]
fn reread_log_equals_a_fresh_read() {
    let vm_id = VmId::random();
    let guest = || MemoryGuest::new(vm_id, MemoryConfig::still()).unwrap();
    // The last record ends anywhere in a sector, or at the beginning of the next one.
    for frames in 1..=140 {
        let one = MemoryDisk::default();
        grow(&one, &guest(), 1, 1);
        let first = one.contents(LOG).unwrap();
        let other = one.copy();
        grow(&one, &guest(), frames, 2);
        grow(&other, &guest(), frames, 3);
        let [second, instead] = [&one, &other].map(|disk| disk.contents(LOG).unwrap());
        assert_ne!(second, instead, "they were taken at other moments, at least");
        grow(&other, &guest(), 1, 4);
        let third = other.contents(LOG).unwrap();
        for (before, after) in [
            (&first, &second),
            (&second, &second),
            (&second, &first),
            (&second, &instead),
            (&second, &third),
            (&instead, &third),
        ] {
            check(&other, before, after);
        }
    }
}

#[test]
fn forgotten_epochs_are_found_again() {
    let disk = MemoryDisk::default();
    let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
    (1..=3).for_each(|byte| grow(&disk, &guest, 2, byte));
    let store = store(&disk, false);
    let whole = known(&LogFile::open(&store, 1).unwrap());
    for epoch in 0..=3 {
        let mut log = LogFile::open(&store, 1).unwrap();
        log.forget_after(epoch);
        assert_eq!(log.epochs.len() as u64, epoch);
        log.read_appended().unwrap();
        assert_eq!(known(&log), whole);
    }
}
