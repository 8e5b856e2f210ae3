//! What a damaged store must not lose, however else the disk fails.
#![allow(clippy::unwrap_used)]

use checkpoint::testing::{DiskOp, MemoryDisk};
use checkpoint::{Backend, Checkpointer, Store, VmId};

#[path = "common/stored.rs"]
mod stored;

use stored::{Stored, begins, image, numbers, open, repair, restored, stored, with_bad_sector};

#[test]
fn damaged_log_without_manifest_is_no_empty_store() {
    let Stored { disk, guest, taken, .. } = stored(&[3, 3], 6);
    disk.remove("manifest").unwrap();
    // Of the header, of the first epoch, of both, of all that there is.
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
    let Stored { disk, guest, .. } = stored(&[1], 1);
    // A log of a header alone and a page file, without a manifest: a store that was never finished.
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
fn sector_read_only_sometimes_is_never_copied_in_part() {
    // A log that is not read at once.
    let Stored { disk, all, .. } = stored(&[3, 80], 90);
    let log = disk.contents("log-1").unwrap();
    assert!(log.len() > 96 << 10, "{} bytes", log.len());
    let begins = begins(&log);
    let (mut refused, mut copied) = (0, 0);
    // The fourth epoch is full: it can be copied although one in front of it is damaged.
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

/// None if the store was not repaired.
fn numbers_of(disk: &MemoryDisk) -> Vec<u64> {
    match disk.contents("log-2") {
        Ok(_) => numbers(disk),
        Err(_) => Vec::new(),
    }
}
