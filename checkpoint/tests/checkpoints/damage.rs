//! Every flipped byte and every truncation is refused, with the file and the place.

use crate::common::small::{self, LOG, MANIFEST, PAGES, small_store};
use driftline_checkpoint::{Checkpointer, RestoreError, restore};
use driftline_dirty_tracker::{Gfn, Slot, SlotId};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, TestDisk, repeats};
use driftline_guest::{Clock, GuestContents, VmId};
use driftline_store::testing::{MemoryDisk, correct_log, correct_manifest, correct_pages};
use driftline_store::{Damage, Store, StoreError};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

/// Returns the results of `verify` and of `restore` of the latest epoch.
fn outcomes(disk: &MemoryDisk) -> [Result<(), StoreError>; 2] {
    let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
    let factory = MemoryGuestFactory::default();
    let restored = match restore(&store, None, &factory, Clock::Continue) {
        Ok(_) => Ok(()),
        Err(RestoreError::Store(e)) => Err(e),
        Err(e) => panic!("not the store: {e}"),
    };
    [store.verify(|_, _| ()).map(drop), restored]
}

/// Returns the errors of both, which must refuse.
fn refusals(disk: &MemoryDisk) -> [StoreError; 2] {
    outcomes(disk).map(|outcome| outcome.unwrap_err())
}

/// Checks that `refusal` names the file and a place at or before `at`, within one slot.
fn names_the_place(refusal: &StoreError, name: &str, at: u64) {
    let StoreError::Damaged { file, offset, .. } = refusal else { panic!("{refusal}") };
    assert!(file.ends_with(name), "{refusal}; the damage is at {at} of {name}");
    assert!(*offset <= at && at - offset < 4096, "{refusal}; the damage is at {at}");
    let message = refusal.to_string();
    assert!(message.contains(name) && message.contains(&format!("byte {offset}")));
}

#[test]
fn every_flipped_bit_is_refused() {
    let disk = small_store();
    for name in [MANIFEST, LOG] {
        let sound = disk.contents(name).unwrap();
        // A restore waits for the threads of its guest, so several run at the same time.
        std::thread::scope(|scope| {
            for first in 0..4 {
                let (disk, sound) = (disk.copy(), &sound);
                scope.spawn(move || {
                    (first..sound.len()).step_by(4).for_each(|at| flip(&disk, name, sound, at));
                });
            }
        });
    }
    outcomes(&disk).into_iter().for_each(|outcome| outcome.unwrap());
}

/// Flips bits of the byte at `at`, one at a time: every bit of the first bytes, one bit of each
/// later byte.
fn flip(disk: &MemoryDisk, name: &str, sound: &[u8], at: usize) {
    let bits = if at < 200 { 0..8 } else { at % 8..at % 8 + 1 };
    for bit in bits {
        let mut bent = sound.to_vec();
        bent[at] ^= 1 << bit;
        disk.put(name, bent);
        for refusal in refusals(disk) {
            names_the_place(&refusal, name, at as u64);
        }
    }
}

#[test]
fn damaged_frame_fails_only_its_epochs() {
    let disk = small_store();
    let sound = disk.contents(PAGES).unwrap();
    let (mut used, mut epochs) = (Vec::new(), Vec::new());
    for slot in 0..sound.len() / 4096 {
        let at = slot * 4096 + 1234 * slot % 4096;
        let mut bent = sound.clone();
        bent[at] ^= 4;
        disk.put(PAGES, bent);
        let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
        let mut bad = Vec::new();
        let verified = store.verify(|epoch, sound| {
            if let Err(e) = sound {
                names_the_place(e, PAGES, at as u64);
                bad.push(epoch);
            }
        });
        if let Err(e) = verified {
            names_the_place(&e, PAGES, at as u64);
            used.push(slot);
        }
        for epoch in 1..=3 {
            let factory = MemoryGuestFactory::default();
            match restore(&store, Some(epoch), &factory, Clock::Continue) {
                Ok(_) => assert!(!bad.contains(&epoch) && slot > 0, "slot {slot}, epoch {epoch}"),
                Err(RestoreError::Store(e)) => {
                    names_the_place(&e, PAGES, at as u64);
                    assert!(slot == 0 || bad.contains(&epoch), "slot {slot}, epoch {epoch}");
                }
                Err(e) => panic!("{e}"),
            }
        }
        epochs.push(bad);
    }
    // The header; then the frame of 7s, which only the first epoch has, and that of 9s.
    assert_eq!(used, [0, 1, 2]);
    assert_eq!(epochs[..4], [vec![], vec![1], vec![3], vec![]]);
}

