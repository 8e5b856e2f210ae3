//! Between the append of an epoch and its durability, no reader reads it. Its writer does not cut
//! it off once the store may belong to another writer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_checkpoint::{CheckpointError, Checkpointer, EpochReport, restore};
use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_guest::{Clock, GuestContents, VmId};
use driftline_store::testing::{DiskOp, MemoryDisk, Survives};
use driftline_store::{Store, StoreError};
use vm_memory::{Bytes, GuestAddress};

fn still() -> Arc<MemoryGuest> {
    MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap()
}

fn write(guest: &MemoryGuest, byte: u8) {
    for n in 0..20 {
        guest.ram().write_slice(&[byte; 4096], GuestAddress(n * PAGE_SIZE)).unwrap();
    }
}

fn store(disk: &MemoryDisk, writable: bool) -> Store {
    Store::with_backend(Box::new(disk.clone()), writable).unwrap()
}

fn checkpointer(guest: &Arc<MemoryGuest>, disk: &MemoryDisk) -> Result<Checkpointer, StoreError> {
    Checkpointer::new(guest.clone(), store(disk, true))
}

/// Returns the latest epoch, and the byte that fills its first frame.
fn latest(disk: &MemoryDisk) -> (u64, u8) {
    let factory = MemoryGuestFactory::default();
    let (guest, report) = restore(&store(disk, false), None, &factory, Clock::Continue).unwrap();
    (report.epoch, guest.ram().read_obj(GuestAddress(0)).unwrap())
}

/// Returns the log's name, and its length in bytes.
fn log(disk: &MemoryDisk) -> (String, usize) {
    let name = disk.names().into_iter().find(|name| name.starts_with("log-")).unwrap();
    let len = disk.contents(&name).unwrap().len();
    (name, len)
}

/// Lets syncs continue on drop, even if the test fails, which would otherwise hang.
struct ResumeSyncs<'d>(&'d MemoryDisk);

impl Drop for ResumeSyncs<'_> {
    fn drop(&mut self) {
        self.0.stall_syncs(false);
    }
}

/// Waits until `is_true`, at most for 20 seconds. Returns whether it has become true.
fn wait_until(is_true: impl Fn() -> bool) -> bool {
    let until = Instant::now() + Duration::from_secs(20);
    while !is_true() {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Takes an epoch, and runs `act` while the epoch is in the log and not durable.
fn while_appended(
    disk: &MemoryDisk,
    checkpointer: &mut Checkpointer,
    act: impl FnOnce(),
) -> Result<EpochReport, CheckpointError> {
    let before = log(disk);
    disk.stall_syncs_of(&before.0);
    std::thread::scope(|scope| {
        let taking = scope.spawn(|| checkpointer.take());
        let resume = ResumeSyncs(disk);
        let appended = wait_until(|| log(disk) != before || taking.is_finished());
        assert!(appended, "nothing is appended");
        act();
        drop(resume);
        taking.join().unwrap()
    })
}

/// Returns the latest epoch; checks that the reader has to wait until syncs continue.
fn latest_after_a_wait(disk: &MemoryDisk) -> (u64, u8) {
    let since = Instant::now();
    let wait = Duration::from_millis(100);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(wait);
            disk.stall_syncs(false);
        });
        let latest = latest(disk);
        assert!(since.elapsed() >= wait);
        latest
    })
}

