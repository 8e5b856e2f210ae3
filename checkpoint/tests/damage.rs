//! Every flipped byte, every truncation: refused, with the file and the place.
#![allow(clippy::panic, clippy::unwrap_used)]

use checkpoint::testing::{MemoryConfig, MemoryDisk, MemoryGuest, MemoryGuestFactory, reseal};
use checkpoint::{Checkpointer, Clock, Guest, RestoreError, Store, StoreError, VmId, restore};
use dirty_tracker::{Gfn, Slot, SlotId};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

/// Three epochs of a guest of eight frames: contents, zeros, state.
fn small_store() -> MemoryDisk {
    let slots = vec![
        Slot { id: SlotId(0), base: Gfn(0), frames: 4 },
        Slot { id: SlotId(1), base: Gfn(0x100), frames: 4 },
    ];
    let config = MemoryConfig { slots, writers: 1, working_set: 1, writes_per_s: 1, seed: 3 };
    let guest = MemoryGuest::new(VmId::random(), config).unwrap();
    let disk = MemoryDisk::default();
    let store = Store::with_backend(Box::new(disk.clone()), true).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    for (gfn, byte) in [(0x101u64, 7u8), (0x101, 0), (2, 9)] {
        guest.ram().write_slice(&[byte; 4096], GuestAddress(gfn * 4096)).unwrap();
        checkpointer.take().unwrap();
    }
    disk
}

fn name(epoch: u64) -> String {
    format!("epoch-{epoch:020}.dl")
}

/// What `verify` and `restore` of the latest epoch say about a damaged disk; both must refuse.
fn refusals(disk: &MemoryDisk) -> [StoreError; 2] {
    let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
    let factory = MemoryGuestFactory::default();
    let restored = restore(&store, None, &factory, Clock::Continue).unwrap_err();
    let RestoreError::Store(restored) = restored else { panic!("not the store: {restored}") };
    [store.verify(|_, _| ()).unwrap_err(), restored]
}

/// Checks that `refusal` names `epoch`'s file and a place at or before `at`, within one record.
fn names_the_place(refusal: &StoreError, epoch: u64, at: u64) {
    let StoreError::Damaged { file, offset, .. } = refusal else { panic!("{refusal}") };
    assert!(file.ends_with(name(epoch)), "{refusal}; the damage is at {at} of epoch {epoch}");
    assert!(*offset <= at && at - offset < 3 * 4096, "{refusal}; the damage is at {at}");
    let message = refusal.to_string();
    assert!(message.contains(&name(epoch)) && message.contains(&format!("byte {offset}")));
}

#[test]
fn a_flipped_bit_in_any_byte_is_refused_by_verify_and_restore() {
    let disk = small_store();
    for epoch in 1..=3 {
        let sound = disk.contents(&name(epoch)).unwrap();
        for at in 0..sound.len() {
            // Every bit of the front and the end, one of each byte between.
            let edge = at < 300 || at + 200 > sound.len();
            let bits = if edge { 0..8 } else { at % 8..at % 8 + 1 };
            for bit in bits {
                let mut bent = sound.clone();
                bent[at] ^= 1 << bit;
                disk.put(&name(epoch), bent);
                for refusal in refusals(&disk) {
                    names_the_place(&refusal, epoch, at as u64);
                }
            }
        }
        disk.put(&name(epoch), sound);
    }
    let store = Store::with_backend(Box::new(disk), false).unwrap();
    assert_eq!(store.verify(|_, _| ()).unwrap().epochs, 3, "undamaged again");
}

#[test]
fn a_file_cut_at_any_length_or_grown_is_refused() {
    let disk = small_store();
    for epoch in 1..=3 {
        let sound = disk.contents(&name(epoch)).unwrap();
        for len in 0..sound.len() {
            disk.put(&name(epoch), sound[..len].to_vec());
            for refusal in refusals(&disk) {
                names_the_place(&refusal, epoch, len as u64);
            }
        }
        for more in [1, 24, 64, 4096] {
            let mut grown = sound.clone();
            grown.resize(sound.len() + more, 0);
            disk.put(&name(epoch), grown);
            refusals(&disk);
        }
        let mut doubled = sound.clone();
        doubled.extend_from_slice(&sound[sound.len() - 64..]);
        disk.put(&name(epoch), doubled);
        refusals(&disk);
        disk.put(&name(epoch), sound);
    }
}

#[test]
fn exchanged_files_are_refused() {
    let disk = small_store();
    let files: Vec<_> = (1..=3).map(|n| disk.contents(&name(n)).unwrap()).collect();
    for (a, b) in [(1, 2), (1, 3), (2, 3)] {
        disk.put(&name(a), files[b as usize - 1].clone());
        disk.put(&name(b), files[a as usize - 1].clone());
        for refusal in refusals(&disk) {
            assert!(refusal.to_string().contains("the epoch in the header is"), "{refusal}");
        }
        disk.put(&name(a), files[a as usize - 1].clone());
        disk.put(&name(b), files[b as usize - 1].clone());
    }
}

/// Whatever the bytes: no panic, no huge allocation, and nothing that verifies but does not restore
/// for a reason that is the store's.
fn survives(bytes: Vec<u8>) {
    let disk = MemoryDisk::default();
    disk.put(&name(1), bytes);
    let store = Store::with_backend(Box::new(disk), false).unwrap();
    let verified = store.verify(|_, _| ());
    let restored = restore(&store, None, &MemoryGuestFactory::default(), Clock::Continue);
    if verified.is_ok() {
        assert!(!matches!(restored, Err(RestoreError::Store(_))), "{restored:?}");
    } else {
        restored.unwrap_err();
    }
}

