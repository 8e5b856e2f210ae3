//! Drives in the epochs of a guest: stored beside memory, from the same instant, and restored together with it.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use checkpoint::testing::{MemoryConfig, MemoryDisk, MemoryGuest, MemoryGuestFactory, TestDisk};
use checkpoint::{
    Archive, Backend, Cause, Checkpointer, Clock, Guest, Phase, RestoreError, RunState, Store,
    VmId, restore, restore_archive, restore_lazily,
};
use dirty_tracker::{Gfn, PAGE_SIZE};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

const BLOCK: usize = PAGE_SIZE as usize;
/// Of two drives, the first with a block that is a part, and blocks enough for several records' runs.
const SIZES: [u64; 2] = [150 * PAGE_SIZE + 1536, 7 * PAGE_SIZE];

fn disks() -> Vec<Arc<TestDisk>> {
    let named = SIZES.iter().zip(["one", "two"]);
    named.map(|(bytes, id)| TestDisk::new(id, *bytes).unwrap()).collect()
}

fn guest() -> Arc<MemoryGuest> {
    MemoryGuest::with_disks(VmId::random(), MemoryConfig::still(), disks()).unwrap()
}

/// Where a guest is restored to: its disks are full of something else.
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

fn restored(disk: &MemoryDisk, epoch: u64, lazily: bool) -> Vec<Vec<u8>> {
    let (store, factory) = (on(disk, false), elsewhere());
    let report = match lazily {
        true => restore_lazily(&store, Some(epoch), &factory, Clock::Continue).unwrap().1,
        false => restore(&store, Some(epoch), &factory, Clock::Continue).unwrap().1,
    };
    assert_eq!((report.epoch, report.drives), (epoch, 2));
    contents(&factory.disks)
}

/// What happens to a guest with drives.
#[derive(Clone, Debug)]
enum Step {
    Write {
        disk: usize,
        at: u64,
        len: usize,
        byte: u8,
    },
    Discard {
        disk: usize,
        at: u64,
        len: u64,
    },
    Take,
    /// With a full epoch, by another process.
    TakeAnew,
    Compact,
}

