//! Archives: an exported epoch restores bit for bit, and nothing else restores.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use driftline_checkpoint::{Checkpointer, RestoreError, RestoreReport, restore_archive};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, image, repeats};
use driftline_guest::{Clock, GuestContents, Lifecycle, VmId};
use driftline_store::testing::{DiskOp, MemoryDisk, correct_record_file};
use driftline_store::{Archive, Backend, Damage, ExportReport, Store, StoreError};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

fn still(frames: [u64; 2]) -> Arc<MemoryGuest> {
    MemoryGuest::new(VmId::random(), MemoryConfig::still_of(frames)).unwrap()
}

fn exported(store: &Store, epoch: Option<u64>) -> (Vec<u8>, ExportReport) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let report = store.export_archive(epoch, file.as_file(), file.path()).unwrap();
    let bytes = fs::read(file.path()).unwrap();
    assert_eq!(bytes.len() as u64, report.bytes);
    (bytes, report)
}

fn open(bytes: &[u8]) -> Result<Archive, StoreError> {
    let disk = MemoryDisk::default();
    disk.put("archive", bytes.to_vec());
    Archive::with_file(disk.open("archive").unwrap(), Path::new("/somewhere/archive"))
}

type ArchiveRestore = (Arc<MemoryGuest>, RestoreReport);

fn restored(bytes: &[u8]) -> Result<ArchiveRestore, RestoreError> {
    restore_archive(&open(bytes)?, &MemoryGuestFactory::default(), Clock::Continue)
}

fn store_of(guest: &Arc<MemoryGuest>, write: impl Fn(u64)) -> (MemoryDisk, Store) {
    let disk = MemoryDisk::default();
    let store = Store::with_backend(Box::new(disk.clone()), true).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    for epoch in 1..=3 {
        write(epoch);
        checkpointer.take().unwrap();
    }
    drop(checkpointer);
    let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
    (disk, store)
}

/// Returns an archive of a guest of eight frames, of which three are not zeros.
fn small() -> Vec<u8> {
    let guest = still([4, 4]);
    let write = |epoch: u64| {
        let gfn = [1, 2, 0x1003][epoch as usize - 1];
        guest.ram().write_slice(&[epoch as u8; 4096], GuestAddress(gfn * 4096)).unwrap();
    };
    exported(&store_of(&guest, write).1, None).0
}

#[test]
fn every_archived_epoch_restores() {
    let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
    let (_disk, store) = store_of(&guest, |_| guest.wait_for_writes(100));
    guest.stop("done");
    let mut writes = 0;
    for info in store.epochs().unwrap() {
        let (bytes, exported) = exported(&store, Some(info.epoch));
        assert_eq!((exported.epoch, exported.vm_id), (info.epoch, info.vm_id));
        let archive = open(&bytes).unwrap();
        let there = *archive.info();
        assert_eq!((there.epoch, there.parent, there.full), (info.epoch, info.parent, info.full));
        assert_eq!(there.created_unix_ms, info.created_unix_ms);
        let verified = archive.verify().unwrap();
        assert_eq!((verified.epochs, verified.frames), (1, exported.frames));
        let (copy, report) = restored(&bytes).unwrap();
        copy.verify().unwrap();
        assert_eq!((report.epoch, report.vm_id), (info.epoch, info.vm_id));
        assert_eq!(
            (report.frames, report.epochs, report.unfetched_frames),
            (exported.frames, 1, 0)
        );
        assert!(copy.writes() > writes, "epochs follow each other");
        writes = copy.writes();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(repeats(16, 48)))]

    #[test]
    fn archived_memory_restores_exactly(
        runs in prop::collection::vec((0u64..3000, 1u64..600, any::<bool>(), 1u8..), 0..12),
    ) {
        let guest = still([1500, 1500]);
        let (_disk, store) = store_of(&guest, |epoch| {
            // A third of the runs before each epoch: some are written again later, with zeros too.
            let part = runs.iter().enumerate().filter(|(i, _)| *i as u64 % 3 == epoch - 1);
            for (_, (from, count, packs, byte)) in part {
                for frame in *from..(*from + *count).min(3000) {
                    let gfn = if frame < 1500 { frame } else { 0x1000 + frame - 1500 };
                    let mut coin = frame ^ u64::from(*byte) << 32;
                    let page: Vec<u8> = (0..4096).map(|_| {
                        coin = coin.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                        if *packs { *byte & 0xfe } else { (coin >> 56) as u8 }
                    }).collect();
                    guest.ram().write_slice(&page, GuestAddress(gfn * 4096)).unwrap();
                }
            }
        });
        let (bytes, _) = exported(&store, None);
        let (copy, report) = restored(&bytes).unwrap();
        let memory = image(&guest);
        prop_assert!(image(&copy) == memory);
        let frames = memory.chunks(4096).filter(|page| page.iter().any(|b| *b != 0)).count();
        prop_assert_eq!(report.frames, frames as u64, "zeros are not in it");
    }

    #[test]
    fn hostile_archive_is_refused_without_panic(
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = small();
        places.iter().for_each(|(at, byte)| { let at = at.index(bytes.len()); bytes[at] = *byte; });
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let _ = restored(&bytes);
        correct_record_file(&mut bytes);
        let verified = open(&bytes).and_then(|archive| archive.verify());
        // After `verify` has accepted the archive, only the guest may refuse it.
        if let (Ok(_), Err(RestoreError::Store(e))) = (verified, restored(&bytes)) {
            panic!("{e}");
        }
    }
}

