//! Dropped epochs, reused slots, rewritten logs and page files: everything kept is complete.

use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use driftline_checkpoint::{Checkpointer, restore};
use driftline_dirty_tracker::{Gfn, PAGE_SIZE};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, image};
use driftline_guest::{Clock, GuestContents, VmId};
use driftline_store::testing::{DiskOp, MemoryDisk};
use driftline_store::{Backend, RangeLock, Store, StoreError};
use vm_memory::{Bytes, GuestAddress};

/// Creates a guest of 1,024 frames that only the test writes to.
fn still() -> Arc<MemoryGuest> {
    MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap()
}

fn write(guest: &MemoryGuest, n: u64, value: u64) {
    let gfn = if n < 300 { n } else { 0x400 + n - 300 };
    guest.ram().write_slice(&[value as u8; 4096], GuestAddress(gfn * PAGE_SIZE)).unwrap();
    guest.ram().write_obj(value, GuestAddress(gfn * PAGE_SIZE)).unwrap();
}

fn open(disk: &MemoryDisk, writable: bool) -> Store {
    Store::with_backend(Box::new(disk.clone()), writable).unwrap()
}

fn restored(store: &Store, epoch: u64) -> Vec<u8> {
    let factory = MemoryGuestFactory::default();
    image(&restore(store, Some(epoch), &factory, Clock::Continue).unwrap().0)
}

fn numbers(store: &Store) -> Vec<u64> {
    store.epochs().unwrap().iter().map(|e| e.epoch).collect()
}

fn keeping(guest: &Arc<MemoryGuest>, disk: &MemoryDisk, keep: u64) -> Checkpointer {
    let mut checkpointer = Checkpointer::new(guest.clone(), open(disk, true)).unwrap();
    checkpointer.keep(Some(keep));
    checkpointer
}

#[test]
fn requested_number_of_epochs_is_kept() {
    for keep in [1, 2, 5] {
        let (disk, guest) = (MemoryDisk::default(), still());
        let mut checkpointer = keeping(&guest, &disk, keep);
        let mut images = Vec::new();
        for round in 1..=12u64 {
            (0..40).for_each(|n| write(&guest, (round * 31 + n * n) % 1024, round));
            assert_eq!(checkpointer.take().unwrap().epoch, round);
            images.push(image(&guest));
            let store = open(&disk, false);
            let first = round.saturating_sub(keep - 1).max(1);
            assert_eq!(numbers(&store), (first..=round).collect::<Vec<_>>());
            for epoch in first..=round {
                assert!(
                    restored(&store, epoch) == images[epoch as usize - 1],
                    "{epoch} of {round}"
                );
            }
            if first > 1 {
                let factory = MemoryGuestFactory::default();
                let e = restore(&store, Some(first - 1), &factory, Clock::Continue).unwrap_err();
                assert!(
                    e.to_string().ends_with(&format!("has no checkpoint {}", first - 1)),
                    "{e}"
                );
            }
            store.verify(|_, _| ()).unwrap();
        }
    }
}

#[test]
fn warm_store_does_not_grow() {
    let (disk, guest) = (MemoryDisk::default(), still());
    let mut checkpointer = keeping(&guest, &disk, 5);
    checkpointer.log_bound(64 << 10);
    let size = || -> (usize, usize) {
        let len = |prefix: &str| {
            let names = disk.names();
            let of = names.iter().filter(|name| name.starts_with(prefix));
            of.map(|name| disk.contents(name).unwrap().len()).sum()
        };
        (len("pages-"), len("log-"))
    };
    let (mut warm, mut longest) = ((0, 0), 0);
    for round in 0..400u64 {
        // All frames at first, then 100 in each round, at other places.
        let count = if round == 0 { 1024 } else { 100 };
        (0..count).for_each(|n| write(&guest, (round * 97 + n * 13) % 1024, round + 1));
        checkpointer.take().unwrap();
        if round == 100 {
            (warm, longest) = (size(), 0);
        }
        longest = longest.max(size().1);
    }
    assert_eq!(size().0, warm.0, "the page file");
    // All of memory, and what five epochs and one more wrote.
    assert!(warm.0 < (1024 + 1100) * 4096, "{} bytes of pages", warm.0);
    assert!(longest < 3 * (64 << 10), "{longest} bytes of log");
    assert!(disk.names().iter().any(|name| name != "log-1" && name.starts_with("log-")));
    let store = open(&disk, false);
    assert_eq!(numbers(&store), [396, 397, 398, 399, 400]);
    assert!(restored(&store, 400) == image(&guest));
    store.verify(|_, _| ()).unwrap();
}

