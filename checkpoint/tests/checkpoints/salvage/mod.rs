//! Damaged stores on failing disks: what must not be lost.

use driftline_checkpoint::Checkpointer;
use driftline_guest::testing::image;
use driftline_guest::{GuestIdentity, VmId};
use driftline_store::testing::{DiskOp, MemoryDisk};
use driftline_store::{Backend, Store, StoreError};

mod survey;
mod unreadable;

use crate::common::stored::{
    self, StoreFixture, begins, numbers, open, repair, restored, stored, with_bad_sector,
};

#[test]
fn damaged_log_without_manifest_is_no_empty_store() {
    let StoreFixture { disk, guest, taken, .. } = stored(&[3, 3], 6);
    disk.remove("manifest").unwrap();
    // Sectors of the header, of the first epoch, of both, of the whole log.
    let log = disk.contents("log-1").unwrap();
    let first = begins(&log)[0];
    for bad in [0..1, first..first + 1, 0..first + 1, 0..log.len() / 512] {
        let disk = disk.copy();
        let mut log = log.clone();
        bad.clone().for_each(|sector| log[sector * 512 + 7] ^= 4);
        disk.put("log-1", log);
        let before: Vec<_> = disk.names().iter().map(|name| disk.contents(name).unwrap()).collect();
        let refused = Store::with_backend(Box::new(disk.clone()), true)
            .and_then(|store| Checkpointer::new(guest.clone(), store))
            .map(|mut checkpointer| checkpointer.take().map(drop));
        let e = refused.unwrap_err().to_string();
        assert!(e.contains("store repair /memory-disk"), "{bad:?}: {e}");
        let after: Vec<_> = disk.names().iter().map(|name| disk.contents(name).unwrap()).collect();
        assert!(before == after, "{bad:?}");
        if bad == (0..1) {
            repair(&disk).unwrap();
            assert!(taken.iter().all(|(epoch, memory)| restored(&disk, *epoch) == *memory));
        }
    }
}

#[test]
fn new_store_takes_no_name_that_is_taken() {
    let StoreFixture { disk, guest, .. } = stored(&[1], 1);
    // A log with only a header and a page file, without a manifest: a store that was never
    // finished.
    let (log, pages) = (disk.contents("log-1").unwrap(), disk.contents("pages-1").unwrap());
    disk.remove("manifest").unwrap();
    disk.remove("log-1").unwrap();
    disk.put("log-7", log[..512].to_vec());
    disk.put("pages-18446744073709551615", b"not a store's".to_vec());
    let mut checkpointer = Checkpointer::new(guest.clone(), open(&disk, true)).unwrap();
    let epoch = checkpointer.take().unwrap().epoch;
    assert_eq!(disk.contents("pages-1").unwrap(), pages);
    assert_eq!(disk.contents("log-7").unwrap(), log[..512]);
    assert!(disk.contents("log-8").is_ok() && disk.contents("pages-2").is_ok());
    assert_eq!(restored(&disk, epoch), image(&guest));
}

#[test]
fn store_that_cannot_be_made_leaves_nothing() {
    let guest = stored::guest(VmId::random());
    for op in [DiskOp::Create, DiskOp::Write, DiskOp::Sync, DiskOp::SyncDir, DiskOp::Rename] {
        for after in 0..3 {
            let disk = MemoryDisk::default();
            let mut checkpointer = Checkpointer::new(guest.clone(), open(&disk, true)).unwrap();
            disk.fail(op, libc::ENOSPC, after);
            if checkpointer.take().is_err() && disk.contents("manifest").is_err() {
                let left = disk.names().into_iter().filter(|name| name != "manifest.tmp");
                assert_eq!(left.count(), 0, "{op:?} {after}: {:?}", disk.names());
            }
            disk.heal();
            checkpointer.take().unwrap();
        }
    }
}

#[test]
fn flaky_sector_is_never_copied_in_part() {
    // A log that takes more than one read.
    let StoreFixture { disk, all, .. } = stored(&[3, 80], 90);
    let log = disk.contents("log-1").unwrap();
    assert!(log.len() > 96 << 10, "{} bytes", log.len());
    let begins = begins(&log);
    let (mut refused, mut copied) = (0, 0);
    // The fourth epoch is full: it can be copied although an earlier one is damaged.
    let damaged = with_bad_sector(&disk, begins[1], false);
    for sector in begins[3]..begins[5] {
        for after in 0.. {
            let disk = damaged.copy();
            let bytes = sector as u64 * 512..sector as u64 * 512 + 512;
            disk.fail_reads("log-1", bytes, after).unwrap();
            let repaired = repair(&disk);
            let failed = disk.failed_reads() > 0;
            disk.heal();
            match repaired {
                Err(e) => {
                    assert!(e.to_string().contains("Input/output error"), "{e}");
                    refused += 1;
                }
                Ok(_) => copied += 1,
            }
            for epoch in numbers_of(&disk) {
                assert!(restored(&disk, epoch) == all[&epoch], "{epoch}, {sector}, {after}");
            }
            if !failed {
                break;
            }
        }
    }
    assert!(refused > 0 && copied > 0, "{refused} {copied}");
}