#[test]
fn truncated_or_grown_manifest_is_detected() {
    let disk = small_store();
    let sound = disk.contents(MANIFEST).unwrap();
    for len in 0..sound.len() {
        disk.put(MANIFEST, sound[..len].to_vec());
        refusals(&disk).iter().for_each(|e| names_the_place(e, MANIFEST, len as u64));
    }
    disk.put(MANIFEST, [&sound[..], b"x"].concat());
    refusals(&disk).iter().for_each(|e| names_the_place(e, MANIFEST, sound.len() as u64));
}

/// A truncated part of a log counts as never written: a crash has the same effect.
#[test]
fn truncated_log_has_whole_epochs() {
    let disk = small_store();
    let sound = disk.contents(LOG).unwrap();
    let mut seen = Vec::new();
    for len in 0..sound.len() {
        disk.put(LOG, sound[..len].to_vec());
        let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
        match store.epochs() {
            Err(e) => {
                names_the_place(&e, LOG, len as u64);
                assert!(len < 512, "{e}");
            }
            Ok(epochs) => {
                seen.push(epochs.len());
                store.verify(|_, _| ()).unwrap();
            }
        }
    }
    seen.dedup();
    assert_eq!(seen, [0, 1, 2]);
}

#[test]
fn grown_log_is_detected() {
    let disk = small_store();
    let sound = disk.contents(LOG).unwrap();
    for more in [1, 24, 64, 4096] {
        let mut grown = sound.clone();
        grown.resize(sound.len() + more, 0);
        disk.put(LOG, grown.clone());
        let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
        let report = store.verify(|_, _| ()).unwrap();
        assert_eq!((report.epochs, report.unfinished.len()), (3, 1));
        if more >= 512 {
            grown[sound.len() + 5] = 1;
            disk.put(LOG, grown);
            refusals(&disk).iter().for_each(|e| names_the_place(e, LOG, sound.len() as u64 + 5));
        }
    }
    let mut doubled = sound.clone();
    doubled.extend_from_slice(&sound[512..]);
    disk.put(LOG, doubled);
    refusals(&disk).iter().for_each(|e| names_the_place(e, LOG, sound.len() as u64 + 511));
}

#[test]
fn truncated_page_file_is_detected() {
    let disk = small_store();
    let sound = disk.contents(PAGES).unwrap();
    for len in [0, 63, 64, 4095, 4096, 4097, 8192, 12_287] {
        disk.put(PAGES, sound[..len].to_vec());
        let at = len as u64 / 4096 * 4096;
        for refusal in refusals(&disk) {
            let StoreError::Damaged { offset, damage: Damage::EndsEarly { .. }, .. } = refusal
            else {
                panic!("{refusal}");
            };
            assert!(offset <= at.max(8192), "{offset} {len}");
        }
    }
}

#[test]
fn lost_sector_is_damage_except_at_the_end() {
    let disk = small_store();
    let sound = disk.contents(LOG).unwrap();
    let sectors = sound.len() / 512;
    // Sectors in which an epoch begins: their first record says so.
    let begin = |n: &usize| sound[n * 512..n * 512 + 2] == [0x11, 0x80];
    let begins: Vec<usize> = (1..sectors).filter(begin).collect();
    assert_eq!(begins.len(), 3);
    for lost in 1..sectors {
        let mut bent = sound.clone();
        bent[lost * 512..(lost + 1) * 512].fill(0);
        disk.put(LOG, bent);
        let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
        if lost < begins[2] {
            refusals(&disk).iter().for_each(|e| names_the_place(e, LOG, lost as u64 * 512));
        } else {
            assert_eq!(store.epochs().unwrap().len(), 2, "it was never finished");
        }
    }
}

/// Returns the last four bytes of a page of zeros for which its checksum is `wanted`.
fn ending_for(wanted: u32) -> [u8; 4] {
    let sum = |ending: u32| {
        let mut page = [0; 4096];
        page[4092..].copy_from_slice(&ending.to_le_bytes());
        crc32c::crc32c(&page)
    };
    // A flipped bit always changes the checksum by the same XOR mask: solved bit by bit.
    let mut rows: Vec<(u32, u32)> = (0..32).map(|b| (sum(1 << b) ^ sum(0), 1 << b)).collect();
    let (mut left, mut ending) = (sum(0) ^ wanted, 0);
    for bit in (0..32).rev() {
        let Some(at) = rows.iter().position(|(sum, _)| sum >> bit == 1) else { continue };
        let (sum, bits) = rows.swap_remove(at);
        for row in rows.iter_mut().filter(|(other, _)| other >> bit & 1 == 1) {
            *row = (row.0 ^ sum, row.1 ^ bits);
        }
        if left >> bit & 1 == 1 {
            (left, ending) = (left ^ sum, ending ^ bits);
        }
    }
    assert_eq!((left, sum(ending)), (0, wanted));
    ending.to_le_bytes()
}