fn step() -> impl Strategy<Value = Step> {
    let place = (0usize..2, any::<prop::sample::Index>());
    let write = (place.clone(), 1usize..3 * BLOCK, 0u8..4).prop_map(|((disk, at), len, byte)| {
        let at = at.index(SIZES[disk] as usize) as u64;
        Step::Write { disk, at, len: len.min((SIZES[disk] - at) as usize), byte }
    });
    let discard = (place, 1u64..20 * PAGE_SIZE).prop_map(|((disk, at), len)| {
        let at = at.index(SIZES[disk] as usize) as u64;
        Step::Discard { disk, at, len: len.min(SIZES[disk] - at) }
    });
    prop_oneof![
        8 => write,
        2 => discard,
        4 => Just(Step::Take),
        1 => Just(Step::TakeAnew),
        1 => Just(Step::Compact),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn every_kept_epoch_has_the_drives_as_they_were_in_its_pause(
        steps in prop::collection::vec(step(), 1..60),
        keep in 1u64..5,
        log_bound in prop_oneof![Just(1u64 << 10), Just(1 << 24)],
    ) {
        let (disk, guest) = (MemoryDisk::default(), guest());
        let open = || {
            let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
            checkpointer.keep(Some(keep));
            checkpointer.log_bound(log_bound);
            checkpointer
        };
        let mut checkpointer = Some(open());
        let mut model = contents(guest.disks());
        let mut epochs = BTreeMap::new();
        for step in steps {
            let mut take = false;
            match step {
                Step::Write { disk, at, len, byte } => {
                    guest.disks()[disk].write(at, &vec![byte; len]).unwrap();
                    model[disk][at as usize..at as usize + len].fill(byte);
                }
                Step::Discard { disk, at, len } => {
                    guest.disks()[disk].discard(at, len).unwrap();
                    model[disk][at as usize..(at + len) as usize].fill(0);
                }
                Step::Take => take = true,
                Step::TakeAnew => {
                    drop(checkpointer.take());
                    checkpointer = Some(open());
                    take = true;
                }
                Step::Compact => {
                    drop(checkpointer.take());
                    let _ = on(&disk, true).compact();
                    checkpointer = Some(open());
                    take = true;
                }
            }
            if take {
                let report = checkpointer.as_mut().unwrap().take().unwrap();
                epochs.insert(report.epoch, model.clone());
            }
        }
        drop(checkpointer);
        prop_assert!(contents(guest.disks()) == model);
        let store = on(&disk, false);
        store.verify(|_, _| ()).unwrap();
        let infos = store.epochs().unwrap();
        prop_assert_eq!(infos.len(), epochs.len().min(keep as usize));
        for info in infos {
            prop_assert_eq!(info.drives, 2);
            prop_assert!(restored(&disk, info.epoch, info.epoch % 2 == 0) == epochs[&info.epoch]);
        }
    }
}

#[test]
fn an_epoch_has_what_changed_of_drives_and_nothing_else() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.disks()[0].write(10 * PAGE_SIZE, &[1; 20 * BLOCK]).unwrap();
    // A hole, and zeros.
    guest.disks()[0].write(50 * PAGE_SIZE, &[0; 20 * BLOCK]).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    let first = checkpointer.take().unwrap();
    assert_eq!(first.disk_blocks, 20);
    guest.disks()[1].write(PAGE_SIZE - 1, &[2; 2]).unwrap();
    guest.disks()[0].discard(12 * PAGE_SIZE, PAGE_SIZE).unwrap();
    guest.ram().write_slice(&[3; 4096], GuestAddress(0)).unwrap();
    let second = checkpointer.take().unwrap();
    assert_eq!((second.frames, second.disk_blocks), (1, 3));
    assert_eq!(checkpointer.take().unwrap().disk_blocks, 0);
    let store = on(&disk, false);
    let infos = store.epochs().unwrap();
    assert_eq!((infos[1].frames, infos[1].zero_frames, infos[1].drives), (4, 1, 2));
    // Memory alone is in a file of memory.
    let file = tempfile::NamedTempFile::new().unwrap();
    let export = store.export_raw(None, file.as_file(), file.path()).unwrap();
    assert_eq!(export.frames, 1);
    let (guest, report) = restore(&store, None, &elsewhere(), Clock::Continue).unwrap();
    assert_eq!((report.frames, report.disk_blocks), (1, 21));
    let mut page = [0; 4096];
    guest.ram().read_slice(&mut page[..], GuestAddress(0)).unwrap();
    assert_eq!(page, [3; 4096]);
}

/// The guest writes a number to memory, then to its drive, so many blocks, and so on: whatever moment an epoch is of, the drive is at
/// most one behind.
fn is_of_one_instant(blocks: u64, epochs: u32, copy_behind_from: u64) {
    let bytes = 100 * blocks * PAGE_SIZE;
    let numbered = || vec![TestDisk::new("one", bytes).unwrap()];
    let disk = MemoryDisk::default();
    let guest = MemoryGuest::with_disks(VmId::random(), MemoryConfig::still(), numbered()).unwrap();
    guest.resume().unwrap();
    let over = AtomicBool::new(false);
    let place = |n: u64| n * 37 % 100 * blocks * PAGE_SIZE;
    let number = |guest: &MemoryGuest, disk: &TestDisk| {
        let mut memory = [0; 8];
        guest.ram().read_slice(&mut memory[..], GuestAddress(5 * PAGE_SIZE)).unwrap();
        (u64::from_le_bytes(memory), disk.contents().unwrap())
    };
    let (mut taken, mut behind) = (Vec::<u64>::new(), 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..=u64::MAX {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                guest.write(Gfn(5), &n.to_le_bytes()).unwrap();
                (10..60).for_each(|gfn| guest.write(Gfn(gfn), &n.to_le_bytes()).unwrap());
                // In an order that goes over each again and again.
                let some = n.to_le_bytes().repeat(blocks as usize * BLOCK / 8);
                guest.disks()[0].write(place(n), &some).unwrap();
            }
        });
        let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
        checkpointer.copy_behind_from(copy_behind_from);
        // On a busy host the guest may write nothing in many of them.
        let enough = |taken: &Vec<u64>, behind| match behind > 0 || copy_behind_from >= 40 {
            true => taken.len() as u32 >= epochs,
            false => taken.len() as u32 >= 100 * epochs,
        };
        while !enough(&taken, behind) {
            thread::sleep(Duration::from_millis(3));
            let report = checkpointer.take().unwrap();
            behind += report.behind_frames;
            taken.push(report.epoch);
        }
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(behind > 0, copy_behind_from < 40, "{behind} frames behind the guest's back");
    for epoch in taken {
        let factory = MemoryGuestFactory { disks: numbered(), ..Default::default() };
        let (copy, _) = restore(&on(&disk, false), Some(epoch), &factory, Clock::Continue).unwrap();
        let (memory, drive) = number(&copy, &factory.disks[0]);
        let numbers = drive.chunks_exact(8).map(|n| u64::from_le_bytes(n.try_into().unwrap()));
        let last = numbers.max().unwrap();
        assert!(memory == last || memory == last + 1, "{epoch}: {memory} and {last}");
        for n in last.saturating_sub(99).max(1)..=last {
            let at = place(n) as usize;
            let is = &drive[at..at + blocks as usize * BLOCK];
            let right = is.chunks_exact(8).all(|is| is == n.to_le_bytes());
            assert!(right, "{epoch}: {n} of {last}");
        }
    }
}