#[test]
fn pinned_epoch_and_later_ones_are_kept() {
    let (disk, guest) = (MemoryDisk::default(), still());
    let mut checkpointer = keeping(&guest, &disk, 2);
    let mut take = |value: u64| {
        (0..50).for_each(|n| write(&guest, (value * 7 + n) % 1024, value));
        checkpointer.take().unwrap();
        image(&guest)
    };
    let images: Vec<Vec<u8>> = (1..=4).map(&mut take).collect();
    // As a reader does.
    let reader = disk.open("pages-1").unwrap();
    assert!(reader.lock_range(3..4, RangeLock::Shared).unwrap());
    let other = disk.open("pages-1").unwrap();
    assert!(other.lock_range(3..4, RangeLock::Shared).unwrap(), "two may read one");
    (5..=9).for_each(|value| drop(take(value)));
    let store = open(&disk, false);
    assert_eq!(numbers(&store), [3, 4, 5, 6, 7, 8, 9]);
    assert!(restored(&store, 3) == images[2]);
    drop(reader);
    take(10);
    assert_eq!(numbers(&store).first(), Some(&3), "one still reads it");
    assert!(restored(&store, 3) == images[2]);
    drop(other);
    take(11);
    assert_eq!(numbers(&store), [10, 11]);
}

#[test]
fn late_retention_limit_frees_superseded_slots() {
    let (disk, guest) = (MemoryDisk::default(), still());
    let mut checkpointer = Checkpointer::new(guest.clone(), open(&disk, true)).unwrap();
    let take = |checkpointer: &mut Checkpointer, round: u64| {
        (0..200).for_each(|n| write(&guest, (round * 31 + n) % 1024, round));
        checkpointer.take().unwrap();
        (disk.contents("pages-1").unwrap().len(), image(&guest))
    };
    let mut warm = 0;
    for round in 1..=20 {
        if round == 10 {
            // Epochs left by another process.
            drop(checkpointer);
            checkpointer = Checkpointer::new(guest.clone(), open(&disk, true)).unwrap();
        }
        warm = take(&mut checkpointer, round).0;
    }
    assert_eq!(numbers(&open(&disk, false)).len(), 20);
    checkpointer.keep(Some(2));
    take(&mut checkpointer, 21);
    checkpointer.keep(None);
    (22..=25).for_each(|round| drop(take(&mut checkpointer, round)));
    assert_eq!(numbers(&open(&disk, false)).len(), 6);
    checkpointer.keep(Some(2));
    let mut before = Vec::new();
    for round in 26..=60 {
        let (size, now) = take(&mut checkpointer, round);
        assert_eq!(size, warm, "what was superseded is used again");
        let store = open(&disk, false);
        assert_eq!(numbers(&store), [round - 1, round]);
        assert!(restored(&store, round) == now);
        assert!(round == 26 || restored(&store, round - 1) == before);
        before = now;
    }
    drop(checkpointer);
    open(&disk, true).compact().unwrap();
    let compact: usize = disk.contents("pages-2").unwrap().len();
    assert!(compact < (1 + 1024 + 200 + 1) * 4096, "{compact}");
}