/// Returns an empty list if the store was not repaired.
fn numbers_of(disk: &MemoryDisk) -> Vec<u64> {
    match disk.contents("log-2") {
        Ok(_) => numbers(disk),
        Err(_) => Vec::new(),
    }
}

#[test]
fn hole_across_the_oldest_checkpoint_is_a_loss() {
    // 6 is the oldest kept epoch, and 7 is full.
    let StoreFixture { disk, all, .. } = stored(&[6, 2], 3);
    assert_eq!(numbers(&disk), [6, 7, 8]);
    let mut log = disk.contents("log-1").unwrap();
    let begins = begins(&log);
    // The end of 5, and the beginning of 6.
    for sector in [begins[5] - 1, begins[5]] {
        log[sector * 512 + 9] ^= 4;
    }
    disk.put("log-1", log);
    let survey = open(&disk, false).survey().unwrap();
    assert_eq!(survey.verdict(), "2 of 3 checkpoints are sound; the latest sound one is 8");
    let lost = &survey.checkpoints[0];
    assert_eq!((lost.epoch, lost.last), (Some(6), None));
    let report = repair(&disk).unwrap();
    assert!(report.quarantined.iter().any(|name| name.ends_with(".pages-1")), "{report:?}");
    for epoch in [7, 8] {
        assert_eq!(restored(&disk, epoch), all[&epoch]);
    }
}

#[test]
fn range_of_lost_checkpoints_is_reported() {
    let StoreFixture { disk, .. } = stored(&[6, 2], 8);
    let mut log = disk.contents("log-1").unwrap();
    let begins = begins(&log);
    (begins[3]..begins[6]).for_each(|sector| log[sector * 512 + 9] ^= 4);
    disk.put("log-1", log);
    let survey = open(&disk, false).survey().unwrap();
    let lost = survey.checkpoints.iter().find(|c| c.damage.is_some()).unwrap();
    assert_eq!((lost.epoch, lost.last), (Some(4), Some(6)), "{survey:?}");
}

#[test]
fn refusal_of_the_system_is_no_damage() {
    let StoreFixture { disk, .. } = stored(&[3], 3);
    for errno in [libc::EMFILE, libc::ESTALE, libc::ENOTCONN, libc::ETIMEDOUT, libc::EACCES] {
        for after in 0..20 {
            let disk = disk.copy();
            disk.fail(DiskOp::Read, errno, after);
            let found = open_to_repair(&disk).and_then(|store| store.survey());
            disk.heal();
            match found {
                Ok(survey) => assert!(survey.is_sound(), "{errno} {after}: {survey:?}"),
                Err(e) => assert!(matches!(e, StoreError::Io { .. }), "{e}"),
            }
        }
    }
}

fn open_to_repair(disk: &MemoryDisk) -> Result<Store, StoreError> {
    Store::with_backend_to_repair(Box::new(disk.clone()))
}

#[test]
fn store_without_anything_sound_stays_as_it_is() {
    let StoreFixture { disk, .. } = stored(&[2], 2);
    let pages = disk.contents("pages-1").unwrap();
    disk.put("pages-1", vec![7; pages.len()]);
    let before = disk.names();
    let e = repair(&disk).unwrap_err().to_string();
    assert_eq!(
        e,
        "no checkpoint in /memory-disk is sound, so there is nothing to repair: nothing was changed"
    );
    assert_eq!(disk.names(), before);
}

#[test]
fn file_of_another_guest_is_refused() {
    let (ours, other) = (stored(&[3], 3).disk, stored(&[3], 3).disk);
    for name in ["log-1", "pages-1"] {
        let disk = ours.copy();
        disk.put(name, other.contents(name).unwrap());
        let before = disk.names();
        let e = repair(&disk).unwrap_err().to_string();
        assert!(e.starts_with(&format!("/memory-disk/{name} belongs to guest")), "{e}");
        assert_eq!(disk.names(), before);
    }
}