#[test]
fn memory_and_drives_are_of_the_same_instant() {
    is_of_one_instant(1, 30, u64::MAX);
}

#[test]
fn so_they_are_when_memory_is_copied_behind_the_guest() {
    is_of_one_instant(1, 30, 10);
}

#[test]
fn so_they_are_when_more_changes_than_has_room() {
    is_of_one_instant(40, 12, u64::MAX);
    is_of_one_instant(40, 12, 10);
}

/// A store that takes so little that a write to the drive waits for too long: that costs an epoch, and what has no room is copied in the
/// pause of the next.
#[test]
fn a_store_that_is_too_slow_holds_the_drive_once() {
    const BLOCKS: u64 = 4000;
    let drive = || vec![TestDisk::new("one", BLOCKS * PAGE_SIZE).unwrap()];
    let disk = MemoryDisk::default();
    let guest = MemoryGuest::with_disks(VmId::random(), MemoryConfig::still(), drive()).unwrap();
    guest.resume().unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    checkpointer.take().unwrap();
    guest.disks()[0].write(0, &vec![1; BLOCKS as usize * BLOCK]).unwrap();
    let over = AtomicBool::new(false);
    let (first, second) = thread::scope(|scope| {
        scope.spawn(|| {
            // Never zeros, which take no room in the store.
            for n in (1u8..=255).cycle() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                // It stands here.
                guest.write(Gfn(5), &[n]).unwrap();
                guest.disks()[0].write(0, &vec![n; BLOCKS as usize * BLOCK]).unwrap();
            }
        });
        disk.slow_writes(Duration::from_millis(100));
        let taken = (checkpointer.take().unwrap_err(), checkpointer.take());
        over.store(true, Ordering::Relaxed);
        taken
    });
    assert!(matches!(first.cause, Cause::Stalled(_)), "{first}");
    assert!((first.phase, first.guest) == (Phase::CopyDrives, RunState::Running), "{first}");
    disk.slow_writes(Duration::ZERO);
    let second = second.unwrap();
    assert_eq!(second.disk_blocks, BLOCKS);
    let factory = MemoryGuestFactory { disks: drive(), ..Default::default() };
    let (copy, _) =
        restore(&on(&disk, false), Some(second.epoch), &factory, Clock::Continue).unwrap();
    let (mut memory, drives) = ([0], contents(&factory.disks));
    copy.ram().read_slice(&mut memory[..], GuestAddress(5 * PAGE_SIZE)).unwrap();
    let is = drives[0][0];
    assert!(drives[0].iter().all(|byte| *byte == is), "of one instant");
    assert!(memory[0] == is || memory[0] == is % 255 + 1, "{memory:?} and {is}");
    let report = checkpointer.take().unwrap();
    let factory = MemoryGuestFactory { disks: drive(), ..Default::default() };
    restore(&on(&disk, false), Some(report.epoch), &factory, Clock::Continue).unwrap();
    assert!(contents(&factory.disks) == contents(guest.disks()));
}