#[test]
fn nondurable_epoch_is_not_read() {
    let (disk, guest) = (MemoryDisk::default(), still());
    let mut checkpointer = keeping(&guest, &disk, 5);
    let mut ends = Vec::new();
    for round in 1..=3 {
        write(&guest, 7, round);
        checkpointer.take().unwrap();
        ends.push(disk.contents("log-1").unwrap().len() as u64);
    }
    drop(checkpointer);
    let store = open(&disk, false);
    let latest = || {
        let factory = MemoryGuestFactory::default();
        restore(&store, None, &factory, Clock::Continue).unwrap().1.epoch
    };
    // As a writer does that has appended the third epoch, and waits for the disk.
    let writer = disk.open_for_writing("pages-1").unwrap();
    assert!(writer.lock_range(3..4, RangeLock::Exclusive).unwrap());
    assert_eq!(store.verify(|epoch, _| assert!(epoch < 3)).unwrap().epochs, 2);
    let wait = std::time::Duration::from_millis(100);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(wait);
            assert!(writer.lock_range(3..4, RangeLock::Free).unwrap());
        });
        let since = std::time::Instant::now();
        assert_eq!(latest(), 3);
        assert!(since.elapsed() >= wait);
    });
    // Now the commit fails, while a reader waits.
    assert!(writer.lock_range(3..4, RangeLock::Exclusive).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(wait);
            disk.open_for_writing("log-1").unwrap().truncate(ends[1]).unwrap();
            assert!(writer.lock_range(3..4, RangeLock::Free).unwrap());
        });
        assert_eq!(latest(), 2);
    });
}

#[test]
fn allocation_of_existing_space_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = driftline_store::DirBackend::open(dir.path()).unwrap().create("pages").unwrap();
    for (asked, len) in [(8192, 8192), (8192, 8192), (4096, 8192), (12_288, 12_288)] {
        file.allocate(asked).unwrap();
        assert_eq!(file.len().unwrap(), len);
    }
}

#[test]
fn direct_io_stores_the_same_epochs() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
    let store = Store::create_or_open_direct(dir.path()).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    checkpointer.keep(Some(3));
    for _ in 0..8 {
        checkpointer.take().unwrap();
    }
    let store = Store::open(dir.path()).unwrap();
    store.verify(|_, _| ()).unwrap();
    for kept in store.epochs().unwrap() {
        let factory = MemoryGuestFactory::default();
        let (copy, _) = restore(&store, Some(kept.epoch), &factory, Clock::Continue).unwrap();
        copy.verify().unwrap();
    }
}

#[test]
fn direct_and_cached_writes_are_coherent() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let file =
        driftline_store::DirBackend::open(dir.path()).unwrap().direct().create("pages").unwrap();
    let bytes: Vec<u8> = (0..3 * 4096u32).map(|n| (n % 251) as u8).collect();
    let aligned = bytes.as_ptr().align_offset(4096);
    for (from, offset) in [(aligned, 4096), (aligned + 1, 8192), (aligned, 12_289)] {
        let written = &bytes[from..from + 4096];
        file.write_all_at(written, offset).unwrap();
        let mut read = vec![0; 4096];
        file.read_exact_at(&mut read, offset).unwrap();
        assert_eq!(read, written, "from {from} to {offset}");
    }
    assert_eq!(file.len().unwrap(), 12_289 + 4096);
}

