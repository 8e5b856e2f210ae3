//! Drives in the epochs of a guest: stored with memory, of the same instant, and restored together
//! with it.

mod archives;
mod epochs;
mod instant;
mod moved;
mod restores;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use driftline_checkpoint::{
    Checkpointer, EpochFailure, EpochStep, FollowedWrites, RestoreError, restore, restore_archive,
    restore_lazily,
};
use driftline_dirty_tracker::{Gfn, PAGE_SIZE};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, TestDisk};
use driftline_guest::{Clock, RunState, VmId};
use driftline_store::testing::MemoryDisk;
use driftline_store::{Archive, Backend, Store};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

const BLOCK: usize = PAGE_SIZE as usize;
/// Two drives; the first has a partial block, and enough blocks for the runs of several records.
const SIZES: [u64; 2] = [150 * PAGE_SIZE + 1536, 7 * PAGE_SIZE];

fn disks() -> Vec<Arc<TestDisk>> {
    let named = SIZES.iter().zip(["one", "two"]);
    named.map(|(bytes, id)| TestDisk::new(id, *bytes).unwrap()).collect()
}

fn guest() -> Arc<MemoryGuest> {
    MemoryGuest::with_disks(VmId::random(), MemoryConfig::still(), disks()).unwrap()
}

/// Creates a factory for the restore: its disks hold other data.
fn elsewhere() -> MemoryGuestFactory {
    let disks = disks();
    for disk in &disks {
        disk.write(0, &vec![0xee; disk.head().bytes as usize]).unwrap();
    }
    MemoryGuestFactory { disks, ..Default::default() }
}

fn contents(disks: &[Arc<TestDisk>]) -> Vec<Vec<u8>> {
    disks.iter().map(|disk| disk.contents().unwrap()).collect()
}

fn on(disk: &MemoryDisk, writable: bool) -> Store {
    Store::with_backend(Box::new(disk.clone()), writable).unwrap()
}

/// Ends the thread that writes for the guest on drop, even if the test fails, which would otherwise
/// hang.
struct EndWriterOnDrop<'a>(&'a AtomicBool);

impl Drop for EndWriterOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn restored(disk: &MemoryDisk, epoch: u64, lazily: bool) -> Vec<Vec<u8>> {
    let (store, factory) = (on(disk, false), elsewhere());
    let report = match lazily {
        true => restore_lazily(&store, Some(epoch), &factory, Clock::Continue).unwrap().1,
        false => restore(&store, Some(epoch), &factory, Clock::Continue).unwrap().1,
    };
    assert_eq!((report.epoch, report.drives), (epoch, 2));
    contents(&factory.disks)
}
