//! Disks whose file was opened before the device.

use super::*;
use crate::config::{DiskCache, DiskEngine, OpenedDisk};
use driftline_format::range_lock::RangeLock;

/// Opens the file of `disk` and removes its name.
fn opened(disk: &Disk, cache: DiskCache, engine: DiskEngine) -> OpenedDisk {
    let path = disk.file.path();
    let file = File::options().read(true).write(true).open(path).unwrap();
    std::fs::remove_file(path).unwrap();
    let is_handed_over = false;
    OpenedDisk { id: "d".to_owned(), file: file.into(), cache, engine, is_handed_over }
}

fn block(disk: &Disk, opened: &OpenedDisk) -> Result<BlockDevice, DiskError> {
    BlockDevice::open(&disk.config, 2, disk.guest, Some(opened))
}

#[test]
fn open_file_is_used_whatever_its_name() {
    let disk = Disk::new();
    let opened = opened(&disk, DiskCache::Writeback, DiskEngine::Automatic);
    assert!(BlockDevice::open(&disk.config, 2, disk.guest, None).is_err(), "its name is gone");
    // A build that fails later leaves the file usable, and locked for its guest.
    let mut first = block(&disk, &opened).unwrap();
    first.acquire(NextHost::Another).unwrap();
    drop(first);
    let mut second = block(&disk, &opened).unwrap();
    second.acquire(NextHost::Another).unwrap();
    let mut driver = Driver::started(Box::new(second));
    assert_eq!(write(&mut driver, 1, &[7; 512]), OK);
    assert_eq!(disk.contents(512, 512), [7; 512]);
}

#[test]
fn unsafe_disk_offers_no_flush() {
    const FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;
    for (cache, offers) in [(DiskCache::Writeback, true), (DiskCache::Unsafe, false)] {
        let disk = Disk::new();
        let mut block = block(&disk, &opened(&disk, cache, DiskEngine::Automatic)).unwrap();
        assert_eq!(block.features() & FLUSH != 0, offers, "{cache:?}");
        // A driver without the feature gets durable writes only where it could have had it.
        block.activate(0);
        assert_eq!(block.writes_through, offers, "{cache:?}");
        block.activate(FLUSH);
        assert!(!block.writes_through, "{cache:?}");
    }
}

#[test]
fn engine_is_the_one_asked_for() {
    let has_uring = engines().contains(&EngineKind::Uring);
    let engine = |kind| {
        let disk = Disk::new();
        block(&disk, &opened(&disk, DiskCache::Writeback, kind)).map(|block| block.engine)
    };
    assert!(matches!(engine(DiskEngine::Blocking), Ok(Engine::Sync(_))));
    match engine(DiskEngine::Uring) {
        Ok(engine) => assert!(has_uring && matches!(engine, Engine::Uring(_))),
        Err(e) => {
            assert!(!has_uring && e.to_string().contains("cannot be used by io_uring"), "{e}");
        }
    }
}

/// A lock is that of the open file, so each of the two devices could unlock it for both.
#[test]
fn lock_stays_while_the_file_changes_hands() {
    let soon = || Instant::now() + Duration::from_secs(10);
    let disk = Disk::new();
    let path = disk.file.path().to_owned();
    let other = File::options().read(true).write(true).open(&path).unwrap();
    let is_locked = || {
        let is_free = lock::set(&other, RangeLock::Exclusive, VmId::random()).unwrap();
        lock::set(&other, RangeLock::Free, VmId::random()).unwrap();
        !is_free
    };
    let mut source = BlockDevice::open(&disk.config, 2, disk.guest, None).unwrap();
    source.acquire(NextHost::Another).unwrap();
    let mut next = || {
        let file = File::from(source.share().unwrap().remove(0));
        let opened = OpenedDisk {
            is_handed_over: true,
            file: file.into(),
            ..opened(&Disk::new(), DiskCache::Writeback, DiskEngine::Automatic)
        };
        block(&disk, &opened).unwrap()
    };
    // The next process discards the guest, before or after it has acquired the disk.
    for acquires in [false, true] {
        let mut next = next();
        if acquires {
            next.acquire(NextHost::This).unwrap();
        }
        next.undo_acquire(soon(), NextHost::This).unwrap();
        next.release(soon(), NextHost::This).unwrap();
        drop(next);
        assert!(is_locked(), "{acquires}");
    }
    // It takes the guest, and then another host does.
    let mut next = next();
    source.release(soon(), NextHost::This).unwrap();
    assert!(is_locked());
    next.acquire(NextHost::This).unwrap();
    drop(source);
    assert!(is_locked());
    next.release(soon(), NextHost::Another).unwrap();
    assert!(!is_locked());
}