/// A drive of a TiB with some MiB in it, half of which is then discarded at once, as who trims it does: neither is read as a whole, nor
/// does it take memory by the block.
#[test]
fn a_large_drive_costs_what_is_in_it() {
    const TIB: u64 = 1 << 40;
    const MIB: usize = 1 << 20;
    let large = || TestDisk::new("large", TIB + 512).unwrap();
    let places: Vec<u64> = (0..16).map(|n| n * (TIB / 16) + n * 3 * PAGE_SIZE).collect();
    let alone: Vec<u64> =
        (0..200).map(|n| (n * (TIB / 200) + (5 << 20)) / PAGE_SIZE * PAGE_SIZE).collect();
    let disk = MemoryDisk::default();
    let guest =
        MemoryGuest::with_disks(VmId::random(), MemoryConfig::still(), vec![large()]).unwrap();
    let drive = &guest.disks()[0];
    for (n, at) in (1u8..).zip(&places) {
        drive.write(*at, &vec![n; MIB]).unwrap();
    }
    for (n, at) in (1u8..).zip(&alone) {
        drive.write(*at, &[n | 0x80; 700]).unwrap();
    }
    drive.write(TIB, &[7; 512]).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    checkpointer.keep(Some(2));
    let first = checkpointer.take().unwrap();
    assert_eq!(first.disk_blocks, 16 * 256 + 200 + 1);
    drive.discard(0, TIB / 2).unwrap();
    drive.write(TIB / 4, &[9; 10]).unwrap();
    let second = checkpointer.take().unwrap();
    assert_eq!(second.disk_blocks, TIB / 2 / PAGE_SIZE);
    assert!(second.written_bytes < 1 << 20, "{second:?}");
    // Full again, built on by one, the oldest dropped.
    drop(checkpointer);
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    checkpointer.keep(Some(1));
    checkpointer.take().unwrap();
    drive.write(TIB / 4, &[8; 10]).unwrap();
    let last = checkpointer.take().unwrap();
    assert_eq!(last.disk_blocks, 1);
    drop(checkpointer);
    let copy = large();
    copy.write(TIB / 8, &[0xee; 5 * MIB]).unwrap();
    let factory = MemoryGuestFactory { disks: vec![copy.clone()], ..Default::default() };
    let (_, report) = restore(&on(&disk, false), None, &factory, Clock::Continue).unwrap();
    assert_eq!((report.epoch, report.disk_blocks), (last.epoch, 8 * 256 + 100 + 1 + 1));
    let (mut is, mut was) = (vec![0; 6 * MIB], vec![0; 6 * MIB]);
    for at in places.iter().chain(&alone).chain(&[TIB / 4, TIB / 8, TIB + 512 - 6 * MIB as u64]) {
        let at = *at.min(&(TIB + 512 - 6 * MIB as u64));
        drive.read(at, &mut was).unwrap();
        copy.read(at, &mut is).unwrap();
        assert!(is == was, "{at:#x}");
    }
}

#[test]
fn a_drive_that_is_let_go_of_is_in_no_epoch() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.resume().unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    checkpointer.take().unwrap();
    guest.disks()[0].write(0, &[1; 10 * BLOCK]).unwrap();
    guest.disks()[1].let_go(true);
    let e = checkpointer.take().unwrap_err();
    assert!(
        e.to_string().contains("disk \"two\" cannot be kept as it was: the guest lets go of it"),
        "{e}"
    );
    assert_eq!(e.guest, RunState::Running);
    guest.disks()[1].let_go(false);
    let report = checkpointer.take().unwrap();
    assert_eq!(report.disk_blocks, 10, "those of the one that failed, too");
    assert!(restored(&disk, report.epoch, false) == contents(guest.disks()));
}