#[test]
fn guest_cannot_forge_damage_of_a_torn_epoch() {
    const FRAMES: u64 = 400;
    let vm_id = VmId::random();
    let log_of = |sums: &dyn Fn(u64) -> u32| {
        let disk = MemoryDisk::default();
        let store = Store::with_backend(Box::new(disk.clone()), true).unwrap();
        let slots = vec![Slot { id: SlotId(0), base: Gfn(0), frames: FRAMES }];
        let config = MemoryConfig { slots, writers: 1, working_set: 1, writes_per_s: 1, seed: 3 };
        let guest = MemoryGuest::new(vm_id, config).unwrap();
        for n in 0..FRAMES {
            let at = GuestAddress(n * 4096 + 4092);
            guest.ram().write_slice(&ending_for(sums(n)), at).unwrap();
        }
        Checkpointer::new(guest, store).unwrap().take().unwrap();
        (disk.contents(LOG).unwrap(), disk)
    };
    // The data bytes of the log, in order, and the position of the frames' checksums among them.
    let data = |log: &[u8]| -> Vec<u8> {
        log.chunks(512).skip(1).flat_map(|sector| &sector[..508]).copied().collect()
    };
    let (plain, _) = log_of(&|n| n as u32 + 1);
    let sums = data(&plain).windows(8).position(|w| w == [1, 0, 0, 0, 2, 0, 0, 0]).unwrap();
    // The second sector that they fill begins with the head of an EPOCH record, chosen by the
    // guest.
    let target = (sums / 508 + 2) * 508;
    let mut head: Vec<u8> = data(&plain)[..20].to_vec();
    head.extend(crc32c::crc32c(&head).to_le_bytes());
    let (forged, disk) = log_of(&|n| {
        let at = sums + n as usize * 4;
        let byte = |b: usize| match (at + b).checked_sub(target) {
            Some(of @ 0..24) => head[of],
            _ => 1 + n as u8 % 7,
        };
        u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
    });
    let sector = 512 + target / 508 * 512;
    assert_eq!(forged[sector..sector + 24], head[..], "it is where it was to be");
    let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
    assert_eq!(store.verify(|_, _| ()).unwrap().epochs, 1);
    // Power fails before all of it is on the disk; that sector is on the disk.
    for lost in [512, sector - 512] {
        let mut torn = forged.clone();
        torn[lost..lost + 512].fill(0);
        disk.put(LOG, torn);
        assert_eq!(store.epochs().unwrap(), [], "it was never finished");
        assert_eq!(store.verify(|_, _| ()).unwrap().unfinished.len(), 1);
    }
}

#[test]
fn files_of_another_store_are_refused() {
    let (disk, other) = (small_store(), small_store());
    for name in [MANIFEST, LOG, PAGES] {
        let sound = disk.contents(name).unwrap();
        disk.put(name, other.contents(name).unwrap());
        for refusal in refusals(&disk) {
            assert!(refusal.to_string().contains("the file belongs to guest "), "{refusal}");
        }
        disk.put(name, sound);
    }
}

#[test]
fn epoch_of_another_log_is_refused() {
    let (disk, other) = small::two_stores();
    let (mine, theirs) = (disk.contents(LOG).unwrap(), other.contents(LOG).unwrap());
    assert_eq!(mine.len(), theirs.len());
    let begin = |n: &usize| mine[n * 512..n * 512 + 2] == [0x11, 0x80];
    let begins: Vec<usize> = (1..mine.len() / 512).filter(begin).collect();
    // The middle epoch, with correct checksums of each sector and each record.
    let mut spliced = mine.clone();
    spliced[begins[1] * 512..begins[2] * 512]
        .copy_from_slice(&theirs[begins[1] * 512..begins[2] * 512]);
    assert_ne!(spliced, mine);
    disk.put(LOG, spliced);
    for refusal in refusals(&disk) {
        assert!(refusal.to_string().contains("the digest is "), "{refusal}");
        names_the_place(&refusal, LOG, begins[2] as u64 * 512);
    }
}

