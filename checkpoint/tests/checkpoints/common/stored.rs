//! A store of a small guest that several processes have written, and memory at each checkpoint.

use std::collections::BTreeMap;
use std::sync::Arc;

use driftline_checkpoint::{Checkpointer, restore};
use driftline_dirty_tracker::{Gfn, PAGE_SIZE, Slot, SlotId};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, image};
use driftline_guest::{Clock, GuestContents, VmId};
use driftline_store::testing::MemoryDisk;
use driftline_store::{RepairReport, Store, StoreError};
use vm_memory::{Bytes, GuestAddress};

pub const FRAMES: u64 = 16;

pub fn guest(vm_id: VmId) -> Arc<MemoryGuest> {
    let slots = vec![Slot { id: SlotId(0), base: Gfn(0), frames: FRAMES }];
    let config = MemoryConfig { slots, writers: 1, working_set: 1, writes_per_s: 1, seed: 3 };
    let guest = MemoryGuest::new(vm_id, config).unwrap();
    // A section that spans several sectors, some of which hold nothing else.
    guest.set_extra_state(1500);
    guest
}

pub fn write(guest: &MemoryGuest, gfn: u64, byte: u8) {
    guest.ram().write_slice(&[byte; 4096], GuestAddress(gfn * PAGE_SIZE)).unwrap();
}

pub fn open(disk: &MemoryDisk, writable: bool) -> Store {
    Store::with_backend(Box::new(disk.clone()), writable).unwrap()
}

pub fn restored(disk: &MemoryDisk, epoch: u64) -> Vec<u8> {
    let factory = MemoryGuestFactory::default();
    image(&restore(&open(disk, false), Some(epoch), &factory, Clock::Continue).unwrap().0)
}

pub fn numbers(disk: &MemoryDisk) -> Vec<u64> {
    open(disk, false).epochs().unwrap().iter().map(|e| e.epoch).collect()
}

/// A store, its guest, and memory at each kept checkpoint.
pub struct StoreFixture {
    pub disk: MemoryDisk,
    pub guest: Arc<MemoryGuest>,
    pub taken: BTreeMap<u64, Vec<u8>>,
    /// Includes dropped checkpoints.
    pub all: BTreeMap<u64, Vec<u8>>,
}

/// Creates a store: each process takes the given number of checkpoints, the first of them full;
/// `keep` of them are kept.
pub fn stored(processes: &[u64], keep: u64) -> StoreFixture {
    let (disk, guest) = (MemoryDisk::default(), guest(VmId::random()));
    let mut taken = BTreeMap::new();
    let mut byte = 0;
    for count in processes {
        let mut checkpointer = Checkpointer::new(guest.clone(), open(&disk, true)).unwrap();
        checkpointer.keep(Some(keep));
        for _ in 0..*count {
            byte += 1;
            write(&guest, u64::from(byte) * 5 % FRAMES, byte);
            write(&guest, u64::from(byte) * 7 % FRAMES, if byte % 3 == 0 { 0 } else { byte });
            taken.insert(checkpointer.take().unwrap().epoch, image(&guest));
        }
    }
    let kept = numbers(&disk);
    let all = taken.clone();
    taken.retain(|epoch, _| kept.contains(epoch));
    StoreFixture { disk, guest, taken, all }
}

/// Returns the sectors in which epochs begin.
pub fn begins(log: &[u8]) -> Vec<usize> {
    (1..log.len() / 512).filter(|n| log[n * 512..n * 512 + 2] == [0x11, 0x80]).collect()
}

/// Returns another disk, with a bit of this sector of the log flipped, or all of it lost.
pub fn with_bad_sector(disk: &MemoryDisk, sector: usize, lost: bool) -> MemoryDisk {
    let disk = disk.copy();
    let mut log = disk.contents("log-1").unwrap();
    match lost {
        true => log[sector * 512..(sector + 1) * 512].fill(0),
        false => log[sector * 512 + sector % 512] ^= 4,
    }
    disk.put("log-1", log);
    disk
}

pub fn repair(disk: &MemoryDisk) -> Result<RepairReport, StoreError> {
    Store::with_backend_to_repair(Box::new(disk.clone()))?.repair()
}