#[test]
fn flipped_bit_is_refused_with_its_place() {
    let sound = small();
    let memory = image(&restored(&sound).unwrap().0);
    assert!(memory[4096..8192] == [1; 4096] && memory[7 * 4096..] == [3; 4096]);
    for at in 0..sound.len() {
        for bit in 0..8 {
            let mut bent = sound.clone();
            bent[at] ^= 1 << bit;
            let Err(RestoreError::Store(e)) = restored(&bent) else {
                panic!("bit {bit} of byte {at}: restored, or refused by the guest");
            };
            let StoreError::Damaged { file, offset, .. } = &e else { panic!("{e}") };
            assert!(file.ends_with("archive") && *offset <= at as u64, "byte {at}: {e}");
            assert!(open(&bent).and_then(|archive| archive.verify()).is_err(), "byte {at}");
        }
    }
}

#[test]
fn truncated_or_grown_archive_is_refused() {
    let sound = small();
    for len in 0..sound.len() {
        let e = open(&sound[..len]).unwrap_err();
        let StoreError::Damaged { damage: Damage::EndsEarly { length, .. }, .. } = e else {
            panic!("{len}: {e}");
        };
        assert_eq!(length, len as u64);
    }
    for more in [&b"x"[..], &[0; 4096], &sound[64..]] {
        let e = open(&[&sound[..], more].concat()).unwrap_err().to_string();
        assert!(e.contains("the length of the file is "), "{e}");
    }
}

#[test]
fn disk_failure_is_no_damage() {
    let disk = MemoryDisk::default();
    disk.put("archive", small());
    let open = || Archive::with_file(disk.open("archive").unwrap(), Path::new("archive"));
    let reads = (0..).find(|after| {
        disk.fail(DiskOp::Read, libc::EIO, *after);
        let verified = open().and_then(|archive| archive.verify());
        if let Err(e) = &verified {
            assert!(matches!(e, StoreError::Io { .. }), "{e}");
        }
        disk.heal();
        verified.is_ok()
    });
    assert!(reads.unwrap() > 8, "each record is read");
}

/// Returns the beginning and the tag of each record.
fn records(archive: &[u8]) -> Vec<(usize, u16)> {
    let (mut at, mut found) = (64, Vec::new());
    while at < archive.len() {
        found.push((at, u16::from_le_bytes([archive[at], archive[at + 1]])));
        let length = u32::from_le_bytes(archive[at + 8..at + 12].try_into().unwrap());
        at += 24 + length as usize;
    }
    found
}