/// Checks, for any bytes: no panic, no huge allocation, and nothing that passes `verify` but fails
/// to restore because of the store.
fn survives(name: &str, bytes: Vec<u8>) {
    let disk = SMALL.with(|files| {
        let disk = MemoryDisk::default();
        files.iter().for_each(|(name, bytes)| disk.put(name, bytes.clone()));
        disk
    });
    disk.put(name, bytes);
    let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
    let verified = store.verify(|_, _| ());
    let restored = restore(&store, None, &MemoryGuestFactory::default(), Clock::Continue);
    let latest = store.epochs().ok().and_then(|epochs| epochs.last().copied());
    continues(&disk, latest.map(|e| e.vm_id));
    match (verified, restored) {
        (Ok(report), Err(RestoreError::Store(e))) => {
            assert!(report.epochs == 0 && matches!(e, StoreError::NoEpoch { .. }), "{e}");
        }
        (Err(_), Ok((_, report))) => {
            // Damage of an older epoch than the latest.
            assert!(report.epoch > 1);
        }
        _ => {}
    }
}

/// Checks that compaction and a writer survive, too, and that what is written restores.
fn continues(disk: &MemoryDisk, vm_id: Option<VmId>) {
    let Ok(store) = Store::with_backend(Box::new(disk.clone()), true) else { return };
    let _ = store.compact();
    let guest = small::guest(vm_id.unwrap_or_else(VmId::random));
    let Ok(mut checkpointer) = Checkpointer::new(guest, store) else { return };
    checkpointer.keep(Some(2));
    checkpointer.log_bound(1);
    for _ in 0..3 {
        if let Ok(report) = checkpointer.take() {
            let factory = MemoryGuestFactory::default();
            restore(checkpointer.store(), Some(report.epoch), &factory, Clock::Continue).unwrap();
        }
    }
}

#[test]
fn correction_changes_nothing_in_a_sound_file() {
    let disk = small_store();
    for (name, correct) in CORRECTIONS {
        let sound = disk.contents(name).unwrap();
        let mut corrected = sound.clone();
        correct(&mut corrected);
        assert!(corrected == sound, "{name}");
    }
}

type Correction = fn(&mut [u8]);

const CORRECTIONS: [(&str, Correction); 3] =
    [(MANIFEST, correct_manifest), (LOG, correct_log), (PAGES, correct_pages)];

#[test]
fn every_field_that_the_format_fixes_is_checked() {
    let sound = small_store().contents(LOG).unwrap();
    let at = small::records(&sound);
    let tags: Vec<u16> = at.iter().map(|(_, tag)| *tag).collect();
    // A full epoch without zeros, then one that makes its only frame zeros.
    assert_eq!(tags[..7], [0x8011, 0x8012, 1, 0x8013, 5, 0x80ff, 0x8011]);
    let [epoch, layout, config, frames, section, commit] = [0, 1, 2, 3, 4, 5].map(|n| at[n].0);
    let second = at[6].0;
    let mut cases: Vec<(usize, u8, &str)> = vec![
        (10, 65, "its header claims 65 bytes; a header of this version has 64"),
        (8, 2, "format version 2 is not the version 1 that this program reads"),
        (56, 1, "the layout in the header of a log is 1 and should be 0"),
        (70, 1, "what follows the header is 1 and should be 0"),
        (epoch + 24, 0, "a checkpoint's number is 0 and should be"),
        (epoch + 24 + 8, 9, "the parent's number is 9 and should be 0"),
        (epoch + 24 + 28, 4, "the undefined part of a checkpoint's flags is 4 and should be 0"),
        (layout + 24 + 4, 1, "the unused field of a memory slot is 1 and should be 0"),
        (layout + 24 + 10, 9, "a memory slot at page 0x100 follows one at 0x90000"),
        (frames + 24, 0, "a record of pages has no runs"),
        (frames + 24 + 8, 77, "are not in guest memory"),
        (frames + 24 + 20, 0, "slots 0..1 cannot hold pages"),
        (frames + 4, 3, "it has pages of object 3, which the checkpoint does not have"),
        (commit + 24 + 8, 3, "the oldest retained checkpoint is 3 and should be 3"),
        (second + 24 + 28, 1, "the flag that a checkpoint is rebased is 1 and should be 0"),
    ];
    for record in [epoch, layout, config, commit] {
        cases.extend([
            (record + 2, 3, "the undefined part of a record's flags is 2 and should be 0"),
            (record + 2, 0, "the flag that a record must be understood is 0 and should be 1"),
            (record + 4, 7, "the instance of a record that has none is 7"),
            (record + 6, 1, "the unused field of a record's head is 1 and should be 0"),
        ]);
    }
    cases.push((section, 0, "a record of tag 0x0000 has no place here"));
    cases.push((section + 1, 0x80, "a record of tag 0x8005 has no place here"));
    for (at, byte, expected) in cases {
        let mut bytes = sound.clone();
        bytes[at] = byte;
        correct_log(&mut bytes);
        let disk = small_store();
        let vm = disk.contents(LOG).unwrap()[32..48].to_vec();
        bytes[32..48].copy_from_slice(&vm);
        correct_log(&mut bytes);
        disk.put(LOG, bytes);
        for refusal in refusals(&disk) {
            let e = refusal.to_string();
            assert!(e.contains(expected), "byte {at} set to {byte}: {e}, not {expected}");
        }
    }
}

