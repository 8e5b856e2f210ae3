//! Stores with damage: what of it is in nobody's way, and what repair makes of the rest.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use checkpoint::testing::{MemoryConfig, MemoryDisk, MemoryGuest, MemoryGuestFactory};
use checkpoint::{Checkpointer, Clock, Guest, Store, VmId, restore};
use dirty_tracker::{Gfn, PAGE_SIZE, Slot, SlotId};
use vm_memory::{Bytes, GuestAddress};

const FRAMES: u64 = 16;

fn guest(vm_id: VmId) -> Arc<MemoryGuest> {
    let slots = vec![Slot { id: SlotId(0), base: Gfn(0), frames: FRAMES }];
    let config = MemoryConfig { slots, writers: 1, working_set: 1, writes_per_s: 1, seed: 3 };
    MemoryGuest::new(vm_id, config).unwrap()
}

fn write(guest: &MemoryGuest, gfn: u64, byte: u8) {
    guest.ram().write_slice(&[byte; 4096], GuestAddress(gfn * PAGE_SIZE)).unwrap();
}

fn image(guest: &MemoryGuest) -> Vec<u8> {
    let mut image = vec![0; (FRAMES * PAGE_SIZE) as usize];
    guest.ram().read_slice(&mut image, GuestAddress(0)).unwrap();
    image
}

fn open(disk: &MemoryDisk, writable: bool) -> Store {
    Store::with_backend(Box::new(disk.clone()), writable).unwrap()
}

fn restored(disk: &MemoryDisk, epoch: u64) -> Vec<u8> {
    let factory = MemoryGuestFactory::default();
    image(&restore(&open(disk, false), Some(epoch), &factory, Clock::Continue).unwrap().0)
}

fn numbers(disk: &MemoryDisk) -> Vec<u64> {
    open(disk, false).epochs().unwrap().iter().map(|e| e.epoch).collect()
}

/// A store, its guest, and memory at each checkpoint that is kept.
struct Stored {
    disk: MemoryDisk,
    guest: Arc<MemoryGuest>,
    taken: BTreeMap<u64, Vec<u8>>,
}

/// Each process takes so many checkpoints, the first of them with all of memory; so many are kept.
fn stored(processes: &[u64], keep: u64) -> Stored {
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
    taken.retain(|epoch, _| kept.contains(epoch));
    Stored { disk, guest, taken }
}

/// The sectors in which epochs begin.
fn begins(log: &[u8]) -> Vec<usize> {
    (1..log.len() / 512).filter(|n| log[n * 512..n * 512 + 2] == [0x11, 0x80]).collect()
}

/// Another disk, with a bit of this sector of the log flipped, or all of it lost.
fn with_bad_sector(disk: &MemoryDisk, sector: usize, lost: bool) -> MemoryDisk {
    let disk = disk.copy();
    let mut log = disk.contents("log-1").unwrap();
    match lost {
        true => log[sector * 512..(sector + 1) * 512].fill(0),
        false => log[sector * 512 + sector % 512] ^= 4,
    }
    disk.put("log-1", log);
    disk
}

#[test]
fn damage_of_dropped_epochs_forbids_no_new_ones() {
    let Stored { disk, guest, taken } = stored(&[3, 3, 4], 3);
    let log = disk.contents("log-1").unwrap();
    let begins = begins(&log);
    assert_eq!((begins.len(), taken.len()), (10, 3));
    // The full epoch that the first process behind them has taken.
    for sector in 1..begins[6] {
        for lost in [false, true] {
            let disk = with_bad_sector(&disk, sector, lost);
            assert_eq!(numbers(&disk), [8, 9, 10], "sector {sector}");
            open(&disk, false).verify(|_, _| ()).unwrap();
            write(&guest, 1, sector as u8);
            let mut checkpointer = Checkpointer::new(guest.clone(), open(&disk, true)).unwrap();
            let epoch = checkpointer.take().unwrap().epoch;
            assert_eq!(restored(&disk, epoch), image(&guest), "sector {sector}");
            for (epoch, memory) in &taken {
                assert!(restored(&disk, *epoch) == *memory, "epoch {epoch}, sector {sector}");
            }
            assert!(disk.contents("log-1").is_err(), "the log was written anew without it");
        }
    }
}

#[test]
fn damage_of_a_kept_epoch_names_it_and_repair() {
    let Stored { disk, guest, .. } = stored(&[3, 3, 4], 3);
    let log = disk.contents("log-1").unwrap();
    let begins = begins(&log);
    // Epoch 7 is dropped, but has all of memory that those behind it build on.
    for sector in begins[6]..log.len() / 512 {
        let disk = with_bad_sector(&disk, sector, false);
        let refused = Checkpointer::new(guest.clone(), open(&disk, true));
        let refused = refused.map(|mut c| c.take().map(drop).err());
        let message = match refused {
            Ok(Some(e)) => e.to_string(),
            Ok(None) => panic!("sector {sector} is damaged, and a checkpoint was taken"),
            Err(e) => e.to_string(),
        };
        let nth = begins.partition_point(|begin| *begin <= sector);
        let begin_is_sound = sector > begins[nth - 1] + 2;
        assert!(message.contains("driftline store repair /memory-disk"), "{message}");
        if begin_is_sound {
            assert!(message.contains(&format!("checkpoint {nth} is damaged")), "{message}");
        }
    }
}