#[test]
fn every_field_that_the_format_fixes_is_checked() {
    let sound = small();
    let mut again = sound.clone();
    correct_record_file(&mut again);
    assert!(again == sound, "correction changes nothing in a sound file");
    let places = records(&sound);
    let of = |tag: u16| places.iter().find(|(_, found)| *found == tag).unwrap().0;
    let (epoch, layout, config) = (of(0x8011), of(0x8012), of(1));
    let (contents, end) = (of(0x8020), of(0x80fe));
    let packed = contents + 24 + 8 + 2 * 16 + 3 * 4;
    let refused = |at: usize, bytes: &[u8], why: &str| {
        let mut bent = sound.clone();
        bent[at..at + bytes.len()].copy_from_slice(bytes);
        correct_record_file(&mut bent);
        match restored(&bent) {
            Err(RestoreError::Store(e)) if e.to_string().contains(why) => {}
            Err(e) => panic!("{why}: {e}"),
            Ok(_) => panic!("{why}: restored"),
        }
    };
    refused(0, b"DRIFTLOG", "not a Driftline archive");
    refused(8, &[2], "format version 2 is not the version 1");
    refused(12, &[0, 0x20], "its page size is 8192 bytes");
    refused(16, &[1], "it requires feature bits 0x1");
    refused(48, &[9], "the checkpoint's number in the header is 9 and should be 3");
    refused(56, &[!sound[56]], "the layout in the header is ");
    refused(epoch + 2, &[3], "the undefined part of a record's head");
    refused(epoch + 4, &[1], "the instance of a record that has none");
    refused(epoch + 24 + 28, &[0], "the flag that the checkpoint has all of memory is 0");
    // The header announces drives, and there are none.
    refused(epoch + 24 + 28, &[3], "has no place here");
    refused(epoch, &[0x12], "a record of tag 0x8012 has no place here");
    refused(layout + 24 + 8, &[1], "the memory layout");
    refused(config, &[2], "a record of tag 0x0002 has no place here");
    refused(contents + 4, &[1], "it has pages of object 1, which the checkpoint does not have");
    refused(contents + 24, &[0], "a record of pages has no runs");
    refused(contents + 24, &[0xff, 0xff, 0xff, 0xff], "the length of a run table");
    refused(contents + 24 + 8, &[9], "are not in guest memory");
    refused(contents + 24 + 8 + 8, &[0xff; 8], "are not in guest memory");
    refused(contents + 24 + 8 + 16, &[1, 0], "the runs of a record ascend");
    refused(packed, &[0], "cannot be decompressed");
    refused(end + 24, &[2], "the checkpoint's number at its end is 2");
    refused(end + 24, &[0xff; 8], "a checkpoint's number is 18446744073709551615");
    refused(end, &[0xff], "a record of tag 0x80ff has no place here");
    // Lengths are checked against the limit of their record before the file's length.
    for (at, limit) in [(config, 64 << 10), (contents, 2_123_784), (end, 24)] {
        let mut bent = sound.clone();
        bent[at + 8..at + 12].copy_from_slice(&(limit as u32 + 1).to_le_bytes());
        let crc = crc32c::crc32c(&bent[at..at + 20]);
        bent[at + 20..at + 24].copy_from_slice(&crc.to_le_bytes());
        let e = open(&bent).unwrap_err().to_string();
        assert!(e.contains(&format!("more than the {limit} allowed")), "{e}");
    }
}

#[test]
fn record_unpacks_to_exactly_its_frames() {
    let sound = small();
    let contents = records(&sound).iter().find(|(_, tag)| *tag == 0x8020).unwrap().0;
    let packed = contents + 24 + 8 + 2 * 16 + 3 * 4;
    let end = records(&sound).last().unwrap().0;
    // A GiB of zeros in some kilobytes; one byte too many; one too few; nothing.
    for (bytes, why) in [(1 << 30, ""), (12_289, ""), (12_287, "they are 12287 bytes"), (0, "")] {
        let zeros = zstd::bulk::compress(&vec![0; bytes], 1).unwrap();
        assert!(zeros.len() < 1 << 20);
        let mut bent = [&sound[..packed], &zeros, &sound[end..]].concat();
        let length = (packed + zeros.len() - contents - 24) as u32;
        bent[contents + 8..contents + 12].copy_from_slice(&length.to_le_bytes());
        correct_record_file(&mut bent);
        let e = restored(&bent).unwrap_err().to_string();
        let whole = format!("the compressed contents of 3 pages cannot be decompressed: {why}");
        assert!(e.contains(&whole), "{bytes}: {e}");
    }
}

#[test]
fn optional_record_is_skipped() {
    let sound = small();
    let contents = records(&sound).iter().find(|(_, tag)| *tag == 0x8020).unwrap().0;
    let mut more = vec![0; 24 + 5];
    (more[0], more[1], more[8]) = (0x30, 0x80, 5);
    let mut longer = [&sound[..contents], &more, &sound[contents..]].concat();
    correct_record_file(&mut longer);
    let (guest, _) = restored(&longer).unwrap();
    assert!(image(&guest) == image(&restored(&sound).unwrap().0));
    longer[contents + 2] = 1;
    correct_record_file(&mut longer);
    let e = restored(&longer).unwrap_err().to_string();
    assert!(e.contains("a record of tag 0x8030 has no place here"), "{e}");
}