#[test]
fn resealing_changes_nothing_in_a_sound_file() {
    let disk = small_store();
    for epoch in 1..=3 {
        let sound = disk.contents(&name(epoch)).unwrap();
        let mut resealed = sound.clone();
        reseal(&mut resealed);
        assert_eq!(resealed, sound);
    }
}

/// A record without a checksum; `reseal` makes one.
fn record(tag: u16, payload: &[u64]) -> Vec<u8> {
    let mut bytes = vec![0; 24];
    bytes[..2].copy_from_slice(&tag.to_le_bytes());
    bytes[2] = 1;
    bytes[8..12].copy_from_slice(&(payload.len() as u32 * 8).to_le_bytes());
    bytes.extend(payload.iter().flat_map(|word| word.to_le_bytes()));
    bytes
}

/// What both readers say of the first epoch with `records` in front of its trailer.
fn refused_with(records: &[Vec<u8>]) -> String {
    let disk = small_store();
    let mut bytes = disk.contents(&name(1)).unwrap();
    let trailer = bytes.split_off(bytes.len() - 64);
    records.iter().for_each(|record| bytes.extend_from_slice(record));
    bytes.extend(trailer);
    reseal(&mut bytes);
    // Alone: the digest that its children know is another now.
    let alone = MemoryDisk::default();
    alone.put(&name(1), bytes);
    let [verified, restored] = refusals(&alone).map(|refusal| refusal.to_string());
    assert_eq!(verified, restored);
    verified
}

#[test]
fn a_file_cannot_make_the_reader_write_the_same_frames_without_end() {
    const ZEROS: u16 = 0x8004;
    let (overlap, descend) = (record(ZEROS, &[2, 0, 3, 2, 1]), record(ZEROS, &[2, 0x100, 1, 0, 1]));
    for records in [overlap, descend] {
        let e = refused_with(&[records]);
        assert!(e.ends_with("; the runs of a record ascend"), "{e}");
    }
    let all = record(ZEROS, &[2, 0, 4, 0x100, 4]);
    let e = refused_with(&vec![all; 9]);
    assert!(e.contains("frames of zeros up to here, more than the 64 allowed"), "{e}");
}

#[test]
fn every_field_that_the_format_fixes_is_checked() {
    let sound = small_store().contents(&name(1)).unwrap();
    // Where the records begin: PARENT, LAYOUT, CONFIGURATION, the first of the rest.
    let mut at = vec![64];
    while at.len() < 4 {
        let last = at[at.len() - 1];
        let length = u32::from_le_bytes(sound[last + 8..last + 12].try_into().unwrap());
        at.push(last + 24 + length as usize);
    }
    let (parent, layout, config, frames) = (at[0], at[1], at[2], at[3]);
    assert_eq!(sound[frames..frames + 2], [3, 0x80], "FRAMES comes next");
    let mut cases: Vec<(usize, u8, &str)> = vec![
        (10, 65, "its header claims 65 bytes; a header of this version has 64"),
        (parent + 24 + 8, 1, "the parent's digest in a full epoch is 1 and should be 0"),
        (parent + 24 + 12, 1, "the unused field of the parent link is 1 and should be 0"),
        (layout + 24 + 4, 1, "the unused field of a memory slot is 1 and should be 0"),
        (layout + 24 + 28, 1, "the unused field of a memory slot is 1 and should be 0"),
        (layout + 24 + 10, 9, "a memory slot at frame 0x100 stands behind one at 0x90000"),
        (frames + 24, 0, "a record of frames has no runs"),
    ];
    for record in [parent, layout, config, frames, sound.len() - 64] {
        cases.extend([
            (record + 2, 3, "the undefined part of a record's flags is 2 and should be 0"),
            (record + 2, 0, "the flag that a record must be understood is 0 and should be 1"),
            (record + 4, 7, "the instance of a record that has none is 7"),
            (record + 6, 1, "the unused field of a record's head is 1 and should be 0"),
        ]);
    }
    for (at, byte, expected) in cases {
        let mut bytes = sound.clone();
        bytes[at] = byte;
        reseal(&mut bytes);
        let disk = MemoryDisk::default();
        disk.put(&name(1), bytes);
        for refusal in refusals(&disk) {
            let e = refusal.to_string();
            assert!(e.contains(expected), "byte {at} set to {byte}: {e}, not {expected}");
        }
    }
    assert!(refused_with(&[record(0x8004, &[0])]).ends_with("a record of frames has no runs"));
    let e = refused_with(&[record(2, &vec![0; (4 << 17) + 1])]);
    assert!(e.ends_with("tag 2 claims 4194312 bytes, more than the 4194304 allowed"), "{e}");
    assert!(refused_with(&[record(0, &[0])]).ends_with("a record of tag 0x0000 has no place here"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn hostile_files_with_right_checksums_are_survived(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        in_front in any::<bool>(),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let sound = SMALL.with(Clone::clone);
        let mut bytes = sound.clone();
        for (at, byte) in changes {
            let among = if in_front { bytes.len().min(420) } else { bytes.len() };
            bytes[at.index(among)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        reseal(&mut bytes);
        survives(bytes);
    }

    #[test]
    fn noise_is_survived(mut bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        survives(bytes.clone());
        reseal(&mut bytes);
        survives(bytes);
    }
}

thread_local! {
    static SMALL: Vec<u8> = small_store().contents(&name(1)).unwrap();
}