#[test]
fn every_field_of_drives_is_checked() {
    let drive = TestDisk::new("d", 8 * 4096).unwrap();
    let guest = MemoryGuest::with_disks(VmId::random(), MemoryConfig::still(), vec![drive.clone()])
        .unwrap();
    let sound = MemoryDisk::default();
    let store = Store::with_backend(Box::new(sound.clone()), true).unwrap();
    let mut checkpointer = Checkpointer::new(guest, store).unwrap();
    for byte in [1, 2] {
        drive.write(5 * 4096, &[byte; 4096]).unwrap();
        checkpointer.take().unwrap();
    }
    drop(checkpointer);
    let log = sound.contents(LOG).unwrap();
    let at = small::records(&log);
    let tags: Vec<u16> = at.iter().map(|(_, tag)| *tag).collect();
    assert_eq!(tags, [0x8011, 0x8012, 1, 0x8015, 0x8013, 0x80ff].repeat(2));
    let [epoch, drives, frames, again] = [0, 3, 4, 9].map(|n| at[n].0);
    for (at, byte, expected) in [
        (epoch + 24 + 28, 0, "a record of tag 0x8015 has no place here"),
        (drives + 24 + 1, 0, "drive 1 is invalid: its size is 0 or too large"),
        (drives + 24 + 8, 0, "drive 1 is invalid: its name is empty"),
        (drives + 24 + 8, 0xff, "drive 1 is invalid: its name is not UTF-8"),
        (drives + 4, 1, "the instance of a record that has none is 1"),
        (frames + 4, 2, "it has pages of object 2, which the checkpoint does not have"),
        (frames + 24 + 8, 8, "blocks 0x8..0x9 are not in drive 1"),
        (frames + 24 + 14, 1, "are not in drive 1"),
        (again + 24 + 8, b'e', "the checksum of the list of drives is"),
    ] {
        let mut bytes = log.clone();
        bytes[at] = byte;
        correct_log(&mut bytes);
        let disk = sound.copy();
        disk.put(LOG, bytes);
        for refusal in refusals(&disk) {
            let e = refusal.to_string();
            assert!(e.contains(expected), "byte {at} set to {byte}: {e}, not {expected}");
        }
    }
}

/// Returns the bytes of a file of the small store.
fn sound(name: &str) -> Vec<u8> {
    SMALL.with(|files| files.iter().find(|(n, _)| *n == name).unwrap().1.clone())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(repeats(600, 2000)))]
    #[test]
    fn hostile_files_with_right_checksums_are_survived(
        file in 0usize..3,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        in_front in any::<bool>(),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let (name, correct) = CORRECTIONS[file];
        let mut bytes = sound(name);
        for (at, byte) in changes {
            let among = if in_front { bytes.len().min(1200) } else { bytes.len().min(16_384) };
            bytes[at.index(among)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        correct(&mut bytes);
        survives(name, bytes);
    }

    #[test]
    fn noise_is_survived(
        file in 0usize..3,
        mut bytes in prop::collection::vec(any::<u8>(), 0..2000),
    ) {
        let (name, correct) = CORRECTIONS[file];
        survives(name, bytes.clone());
        correct(&mut bytes);
        survives(name, bytes);
    }
}

thread_local! {
    static SMALL: Vec<(&'static str, Vec<u8>)> = {
        let disk = small_store();
        [MANIFEST, LOG, PAGES].map(|name| (name, disk.contents(name).unwrap())).to_vec()
    };
}