#[test]
fn damaged_store_gives_no_archive() {
    let guest = still([40, 4]);
    let fill = |epoch: u64| {
        guest.ram().write_slice(&[7; 4096 * 30], GuestAddress(epoch * 4096)).unwrap();
    };
    let (disk, store) = store_of(&guest, fill);
    let mut pages = disk.contents("pages-1").unwrap();
    let last = pages.chunks(4096).rposition(|page| page == [7; 4096]).unwrap();
    pages[last * 4096 + 100] ^= 1;
    disk.put("pages-1", pages);
    let file = tempfile::NamedTempFile::new().unwrap();
    let e = store.export_archive(None, file.as_file(), file.path()).unwrap_err();
    assert!(matches!(e, StoreError::Damaged { damage: Damage::Frame { .. }, .. }), "{e}");
    let full = File::options().write(true).open("/dev/full").unwrap();
    let e = store.export_archive(Some(1), &full, Path::new("/dev/full")).unwrap_err();
    assert!(e.to_string().starts_with("writing /dev/full failed"), "{e}");
}

/// A thread that panics at any of the reads ends the export: no other thread waits for its turn for
/// ever.
#[test]
fn panic_while_packing_ends_the_export() {
    // Several pieces for each thread, none of which compresses to nothing.
    let guest = still([4096, 4]);
    let fill = |epoch: u64| {
        let page = |i: u64| [(i * 7 + epoch) as u8; 4096];
        (0..4096).for_each(|i| {
            guest.ram().write_slice(&page(i), GuestAddress(i * 4096)).unwrap();
        });
    };
    let (disk, store) = store_of(&guest, fill);
    let mut panics = 0;
    for read in 0.. {
        let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
        disk.panic_at(DiskOp::Read, read);
        let (to, ended) = std::sync::mpsc::channel();
        let export = std::thread::spawn(move || {
            let file = tempfile::NamedTempFile::new().unwrap();
            let export = || store.export_archive(None, file.as_file(), file.path()).map(drop);
            let _ = to.send(std::panic::catch_unwind(std::panic::AssertUnwindSafe(export)));
        });
        let ended = ended.recv_timeout(Duration::from_secs(60));
        match ended.unwrap_or_else(|e| panic!("read {read}: the export hangs: {e}")) {
            Ok(done) => {
                done.unwrap();
                break;
            }
            Err(_) => panics += 1,
        }
        export.join().unwrap();
    }
    disk.heal();
    exported(&store, None);
    assert!(panics >= 8, "{panics} reads");
}

fn golden() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/archive-v1/epoch-3")
}

#[test]
fn the_archive_of_version_1_restores() {
    let small = fs::read(golden().with_file_name("small")).unwrap();
    assert!(image(&restored(&small).unwrap().0)[4096..8192] == [1; 4096]);
    let archive = Archive::open(&golden()).unwrap();
    let info = *archive.info();
    assert_eq!((info.epoch, info.parent, info.frames), (3, Some(2), 531));
    let factory = MemoryGuestFactory::default();
    let (guest, report) = restore_archive(&archive, &factory, Clock::Continue).unwrap();
    assert_eq!(report.frames, 531);
    let memory = image(&guest);
    for (n, page) in memory.chunks(4096).enumerate() {
        let byte = match n {
            10..=539 => (n % 250) as u8 + 1,
            1499 => 9,
            _ => 0,
        };
        assert!(page.iter().all(|found| *found == byte), "frame {n}");
    }
}

/// Run by hand when a new version is released, into a new file.
#[test]
#[ignore = "writes the golden archive"]
fn write_the_golden_archive() {
    let guest = still([1000, 500]);
    let (_disk, store) = store_of(&guest, |epoch| match epoch {
        1 => (10..540).for_each(|n| {
            let page = [(n % 250) as u8 + 1; 4096];
            guest.ram().write_slice(&page, GuestAddress(n * 4096)).unwrap();
        }),
        2 => guest.ram().write_slice(&[9; 4096], GuestAddress((0x1000 + 499) * 4096)).unwrap(),
        _ => guest.ram().write_slice(&[0; 4096], GuestAddress(4096)).unwrap(),
    });
    fs::create_dir_all(golden().parent().unwrap()).unwrap();
    fs::write(golden(), exported(&store, None).0).unwrap();
    // Seeds the fuzzing corpus, together with the archive above.
    fs::write(golden().with_file_name("small"), small()).unwrap();
}