#[test]
fn restore_beside_a_writer_is_whole_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = MemoryConfig { writes_per_s: 0, ..MemoryConfig::small() };
    let guest = MemoryGuest::start(config).unwrap();
    let store = Store::create_or_open(dir.path()).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    checkpointer.keep(Some(2));
    checkpointer.log_bound(32 << 10);
    checkpointer.take().unwrap();
    let done = &AtomicBool::new(false);
    let whole = [const { AtomicU64::new(0) }; 3];
    std::thread::scope(|scope| {
        let dir = &dir;
        let reading: Vec<_> = whole
            .iter()
            .map(|whole| {
                scope.spawn(move || {
                    while !done.load(Ordering::Relaxed) {
                        let store = Store::open(dir.path()).unwrap();
                        let factory = MemoryGuestFactory::default();
                        let (copy, _) = restore(&store, None, &factory, Clock::Continue).unwrap();
                        copy.verify().unwrap();
                        let oldest = store.epochs().unwrap()[0].epoch;
                        match restore(&store, Some(oldest), &factory, Clock::Continue) {
                            Ok((copy, _)) => copy.verify().unwrap(),
                            Err(e) => assert!(e.to_string().contains("has no checkpoint"), "{e}"),
                        }
                        store.verify(|_, _| ()).unwrap();
                        whole.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let read_twice = || whole.iter().all(|n| n.load(Ordering::Relaxed) >= 2);
        let has_failed = || reading.iter().any(|reader| reader.is_finished());
        // Each reader restores twice beside the writer, however slow it is.
        let (mut epochs, mut taken) = (0, Ok(()));
        while taken.is_ok() && (epochs < 150 || !(read_twice() || has_failed())) {
            taken = checkpointer.take().map(drop);
            epochs += 1;
        }
        // Before a failure is reported, because the readers would otherwise not end.
        done.store(true, Ordering::Relaxed);
        taken.unwrap();
        reading.into_iter().for_each(|reader| reader.join().unwrap());
    });
    // The readers have ended: only what must be kept is left.
    checkpointer.take().unwrap();
    assert_eq!(Store::open(dir.path()).unwrap().epochs().unwrap().len(), 2);
}

#[test]
fn readonly_store_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let guest = still();
    write(&guest, 5, 5);
    let store = Store::create_or_open(dir.path()).unwrap();
    Checkpointer::new(guest.clone(), store).unwrap().take().unwrap();
    for file in std::fs::read_dir(dir.path()).unwrap() {
        let path = file.unwrap().path();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o444)).unwrap();
    }
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
    let store = Store::open(dir.path()).unwrap();
    assert!(restored(&store, 1) == image(&guest));
    store.verify(|_, _| ()).unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn compaction_keeps_epochs_and_removes_holes() {
    let (disk, guest) = (MemoryDisk::default(), still());
    let mut checkpointer = keeping(&guest, &disk, 3);
    let mut images = Vec::new();
    for round in 1..=20u64 {
        // Much content at first, which becomes zeros.
        (0..400).for_each(|n| write(&guest, n, u64::from(round == 1)));
        (0..30).for_each(|n| write(&guest, (round * 11 + n * 3) % 900, round));
        checkpointer.take().unwrap();
        images.push(image(&guest));
    }
    drop(checkpointer);
    let before = open(&disk, false).epochs().unwrap();
    let read_only = open(&disk, false).compact().unwrap_err();
    assert!(matches!(read_only, StoreError::ReadOnly { .. }), "{read_only}");
    let report = open(&disk, true).compact().unwrap();
    assert!(report.after_bytes < report.before_bytes / 2, "{report:?}");
    assert_eq!(disk.names(), ["log-2", "manifest", "pages-2"]);
    let store = open(&disk, false);
    let after = store.epochs().unwrap();
    let told = |e: &driftline_store::EpochInfo| (e.epoch, e.parent, e.frames, e.zero_frames);
    assert_eq!(
        after.iter().map(told).collect::<Vec<_>>(),
        before.iter().map(told).collect::<Vec<_>>()
    );
    for epoch in 18..=20 {
        assert!(restored(&store, epoch) == images[epoch as usize - 1]);
    }
    store.verify(|_, _| ()).unwrap();
    // A second compaction saves nothing more, and the store remains usable.
    let again = open(&disk, true).compact().unwrap();
    assert_eq!((again.epochs, again.after_bytes), (3, report.after_bytes));
    let mut checkpointer = keeping(&guest, &disk, 3);
    write(&guest, 1, 99);
    assert_eq!(checkpointer.take().unwrap().epoch, 21);
    assert!(restored(&open(&disk, false), 21) == image(&guest));
}

#[test]
fn crash_during_compaction_leaves_one_whole_store() {
    use driftline_store::testing::Survives;
    let (disk, guest) = (MemoryDisk::default(), still());
    let mut checkpointer = keeping(&guest, &disk, 2);
    let mut images = Vec::new();
    for round in 1..=6u64 {
        (0..40).for_each(|n| write(&guest, (round * 11 + n * 3) % 900, round));
        checkpointer.take().unwrap();
        images.push(image(&guest));
    }
    drop(checkpointer);
    let mut stop = 0;
    loop {
        let disk = disk.crash(Survives::Everything);
        disk.stop_at_sync(stop);
        let compacted = open(&disk, true).compact();
        for how in
            [Survives::Nothing, Survives::Everything, Survives::Torn(stop), Survives::Torn(77)]
        {
            let after = disk.crash(how);
            let store = open(&after, true);
            assert_eq!(numbers(&store), [5, 6], "{how:?}");
            store.verify(|_, _| ()).unwrap();
            for epoch in [5, 6] {
                assert!(restored(&store, epoch) == images[epoch as usize - 1]);
            }
            assert_eq!(after.names().len(), 3, "{:?}", after.names());
        }
        if compacted.is_ok() {
            break;
        }
        stop += 1;
    }
    assert!(stop >= 5, "{stop}");
    for op in [DiskOp::Create, DiskOp::Write, DiskOp::Read, DiskOp::Rename] {
        let disk = disk.crash(Survives::Everything);
        let store = open(&disk, true);
        disk.fail(op, libc::EIO, 1);
        let failed = store.compact().is_err();
        disk.heal();
        assert!(failed || op == DiskOp::Rename);
        assert_eq!(numbers(&store), [5, 6], "{op:?}");
        store.verify(|_, _| ()).unwrap();
    }
}

#[test]
fn damaged_frame_stops_compaction() {
    let (disk, guest) = (MemoryDisk::default(), still());
    write(&guest, 3, 3);
    keeping(&guest, &disk, 1).take().unwrap();
    let mut pages = disk.contents("pages-1").unwrap();
    pages[5000] ^= 1;
    disk.put("pages-1", pages);
    let e = open(&disk, true).compact().unwrap_err().to_string();
    assert!(e.contains("pages-1, byte 4096: page 0x3 of checkpoint 1 fails its checksum"), "{e}");
    assert_eq!(disk.names(), ["log-1", "manifest", "pages-1"]);
}

#[test]
fn raw_export_has_pages_at_their_addresses() {
    let (disk, guest) = (MemoryDisk::default(), still());
    let mut checkpointer = keeping(&guest, &disk, 3);
    let dir = tempfile::tempdir().unwrap();
    let exported = |epoch: Option<u64>, path: &Path| {
        let file = std::fs::File::create(path).unwrap();
        (open(&disk, false).export_raw(epoch, &file, path), std::fs::File::open(path).unwrap())
    };
    for round in 1..=3 {
        write(&guest, 7, round);
        write(&guest, 1000, round * 2);
        checkpointer.take().unwrap();
    }
    for epoch in [1, 3] {
        let (report, file) = exported(Some(epoch), &dir.path().join("memory"));
        let report = report.unwrap();
        assert_eq!((report.epoch, report.frames, report.bytes), (epoch, 2, (0x400 + 724) * 4096));
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.len(), report.bytes);
        assert!(metadata.blocks() * 512 < 64 << 10, "{} blocks", metadata.blocks());
        let read = |gfn: u64| {
            let mut word = [0; 8];
            file.read_exact_at(&mut word, Gfn(gfn).gpa()).unwrap();
            u64::from_le_bytes(word)
        };
        assert_eq!([read(7), read(0x400 + 700), read(8)], [epoch, epoch * 2, 0]);
    }
    let (none, _) = exported(Some(9), &dir.path().join("none"));
    assert!(none.unwrap_err().to_string().ends_with("has no checkpoint 9"));
}

#[test]
fn working_set_stays_and_its_temporary_file_goes() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create_or_open(dir.path()).unwrap();
    Checkpointer::new(still(), store).unwrap().take().unwrap();
    let [noted, left] = ["working-set", "working-set.tmp-7"].map(|name| dir.path().join(name));
    std::fs::write(&noted, "whatever").unwrap();
    std::fs::write(&left, "").unwrap();
    let listing = Store::open(dir.path()).unwrap().list().unwrap();
    assert_eq!(listing.unfinished, ["working-set.tmp-7"]);
    assert!(listing.foreign.is_empty(), "{:?}", listing.foreign);
    Store::create_or_open(dir.path()).unwrap();
    assert!(noted.exists() && !left.exists());
    assert_eq!(numbers(&Store::open(dir.path()).unwrap()), [1]);
}
