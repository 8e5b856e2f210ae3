//! Blocks that are copied in a pause, because writes may not wait, have the content of that
//! instant, in memory or in the file.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, TestDisk};
use driftline_guest::{Clock, Stateful, VmId};
use driftline_store::testing::MemoryDisk;
use driftline_store::{Committer, EpochWriter, Store};

use super::*;
use crate::epoch_drives::drives_of;
use crate::restore;
use crate::staging::StagingLimits;

/// Two drives: one with more blocks than can be saved, one with a partial last block.
const SIZES: [u64; 2] = [5000 * PAGE_SIZE, 2000 * PAGE_SIZE + 512];

fn disks() -> Vec<Arc<TestDisk>> {
    let named = SIZES.iter().zip(["one", "two"]);
    named.map(|(bytes, id)| TestDisk::new(id, *bytes).unwrap()).collect()
}

#[test]
fn blocks_copied_in_the_pause_are_stored() {
    // In blocks: as little memory as possible, enough for a part of one drive, enough for all.
    for room in [0, 100, 4500, 10_000] {
        let guest =
            MemoryGuest::with_disks(VmId::random(), MemoryConfig::still(), disks()).unwrap();
        let disk = MemoryDisk::default();
        let store = Arc::new(Store::with_backend(Box::new(disk.clone()), true).unwrap());
        let mut committer = Committer::create(&store, &*guest).unwrap();
        let heads = drives_of(&*guest);
        let pages = committer.pages().clone();
        let mut file = EpochWriter::new(pages, 1, &*guest, None, heads.clone()).unwrap();
        let mut drives = EpochDrives::track(&*guest, &heads).unwrap();
        for (disk, bytes) in guest.disks().iter().zip(SIZES) {
            let numbered = (0u64..).flat_map(|n| (n | 1 << 32).to_le_bytes()).take(bytes as usize);
            disk.write(0, &numbered.collect::<Vec<u8>>()).unwrap();
            disk.discard(7 * PAGE_SIZE, 1200 * PAGE_SIZE).unwrap();
        }
        let was: Vec<Vec<u8>> = guest.disks().iter().map(|d| d.contents().unwrap()).collect();
        let pause_blocks_bytes = room * PAGE_SIZE as usize;
        let policy = CopyPolicy { pause_blocks_bytes, ..CopyPolicy::DEFAULT };
        let mut copy = DiskCopy::new(&mut drives, &policy, false);
        copy.begin(&mut file).unwrap();
        // No write waits: no copy thread runs.
        for (disk, bytes) in guest.disks().iter().zip(SIZES) {
            disk.write(0, &vec![9; bytes as usize]).unwrap();
        }
        let mut staging = Staging::new(StagingLimits::default());
        let (changed, waits) = copy.finish(&mut staging, &mut file).unwrap();
        assert_eq!(changed.iter().map(DirtySet::frames).sum::<u64>(), 7001);
        assert_eq!(waits.times, 0);
        for section in guest.save_state().unwrap() {
            file.section(&section).unwrap();
        }
        committer.commit(file.finish()).unwrap();
        drop((committer, store));
        let store = Store::with_backend(Box::new(disk), false).unwrap();
        let factory = MemoryGuestFactory { disks: disks(), ..Default::default() };
        let (_, report) = restore(&store, None, &factory, Clock::Continue).unwrap();
        assert_eq!(report.disk_blocks, 7001 - 2 * 1200);
        for (copy, was) in factory.disks.iter().zip(was) {
            assert!(copy.contents().unwrap() == was, "{room}: {}", copy.head());
        }
    }
}
