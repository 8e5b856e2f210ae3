//! The blocks of an epoch, whatever is written, discarded, failed or excluded.

use super::*;
use driftline_guest::{GuestContents, Lifecycle};

/// An event in the life of a guest with drives.
#[derive(Clone, Debug)]
enum DriveEvent {
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
    /// Another process takes a full epoch.
    TakeAnew,
    /// Another process continues the chain. The guest writes meanwhile.
    Move {
        disk: usize,
        byte: u8,
    },
    Compact,
}

fn step() -> impl Strategy<Value = DriveEvent> {
    let place = (0usize..2, any::<prop::sample::Index>());
    let write = (place.clone(), 1usize..3 * BLOCK, 0u8..4).prop_map(|((disk, at), len, byte)| {
        let at = at.index(SIZES[disk] as usize) as u64;
        DriveEvent::Write { disk, at, len: len.min((SIZES[disk] - at) as usize), byte }
    });
    let discard = (place, 1u64..20 * PAGE_SIZE).prop_map(|((disk, at), len)| {
        let at = at.index(SIZES[disk] as usize) as u64;
        DriveEvent::Discard { disk, at, len: len.min(SIZES[disk] - at) }
    });
    prop_oneof![
        8 => write,
        2 => discard,
        4 => Just(DriveEvent::Take),
        1 => Just(DriveEvent::TakeAnew),
        2 => (0usize..2, 0u8..4).prop_map(|(disk, byte)| DriveEvent::Move { disk, byte }),
        1 => Just(DriveEvent::Compact),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn kept_epochs_have_drives_of_their_pause(
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
                DriveEvent::Write { disk, at, len, byte } => {
                    guest.disks()[disk].write(at, &vec![byte; len]).unwrap();
                    model[disk][at as usize..at as usize + len].fill(byte);
                }
                DriveEvent::Discard { disk, at, len } => {
                    guest.disks()[disk].discard(at, len).unwrap();
                    model[disk][at as usize..(at + len) as usize].fill(0);
                }
                DriveEvent::Take => take = true,
                DriveEvent::TakeAnew => {
                    drop(checkpointer.take());
                    checkpointer = Some(open());
                    take = true;
                }
                DriveEvent::Move { disk, byte } => {
                    let before = checkpointer.take().unwrap();
                    let writes = FollowedWrites::begin(&*guest, true).unwrap();
                    guest.disks()[disk].write(PAGE_SIZE, &[byte; BLOCK]).unwrap();
                    model[disk][BLOCK..2 * BLOCK].fill(byte);
                    let moved = before.into_moved();
                    let mut next = open();
                    next.continue_moved(Some(writes), moved);
                    checkpointer = Some(next);
                }
                DriveEvent::Compact => {
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
fn epoch_has_only_changed_blocks() {
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
    // An export of memory holds memory only.
    let file = tempfile::NamedTempFile::new().unwrap();
    let export = store.export_raw(None, file.as_file(), file.path()).unwrap();
    assert_eq!(export.frames, 1);
    let (guest, report) = restore(&store, None, &elsewhere(), Clock::Continue).unwrap();
    assert_eq!((report.frames, report.disk_blocks), (1, 21));
    let mut page = [0; 4096];
    guest.ram().read_slice(&mut page[..], GuestAddress(0)).unwrap();
    assert_eq!(page, [3; 4096]);
}

/// A drive of 1 TiB with some MiB of data, half of which is then discarded in one call, as a trim
/// does. Neither step reads the whole drive or takes memory per block.
#[test]
fn large_drive_costs_its_data() {
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
    // A full epoch again, one built on it, the oldest dropped.
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
fn released_drive_is_in_no_epoch() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.resume().unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    checkpointer.take().unwrap();
    guest.disks()[0].write(0, &[1; 10 * BLOCK]).unwrap();
    guest.disks()[1].set_released(true);
    let e = checkpointer.take().unwrap_err();
    assert!(
        e.to_string().contains("disk \"two\" cannot be copied: the guest has released it"),
        "{e}"
    );
    assert_eq!((e.step, e.guest), (EpochStep::CopyDrives, RunState::Running), "{e}");
    guest.disks()[1].set_released(false);
    let report = checkpointer.take().unwrap();
    assert_eq!(report.disk_blocks, 10, "those of the one that failed, too");
    assert!(restored(&disk, report.epoch, false) == contents(guest.disks()));
}

#[test]
fn unreadable_drive_costs_an_epoch_and_no_block() {
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
    // A drive that is truncated without the guest noticing.
    drive.write(2 * PAGE_SIZE, &[2; 2 * BLOCK]).unwrap();
    drive.write(149 * PAGE_SIZE, &[2; 512]).unwrap();
    drive.truncate(140 * PAGE_SIZE).unwrap();
    let e = checkpointer.take().unwrap_err();
    assert!(e.to_string().contains("copying changed disk blocks failed"), "{e}");
    assert_eq!(e.guest, RunState::Running);
    drive.truncate(SIZES[0]).unwrap();
    drive.write(5 * PAGE_SIZE, &[3; 10]).unwrap();
    let report = checkpointer.take().unwrap();
    assert_eq!(report.disk_blocks, 4, "those of the one that failed, too");
    assert!(restored(&disk, report.epoch, false) == contents(guest.disks()));
}

#[test]
fn excluded_drives_are_not_touched() {
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
    // The next checkpointer includes the drives again, completely.
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    let report = checkpointer.take().unwrap();
    assert_eq!(report.disk_blocks, 10);
    assert!(restored(&disk, report.epoch, false) == contents(guest.disks()));
}
