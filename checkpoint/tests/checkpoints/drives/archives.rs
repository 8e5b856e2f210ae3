//! Drives in archives.

use super::*;
use driftline_guest::GuestContents;

/// Returns the archive of the latest epoch on `disk`.
fn archived(disk: &MemoryDisk) -> (tempfile::NamedTempFile, Archive) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let store = on(disk, false);
    assert_eq!(
        store.export_archive(None, file.as_file(), file.path()).unwrap().drives,
        0,
        "no drive is skipped"
    );
    let archive = Archive::open(file.path()).unwrap();
    (file, archive)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn archive_has_the_drives(
        writes in prop::collection::vec(
            (0usize..2, any::<prop::sample::Index>(), 1usize..9 * BLOCK, 0u8..4),
            0..30,
        ),
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

/// An archive with drives in which a bit is flipped, or which is truncated, restores nothing and
/// writes to no drive. Neither does one whose checksums match but whose content makes no sense.
#[test]
fn unsound_archive_leaves_drives_unchanged() {
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
    // Records by where they begin: EPOCH, LAYOUT, CONFIGURATION, DRIVES, state, CONTENTS of memory
    // and each drive.
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
        (drives + 24, &[0; 8], "its size is 0 or too large"),
        (drives + 24 + 8, b"two", "another drive has the same name"),
        (drives + 24, &[0, 0x10], "this guest has no such drive"),
        (blocks[1] + 4, &[3], "pages of object 3, which the checkpoint does not have"),
        (blocks[1] + 4, &[2], "the runs of a record ascend"),
        (blocks[2] + 4, &[1], "the runs of a record ascend"),
        (blocks[2] + 24 + 8, &[7], "blocks 0x7..0x8 are not in drive 2"),
    ] {
        let mut bent = sound.clone();
        bent[at..at + bytes.len()].copy_from_slice(bytes);
        driftline_store::testing::correct_record_file(&mut bent);
        let said = refused(bent);
        assert!(said.contains(why), "{why}: {said}");
    }
}

#[test]
fn export_reports_missing_drives() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.disks()[0].write(0, &[1; 10 * BLOCK]).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    let with = checkpointer.take().unwrap().epoch;
    drop(checkpointer);
    let store = on(&disk, false);
    let file = tempfile::NamedTempFile::new().unwrap();
    assert_eq!(store.export_raw(Some(with), file.as_file(), file.path()).unwrap().drives, 2);
    // An epoch without drives is archived, whatever drives the guest has.
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
