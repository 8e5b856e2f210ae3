//! A store of a guest of eight frames, and the positions of the records in its log.

use std::sync::Arc;

use driftline_checkpoint::Checkpointer;
use driftline_dirty_tracker::{Gfn, Slot, SlotId};
use driftline_guest::testing::{MemoryConfig, MemoryGuest};
use driftline_guest::{GuestContents, VmId};
use driftline_store::Store;
use driftline_store::testing::MemoryDisk;
use vm_memory::{Bytes, GuestAddress};

pub const MANIFEST: &str = "manifest";
pub const LOG: &str = "log-1";
pub const PAGES: &str = "pages-1";

pub fn guest(vm_id: VmId) -> Arc<MemoryGuest> {
    let slots = vec![
        Slot { id: SlotId(0), base: Gfn(0), frames: 4 },
        Slot { id: SlotId(1), base: Gfn(0x100), frames: 4 },
    ];
    let config = MemoryConfig { slots, writers: 1, working_set: 1, writes_per_s: 1, seed: 3 };
    MemoryGuest::new(vm_id, config).unwrap()
}

fn store_of(guest: &Arc<MemoryGuest>, writes: [(u64, u8); 3]) -> MemoryDisk {
    let disk = MemoryDisk::default();
    let store = Store::with_backend(Box::new(disk.clone()), true).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    for (gfn, byte) in writes {
        guest.ram().write_slice(&[byte; 4096], GuestAddress(gfn * 4096)).unwrap();
        checkpointer.take().unwrap();
    }
    disk
}

/// Creates a store of three epochs: contents, zeros, contents.
pub fn small_store() -> MemoryDisk {
    store_of(&guest(VmId::random()), [(0x101, 7), (0x101, 0), (2, 9)])
}

/// Creates two stores of one guest, whose second epochs have frames of different contents.
#[allow(dead_code, reason = "not every test has use for it")]
pub fn two_stores() -> (MemoryDisk, MemoryDisk) {
    let guest = guest(VmId::random());
    let one = store_of(&guest, [(0x101, 7), (1, 1), (2, 9)]);
    (one, store_of(&guest, [(0x101, 7), (1, 2), (2, 9)]))
}

/// Returns the first byte and the tag of each record of a sound log.
#[allow(dead_code, reason = "not every test has use for it")]
pub fn records(log: &[u8]) -> Vec<(usize, u16)> {
    let data: Vec<u8> =
        log.chunks(512).skip(1).flat_map(|sector| &sector[..508]).copied().collect();
    let place = |at: usize| 512 + at / 508 * 512 + at % 508;
    let (mut at, mut found) = (0, Vec::new());
    while at + 24 <= data.len() {
        let tag = u16::from_le_bytes([data[at], data[at + 1]]);
        let length = u32::from_le_bytes(data[at + 8..at + 12].try_into().unwrap());
        found.push((place(at), tag));
        at += 24 + length as usize;
        if tag == 0x80ff {
            at = at.next_multiple_of(508);
        }
    }
    found
}