#[test]
fn renamed_log_keeps_its_first_chain() {
    let StoreFixture { disk, taken, .. } = stored(&[4], 4);
    disk.put("log-5", disk.contents("log-1").unwrap());
    disk.remove("log-1").unwrap();
    disk.remove("manifest").unwrap();
    assert_eq!(repair(&disk).unwrap().survey.sound, 4);
    assert!(taken.iter().all(|(epoch, memory)| restored(&disk, *epoch) == *memory));
}

#[test]
fn lossy_repair_keeps_unrelated_files() {
    let StoreFixture { disk, .. } = stored(&[4], 4);
    let disk = with_bad_sector(&disk, begins(&disk.contents("log-1").unwrap())[3], false);
    disk.put("log-9", vec![1; 2048]);
    disk.put("pages-9", vec![2; 8192]);
    let report = repair(&disk).unwrap();
    for name in ["damaged-1.log-9", "damaged-1.pages-9"] {
        assert!(report.quarantined.iter().any(|quarantined| quarantined == name), "{report:?}");
        assert!(disk.contents(name).is_ok());
    }
}

#[test]
fn store_in_use_is_not_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let guest = stored::guest(VmId::random());
    let store = Store::create_or_open(dir.path()).unwrap();
    let mut checkpointer = Checkpointer::new(guest, store).unwrap();
    checkpointer.take().unwrap();
    for removed in [false, true] {
        if removed {
            std::fs::remove_file(dir.path().join("lock")).unwrap();
        }
        let repaired = Store::open_to_repair(dir.path()).and_then(|store| store.repair());
        let e = repaired.unwrap_err();
        assert!(matches!(e, StoreError::InUse { .. }), "{e}");
    }
}

/// The rename was done, and its result cannot be read back.
#[test]
fn failed_repair_removes_nothing_that_it_cannot_judge() {
    let stored = stored(&[3, 4], 6);
    let begins = begins(&stored.disk.contents("log-1").unwrap());
    for lost in [false, true] {
        let damaged = match lost {
            true => with_bad_sector(&stored.disk, begins[5], false),
            false => stored.disk.copy(),
        };
        damaged.put("manifest", b"noise".to_vec());
        let before: Vec<Vec<u8>> = contents(&damaged);
        let mut reads = 0;
        loop {
            let disk = damaged.copy();
            disk.fail(DiskOp::Renamed, libc::EIO, 0);
            disk.fail(DiskOp::Read, libc::EMFILE, reads);
            let renamed = repair(&disk).unwrap_err().to_string().contains("renaming");
            disk.heal();
            let after = contents(&disk);
            assert!(before.iter().all(|file| after.contains(file)), "lost: {lost}, {reads} reads");
            // The new manifest, if it is there, names files that are there.
            assert!(open(&disk, false).survey().unwrap().sound >= 4);
            if renamed {
                assert!(!numbers(&disk).is_empty(), "lost: {lost}, {reads} reads");
                break;
            }
            reads += 1;
        }
    }
}

/// Nothing can be recovered, and the message says what is wrong.
#[test]
fn unrepairable_stores_are_distinguished() {
    let StoreFixture { disk, guest, .. } = stored(&[2], 2);
    let refusal = |disk: &MemoryDisk| {
        let before = contents(disk);
        let e = repair(disk).unwrap_err();
        assert!(before == contents(disk), "{e}");
        let survey = open(disk, false).survey().unwrap_err().to_string();
        assert_eq!(survey, e.to_string());
        e
    };
    let bend = |disk: &MemoryDisk, name: &str| {
        let mut bytes = disk.contents(name).unwrap();
        bytes[9] ^= 1;
        disk.put(name, bytes);
    };
    let without = disk.copy();
    without.remove("log-1").unwrap();
    let e = refusal(&without);
    assert!(e.to_string().contains("/memory-disk has lost its log (log-1)"), "{e}");
    let e = open(&without, false).epochs().unwrap_err();
    assert!(matches!(e, StoreError::NoLog { .. }), "{e}");
    without.remove("manifest").unwrap();
    let e = refusal(&without);
    assert!(e.to_string().contains("/memory-disk has lost its log, without which"), "{e}");

    let headers = disk.copy();
    ["manifest", "log-1", "pages-1"].iter().for_each(|name| bend(&headers, name));
    let e = refusal(&headers).to_string();
    assert!(e.contains("are all damaged or missing") && e.contains("from a backup"), "{e}");

    // The error for a writer names the damage and the repair command, which finds it.
    for (name, part) in [
        ("manifest", "because its manifest is damaged: /memory-disk/manifest, byte 0"),
        ("log-1", "because the header of its log is damaged: /memory-disk/log-1, byte 0"),
        ("pages-1", "because the header of its page file is damaged: /memory-disk/pages-1, byte 0"),
    ] {
        let disk = disk.copy();
        bend(&disk, name);
        let opened = Store::with_backend(Box::new(disk.clone()), true);
        let refused = opened.and_then(|store| Checkpointer::new(guest.clone(), store).map(drop));
        let e = refused.unwrap_err().to_string();
        assert!(e.contains(part), "{e}");
        assert!(e.contains("driftline store repair /memory-disk"), "{e}");
        assert_eq!(repair(&disk).unwrap().survey.sound, 2, "{name}");
    }
}