#[test]
fn a_drive_that_cannot_be_read_costs_an_epoch_and_no_block() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.resume().unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    let drive = &guest.disks()[0];
    drive.write(0, &[1; 10 * BLOCK]).unwrap();
    drive.fail_reads(true);
    let e = checkpointer.take().unwrap_err();
    let reason = std::io::Error::from_raw_os_error(libc::EIO).to_string();
    assert!(
        e.to_string().contains("disk \"one\" cannot be read") && e.to_string().contains(&reason),
        "{e}"
    );
    assert_eq!(e.guest, RunState::Running);
    drive.fail_reads(false);
    checkpointer.take().unwrap();
    // One that gets shorter behind the guest's back.
    drive.write(2 * PAGE_SIZE, &[2; 2 * BLOCK]).unwrap();
    drive.write(149 * PAGE_SIZE, &[2; 512]).unwrap();
    drive.cut(140 * PAGE_SIZE).unwrap();
    let e = checkpointer.take().unwrap_err();
    assert!(e.to_string().contains("copying what changed of disks behind the guest failed"), "{e}");
    assert_eq!(e.guest, RunState::Running);
    drive.cut(SIZES[0]).unwrap();
    drive.write(5 * PAGE_SIZE, &[3; 10]).unwrap();
    let report = checkpointer.take().unwrap();
    assert_eq!(report.disk_blocks, 4, "those of the one that failed, too");
    assert!(restored(&disk, report.epoch, false) == contents(guest.disks()));
}

#[test]
fn a_restore_that_is_cut_says_what_is_in_the_drives_and_can_be_repeated() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.disks()[0].write(0, &[1; 10 * BLOCK]).unwrap();
    guest.disks()[1].write(0, &[2; BLOCK]).unwrap();
    Checkpointer::new(guest.clone(), on(&disk, true)).unwrap().take().unwrap();
    let (store, factory) = (on(&disk, false), elsewhere());
    factory.disks[1].fail_writes_after(0);
    let said = restore(&store, None, &factory, Clock::Continue).unwrap_err().to_string();
    assert!(
        said.starts_with("epoch 1 cannot be restored: writing disk \"two\" (28672 bytes) failed"),
        "{said}"
    );
    assert!(
        said.contains("in its disks (\"one\", \"two\") is part as it was")
            && said.contains("which mends them"),
        "{said}"
    );
    factory.disks[1].fail_writes_after(u64::MAX);
    restore(&store, None, &factory, Clock::Continue).unwrap();
    assert!(contents(&factory.disks) == contents(guest.disks()));
    // Other drives are refused, and stay as they are.
    for bytes in [SIZES[1] - 512, SIZES[1] + 512] {
        let mut factory = elsewhere();
        factory.disks[1] = TestDisk::new("two", bytes).unwrap();
        let was = contents(&factory.disks);
        let said = restore(&store, None, &factory, Clock::Continue).unwrap_err().to_string();
        assert!(said.contains("disk \"two\" (28672 bytes)"), "{said}");
        assert!(contents(&factory.disks) == was);
    }
    // So they do when something else of the epoch is damaged.
    let pages = disk.contents("pages-1").unwrap();
    disk.put("pages-1", pages[..4096 * 3].to_vec());
    let factory = elsewhere();
    let was = contents(&factory.disks);
    let said = restore(&store, None, &factory, Clock::Continue).unwrap_err().to_string();
    assert!(said.contains("pages-1, byte 12288"), "{said}");
    assert!(contents(&factory.disks) == was);
}

/// Whichever block has rotten, no drive is given up for it.
#[test]
fn a_block_that_is_damaged_costs_no_drive_anything() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.disks()[0].write(0, &[1; 10 * BLOCK]).unwrap();
    guest.disks()[1].write(0, &[2; 3 * BLOCK]).unwrap();
    guest.ram().write_slice(&[3; 4096], GuestAddress(0)).unwrap();
    Checkpointer::new(guest.clone(), on(&disk, true)).unwrap().take().unwrap();
    let sound = disk.contents("pages-1").unwrap();
    let stored = |page: &[u8]| matches!(page[0], 1 | 2) && page.iter().all(|b| *b == page[0]);
    let slots: Vec<usize> =
        (0..sound.len() / BLOCK).filter(|n| stored(&sound[n * BLOCK..][..BLOCK])).collect();
    assert_eq!(slots.len(), 13);
    for (n, slot) in slots.iter().enumerate() {
        let mut pages = sound.clone();
        pages[slot * BLOCK + 77] ^= 4;
        disk.put("pages-1", pages);
        let (store, factory) = (on(&disk, false), elsewhere());
        let was = contents(&factory.disks);
        let e = match n % 2 {
            0 => restore(&store, None, &factory, Clock::Continue).map(drop).unwrap_err(),
            _ => restore_lazily(&store, None, &factory, Clock::Continue).map(drop).unwrap_err(),
        };
        assert!(matches!(e, RestoreError::Store(_)), "{e}");
        let said = e.to_string();
        assert!(said.contains("the checksum of block 0x") && said.contains(" of drive "), "{said}");
        assert!(contents(&factory.disks) == was, "{said}");
    }
    disk.put("pages-1", sound);
    assert!(restored(&disk, 1, false) == contents(guest.disks()));
}