#[test]
fn reader_sees_only_durable_epochs() {
    let (disk, guest) = (MemoryDisk::default(), still());
    let mut checkpointer = checkpointer(&guest, &disk).unwrap();
    for keep in [Some(1), None] {
        checkpointer.keep(keep);
        write(&guest, 1);
        let before = checkpointer.take().unwrap().epoch;
        write(&guest, 2);
        let report = while_appended(&disk, &mut checkpointer, || {
            if keep.is_none() {
                // The previous epoch is not dropped, and can be read.
                let report = store(&disk, false).verify(|epoch, _| assert!(epoch <= before));
                assert!(report.unwrap().epochs > 0);
            }
            assert_eq!(latest_after_a_wait(&disk), (before + 1, 2));
        });
        assert_eq!(report.unwrap().epoch, before + 1);
        // Now the commit fails.
        write(&guest, 3);
        disk.fail(DiskOp::Sync, libc::EIO, 1);
        while_appended(&disk, &mut checkpointer, || {
            if keep.is_none() {
                let report = store(&disk, false).verify(|epoch, _| assert!(epoch <= before + 1));
                assert!(report.unwrap().epochs > 0);
            }
            assert_eq!(
                latest_after_a_wait(&disk),
                (before + 1, 2),
                "what is cut off was never visible"
            );
        })
        .unwrap_err();
        disk.heal();
    }
    let last = checkpointer.take().unwrap().epoch;
    assert_eq!(latest(&disk.crash(Survives::Nothing)), (last, 3));
}

#[test]
fn writer_cuts_no_log_without_its_lock() {
    let (disk, guest) = (MemoryDisk::default(), still());
    let mut first = checkpointer(&guest, &disk).unwrap();
    first.keep(Some(1));
    write(&guest, 1);
    first.take().unwrap();
    write(&guest, 2);
    disk.fail(DiskOp::Sync, libc::EIO, 1);
    let mut appended = (String::new(), 0);
    while_appended(&disk, &mut first, || {
        appended = log(&disk);
        disk.take_lock_away();
    })
    .unwrap_err();
    disk.heal();
    assert_eq!(log(&disk), appended);
    // The writer still has the page file, until it notices.
    let e = checkpointer(&guest, &disk).unwrap_err();
    assert!(matches!(e, StoreError::InUse { .. }), "{e}");
    disk.take_lock_away();
    let e = first.take().unwrap_err().to_string();
    assert!(e.contains("was removed or replaced while this process held"), "{e}");
    let mut second = checkpointer(&guest, &disk).unwrap();
    // What was found is durable.
    assert_eq!(latest(&disk.crash(Survives::Nothing)), (2, 2));
    write(&guest, 4);
    second.take().unwrap();
    drop(second);
    assert_eq!(latest(&disk), (3, 4));
    write(&guest, 5);
    let last = first.take().unwrap().epoch;
    assert_eq!(latest(&disk), (last, 5));
    store(&disk, false).verify(|_, sound| assert!(sound.is_ok())).unwrap();
}

#[test]
fn epoch_is_taken_during_log_rotation() {
    let guest = still();
    let taken = |disk: &MemoryDisk, epochs: u8| {
        let mut checkpointer = checkpointer(&guest, disk).unwrap();
        checkpointer.keep(Some(1));
        checkpointer.log_bound(1);
        for n in 0..epochs {
            write(&guest, n + 1);
            checkpointer.take().unwrap();
        }
        checkpointer
    };
    let has_second = |disk: &MemoryDisk| disk.names().contains(&"log-2".to_owned());
    let needs = |epochs: &u8| {
        let disk = MemoryDisk::default();
        drop(taken(&disk, *epochs));
        has_second(&disk)
    };
    let epochs = (1..50).find(needs).unwrap();
    let disk = MemoryDisk::default();
    disk.stall_syncs_of("log-2");
    let mut checkpointer = taken(&disk, epochs);
    assert!(wait_until(|| has_second(&disk)), "the log is not rewritten");
    write(&guest, 99);
    let pages = || disk.contents("pages-1").unwrap();
    let has_it = || pages().chunks(4096).any(|page| page == [99; 4096]);
    std::thread::scope(|scope| {
        let taking = scope.spawn(|| checkpointer.take());
        let written = wait_until(has_it);
        disk.stall_syncs(false);
        taking.join().unwrap().unwrap();
        assert!(written, "it waited for the log");
    });
    assert_eq!(latest(&disk), (u64::from(epochs) + 1, 99));
}