/// A manifest from a backup, whose files a log rotation or a compaction has replaced since.
#[test]
fn writer_removes_nothing_before_checking_named_files() {
    let StoreFixture { disk, guest, taken, .. } = stored(&[3], 3);
    let [manifest, log, pages] =
        ["manifest", "log-1", "pages-1"].map(|name| disk.contents(name).unwrap());
    open(&disk, true).compact().unwrap();
    disk.put("manifest", manifest);
    let bent = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes[9] ^= 1;
        bytes
    };
    let cases: [&[(&str, Vec<u8>)]; 5] = [
        &[],
        &[("pages-1", pages.clone())],
        &[("log-1", log.clone())],
        &[("log-1", bent(&log)), ("pages-1", pages.clone())],
        &[("log-1", log.clone()), ("pages-1", bent(&pages))],
    ];
    for files in cases {
        let disk = disk.copy();
        files.iter().for_each(|(name, bytes)| disk.put(name, bytes.clone()));
        let (names, before) = (disk.names(), contents(&disk));
        let opened = Store::with_backend(Box::new(disk.clone()), true);
        let refused = opened.and_then(|store| Checkpointer::new(guest.clone(), store).map(drop));
        assert!((names, before) == (disk.names(), contents(&disk)), "{files:?}");
        let e = refused.unwrap_err().to_string();
        assert!(e.contains("driftline store repair /memory-disk"), "{e}");
        if !files.iter().any(|(name, _)| *name == "log-1") {
            let e = open(&disk, false).epochs().unwrap_err().to_string();
            assert!(e.contains("names log-1, which is not there"), "{e}");
        }
        assert_eq!(repair(&disk).unwrap().survey.sound, 3);
        assert!(taken.iter().all(|(epoch, memory)| restored(&disk, *epoch) == *memory));
    }
}

/// A page file of another guest, and a manifest that names a missing one.
#[test]
fn refusal_names_the_other_guest_and_its_file() {
    let (one, other) = (stored(&[2], 2), stored(&[2], 2));
    one.disk.remove("pages-1").unwrap();
    one.disk.put("pages-2", other.disk.contents("pages-1").unwrap());
    let e = repair(&one.disk).unwrap_err().to_string();
    let [ours, theirs] = [one, other].map(|stored| stored.guest.vm_id());
    assert!(e.contains(&format!("pages-2 belongs to guest {theirs}")), "{e}");
    assert!(e.contains(&format!("as guest {ours}'s")), "{e}");
}

/// The store's writer is in a sync that does not end.
#[test]
fn survey_continues_without_a_pin() {
    let StoreFixture { disk, .. } = stored(&[3], 3);
    disk.fail(DiskOp::Lock, libc::ETIMEDOUT, 0);
    assert_eq!(open(&disk, false).survey().unwrap().sound, 3);
    disk.fail(DiskOp::Lock, libc::ENOLCK, 0);
    open(&disk, false).survey().unwrap_err();
}

/// A checkpoint that is copied without its predecessor copies no frame a second time.
#[test]
fn each_frame_is_copied_once() {
    let stored = stored(&[6], 6);
    let begins = begins(&stored.disk.contents("log-1").unwrap());
    // The state of the third is damaged: the fourth is copied without it.
    let damaged = with_bad_sector(&stored.disk, begins[3] - 2, false);
    assert_eq!(open(&damaged, false).survey().unwrap().sound, 5);
    let slots = damaged.contents("pages-1").unwrap().len() as u64 / 4096;
    let mut copied = 0;
    for slot in 1..slots {
        // One read to check whether it is sound, one to copy it.
        let repaired = |reads| {
            let disk = damaged.copy();
            disk.fail_reads("pages-1", slot * 4096..(slot + 1) * 4096, reads).unwrap();
            repair(&disk)
        };
        repaired(2).unwrap();
        copied += u64::from(repaired(1).is_err());
    }
    assert!(copied >= 6, "{copied} of {slots} slots were copied");
}

fn contents(disk: &MemoryDisk) -> Vec<Vec<u8>> {
    disk.names().iter().map(|name| disk.contents(name).unwrap()).collect()
}