/// The archive of the latest epoch on `disk`.
fn archived(disk: &MemoryDisk) -> (tempfile::NamedTempFile, Archive) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let store = on(disk, false);
    assert_eq!(
        store.export_archive(None, file.as_file(), file.path()).unwrap().drives,
        0,
        "left out"
    );
    let archive = Archive::open(file.path()).unwrap();
    (file, archive)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn an_archive_has_the_drives_too(
        writes in prop::collection::vec((0usize..2, any::<prop::sample::Index>(), 1usize..9 * BLOCK, 0u8..4), 0..30),
        frames in prop::collection::vec((0u64..60, 0u8..3), 0..20),
        again in 0usize..30,
    ) {
        let (disk, guest) = (MemoryDisk::default(), guest());
        let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
        for (gfn, byte) in frames {
            guest.ram().write_slice(&[byte; BLOCK], GuestAddress(gfn * PAGE_SIZE)).unwrap();
        }
        for (n, (drive, at, len, byte)) in writes.into_iter().enumerate() {
            let at = at.index(SIZES[drive] as usize);
            let len = len.min(SIZES[drive] as usize - at);
            guest.disks()[drive].write(at as u64, &vec![byte; len]).unwrap();
            if n == again {
                checkpointer.take().unwrap();
            }
        }
        let report = checkpointer.take().unwrap();
        let (_file, archive) = archived(&disk);
        prop_assert_eq!(archive.info().drives, 2);
        archive.verify().unwrap();
        let factory = elsewhere();
        let (copy, restored) = restore_archive(&archive, &factory, Clock::Continue).unwrap();
        prop_assert_eq!((restored.epoch, restored.drives), (report.epoch, 2));
        prop_assert_eq!(restored.frames + restored.disk_blocks, archive.info().frames);
        prop_assert!(contents(&factory.disks) == contents(guest.disks()));
        let memory = |guest: &MemoryGuest| {
            let mut all = vec![0; 60 * BLOCK];
            guest.ram().read_slice(&mut all[..], GuestAddress(0)).unwrap();
            all
        };
        prop_assert!(memory(&copy) == memory(&guest));
    }
}

/// Of an archive with drives in which a bit is turned over, and of one that is cut, nothing is restored, and no drive is written to; nor is what
/// checks out and makes no sense.
#[test]
fn an_archive_that_is_not_sound_leaves_drives_as_they_are() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.disks()[0].write(3 * PAGE_SIZE, &[1; 2 * BLOCK]).unwrap();
    guest.disks()[1].write(0, &[2; 700]).unwrap();
    guest.ram().write_slice(&[3; 4096], GuestAddress(0)).unwrap();
    Checkpointer::new(guest, on(&disk, true)).unwrap().take().unwrap();
    let (file, _) = archived(&disk);
    let sound = std::fs::read(file.path()).unwrap();
    let factory = elsewhere();
    let was = contents(&factory.disks);
    let refused = |bytes: Vec<u8>| {
        let disk = MemoryDisk::default();
        disk.put("archive", bytes);
        let opened = disk.open("archive").unwrap();
        let archive = Archive::with_file(opened, std::path::Path::new("archive"));
        let restored = archive
            .map_err(RestoreError::from)
            .and_then(|archive| restore_archive(&archive, &factory, Clock::Continue).map(drop));
        assert!(contents(&factory.disks) == was, "{restored:?}");
        restored.unwrap_err().to_string()
    };
    for at in (0..sound.len()).step_by(3) {
        let mut bent = sound.clone();
        bent[at] ^= 1 << (at % 8);
        refused(bent);
    }
    (0..sound.len()).step_by(7).for_each(|end| drop(refused(sound[..end].to_vec())));
    // Records, by where they begin: EPOCH, LAYOUT, CONFIGURATION, DRIVES, state, CONTENTS of memory and each drive.
    let tag = |at: usize| u16::from_le_bytes([sound[at], sound[at + 1]]);
    let next = |at: &usize| {
        at + 24 + u32::from_le_bytes(sound[at + 8..at + 12].try_into().unwrap()) as usize
    };
    let records =
        std::iter::successors(Some(64), |at| Some(next(at)).filter(|at| *at < sound.len()));
    let records: Vec<usize> = records.collect();
    let of = |wanted: u16| {
        records.iter().copied().filter(move |at| tag(*at) == wanted).collect::<Vec<_>>()
    };
    let (drives, blocks) = (of(0x8015)[0], of(0x8020));
    assert_eq!(blocks.iter().map(|at| sound[at + 4]).collect::<Vec<_>>(), [0, 1, 2]);
    for (at, bytes, why) in [
        (64 + 24 + 28, &[0][..], "a record of tag 0x8015 has no place here"),
        (drives + 24, &[0; 8], "no drive has its size"),
        (drives + 24 + 8, b"two", "another one has its name"),
        (drives + 24, &[0, 0x10], "this guest has no such drive"),
        (blocks[1] + 4, &[3], "frames of object 3, which the epoch does not have"),
        (blocks[1] + 4, &[2], "the runs of a record ascend"),
        (blocks[2] + 4, &[1], "the runs of a record ascend"),
        (blocks[2] + 24 + 8, &[7], "blocks 0x7..0x8 are not in drive 2"),
    ] {
        let mut bent = sound.clone();
        bent[at..at + bytes.len()].copy_from_slice(bytes);
        checkpoint::testing::reseal_archive(&mut bent);
        let said = refused(bent);
        assert!(said.contains(why), "{why}: {said}");
    }
}

#[test]
fn no_file_is_without_drives_and_silent_about_it() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.disks()[0].write(0, &[1; 10 * BLOCK]).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    let with = checkpointer.take().unwrap().epoch;
    drop(checkpointer);
    let store = on(&disk, false);
    let file = tempfile::NamedTempFile::new().unwrap();
    assert_eq!(store.export_raw(Some(with), file.as_file(), file.path()).unwrap().drives, 2);
    // One that has none is archived, whatever the guest has.
    let (disk, file) = (MemoryDisk::default(), tempfile::NamedTempFile::new().unwrap());
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    checkpointer.leave_drives();
    let without = checkpointer.take().unwrap().epoch;
    let report =
        on(&disk, false).export_archive(Some(without), file.as_file(), file.path()).unwrap();
    assert_eq!(report.drives, 0);
    let (archive, factory) = (Archive::open(file.path()).unwrap(), elsewhere());
    let was = contents(&factory.disks);
    let (_, report) = restore_archive(&archive, &factory, Clock::Continue).unwrap();
    assert_eq!((report.drives, report.disk_blocks), (0, 0));
    assert!(contents(&factory.disks) == was);
}

#[test]
fn drives_that_are_left_to_somebody_else_are_not_touched() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.disks()[0].write(0, &[1; 10 * BLOCK]).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    checkpointer.leave_drives();
    let report = checkpointer.take().unwrap();
    guest.disks()[0].write(0, &[2; 10 * BLOCK]).unwrap();
    assert_eq!((report.disk_blocks, checkpointer.take().unwrap().disk_blocks), (0, 0));
    drop(checkpointer);
    let factory = elsewhere();
    let was = contents(&factory.disks);
    let (_, report) = restore(&on(&disk, false), None, &factory, Clock::Continue).unwrap();
    assert_eq!((report.drives, report.disk_blocks), (0, 0));
    assert!(contents(&factory.disks) == was);
    // The next one has them again, and all of them.
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    let report = checkpointer.take().unwrap();
    assert_eq!(report.disk_blocks, 10);
    assert!(restored(&disk, report.epoch, false) == contents(guest.disks()));
}
