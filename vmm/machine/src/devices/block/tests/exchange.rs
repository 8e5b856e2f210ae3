//! Disks that get another file while their driver runs.

use std::path::Path;

use driftline_guest::{CopyBeforeWriteError, GuestDrive};
use virtio_bindings::virtio_mmio::*;

use super::super::lock::tests::eventually;
use super::*;
use crate::config::DiskEngine;
use crate::devices::block::engine::manual::ManualEngine;
use crate::devices::block::exchange::{DiskFileControl, ExchangeError};

const LIMIT: Duration = Duration::from_secs(20);

/// A running disk and the handle of its file.
struct RunningDisk {
    disk: Disk,
    driver: Driver,
    control: DiskFileControl,
    source: DriveSource,
}

impl RunningDisk {
    fn new(with: EngineKind) -> Self {
        Self::named("d", with)
    }

    fn named(id: &str, with: EngineKind) -> Self {
        let mut disk = Disk::new();
        disk.config.id = id.to_owned();
        let block = disk.block(with);
        let engine = match with {
            EngineKind::Uring => DiskEngine::Uring,
            EngineKind::Sync => DiskEngine::Blocking,
        };
        Self::of(disk, block, engine)
    }

    fn of(disk: Disk, mut block: BlockDevice, engine: DiskEngine) -> Self {
        block.acquire(NextHost::Another).unwrap();
        let (parts, source) = (block.exchange_parts(disk.guest, engine).unwrap(), block.source());
        let driver = Driver::started(Box::new(block));
        let control = parts.served_by(driver.transport.backend_caller());
        Self { disk, driver, control, source }
    }

    fn exchange(&self, path: &Path) -> Result<(), ExchangeError> {
        self.control.exchange(path, LIMIT)
    }

    fn sectors(&self) -> u32 {
        self.driver.read(VIRTIO_MMIO_CONFIG)
    }

    fn was_told(&self) -> bool {
        let told = self.driver.read(VIRTIO_MMIO_INTERRUPT_STATUS) & VIRTIO_MMIO_INT_CONFIG;
        self.driver.write(VIRTIO_MMIO_INTERRUPT_ACK, told);
        told != 0
    }
}

fn file(bytes: &[u8], len: u64) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    file.as_file().write_all_at(bytes, 0).unwrap();
    file.as_file().set_len(len).unwrap();
    file
}

#[test]
fn driver_reads_and_writes_the_new_file() {
    for with in engines() {
        let mut running = RunningDisk::new(with);
        assert_eq!(write(&mut running.driver, 0, &[1; 512]), OK);
        assert!(!running.was_told());
        // 100 bytes at the end are no sector.
        let new = file(&[2; 512], (8 << 20) + 100);
        running.exchange(new.path()).unwrap();
        assert!(running.was_told());
        assert_eq!(running.sectors(), 8 << 11);
        assert_eq!(read(&mut running.driver, 0, 512), (OK, vec![2; 512]));
        let last = (8 << 11) - 1;
        assert_eq!(write(&mut running.driver, last, &[3; 512]), OK);
        let mut end = [0; 512];
        new.as_file().read_exact_at(&mut end, last * 512).unwrap();
        assert_eq!((end, running.disk.contents(0, 512)), ([3; 512], vec![1; 512]));
        assert_eq!(running.control.exchanged_path().as_deref(), Some(new.path()));
        // The old file is free, the new one is not.
        let lock = |path: &Path| {
            let config = DiskConfig { path: path.to_owned(), ..running.disk.config.clone() };
            DiskFile::open(&config, VmId::random()).and_then(|file| file.lock())
        };
        lock(running.disk.file.path()).unwrap();
        assert!(matches!(lock(new.path()), Err(DiskError::InUse(_))));
    }
}

#[test]
fn same_file_has_its_new_size() {
    for with in engines() {
        let mut running = RunningDisk::new(with);
        let path = running.disk.file.path().to_owned();
        running.exchange(&path).unwrap();
        assert!(!running.was_told() && !running.control.is_exchanged(), "nothing has changed");
        running.driver.quiesce();
        running.driver.transport.save().unwrap();
        running.disk.file.as_file().set_len(2 * BYTES).unwrap();
        // A paused device, too.
        running.exchange(&path).unwrap();
        running.driver.transport.resume();
        assert!(running.was_told());
        assert_eq!(u64::from(running.sectors()), 2 * BYTES / 512);
        assert_eq!(write(&mut running.driver, BYTES / 512, &[3; 512]), OK);
    }
}

#[test]
fn exchanged_disk_is_saved_and_not_copied() {
    let running = RunningDisk::new(EngineKind::Sync);
    let copy_before_write = running.source.copy_before_write.clone();
    drop(GuestDrive::open(&running.source).unwrap());
    assert!(running.control.exchanged_config().is_none());
    let new = file(&[], 2 * BYTES);
    running.exchange(new.path()).unwrap();
    assert!(running.control.is_exchanged());
    let named = running.control.exchanged_config().unwrap();
    assert_eq!((named.path.as_path(), named.bytes), (new.path(), 2 * BYTES));
    running.driver.quiesce();
    running.driver.transport.save().unwrap();
    assert!(GuestDrive::open(&running.source).is_err());
    let old = Arc::new(running.disk.file.reopen().unwrap());
    let blocks = [FrameRun { start: Gfn(0), count: 1 }].into_iter().collect();
    assert!(copy_before_write.freeze(old, BYTES, blocks).is_err());
}

#[test]
fn unusable_file_leaves_the_old_one() {
    let mut running = RunningDisk::new(EngineKind::Sync);
    assert_eq!(write(&mut running.driver, 0, &[1; 512]), OK);
    let held = Disk::new();
    let mut holder = held.block(EngineKind::Sync);
    holder.acquire(NextHost::Another).unwrap();
    let empty = file(&[], 511);
    for (path, why) in [
        (Path::new("/nonexistent-dl/disk"), "cannot be opened for writing"),
        (Path::new("/dev/null"), "neither a regular file nor a block device"),
        (empty.path(), "has 0 bytes"),
        (held.file.path(), "in use"),
    ] {
        let refusal = running.exchange(path).unwrap_err().to_string();
        assert!(refusal.contains(why), "{refusal}");
    }
    assert!(!running.was_told());
    assert_eq!(running.control.exchanged_path(), None);
    assert_eq!(read(&mut running.driver, 0, 512), (OK, vec![1; 512]));
}

/// Returns the number of this process's descriptors of the file at `path`.
fn descriptors(path: &Path) -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    links.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == path)).count()
}

/// Returns the number of this process's threads with this name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let is_named = |comm: String| comm.trim_end() == name;
    tasks.filter(|t| std::fs::read_to_string(t.path().join("comm")).is_ok_and(is_named)).count()
}

#[test]
fn nothing_of_the_old_file_stays_open() {
    for (with, id) in engines().into_iter().zip(["gone-1", "gone-2"]) {
        let mut running = RunningDisk::named(id, with);
        assert_eq!(write(&mut running.driver, 0, &[1; 512]), OK);
        let old = running.disk.file.path().to_owned();
        assert!(descriptors(&old) > 1, "the test's own, and the disk's");
        let new = file(&[], BYTES);
        running.exchange(new.path()).unwrap();
        // io_uring closes its registered files a moment later.
        eventually(|| descriptors(&old) == 1);
        eventually(|| threads(&format!("flush-{id}")) == 1);
        // The flush of a hand-over is of the new file.
        let flusher = running.source.flusher.get();
        flusher.begin().unwrap();
        assert!(flusher.wait(Instant::now() + LIMIT).unwrap());
    }
}

#[test]
fn exchange_after_the_save_prevents_the_release() {
    let running = RunningDisk::new(EngineKind::Sync);
    running.driver.quiesce();
    running.driver.transport.save().unwrap();
    let new = file(&[], BYTES);
    running.exchange(new.path()).unwrap();
    let why = running.driver.transport.release().unwrap_err().to_string();
    assert!(why.contains("the file or size of disk \"d\" was exchanged"), "{why}");
    // Another host cannot have the new file.
    let config = DiskConfig { path: new.path().to_owned(), ..running.disk.config.clone() };
    let other = DiskFile::open(&config, running.disk.guest).unwrap();
    assert!(matches!(other.lock(), Err(DiskError::InUse(_))));
}

#[test]
fn exchange_fails_the_open_epoch() {
    let mut running = RunningDisk::new(EngineKind::Sync);
    let mut writes = running.source.subscribe("copy").unwrap().unwrap();
    assert_eq!(write(&mut running.driver, 0, &[1; 512]), OK);
    let epoch = writes.drain();
    let blocks = epoch.runs().collect();
    let old = Arc::new(GuestDrive::open(&running.source).unwrap());
    let copy_before_write = running.source.copy_before_write.clone();
    let mut frozen = copy_before_write.freeze(old, BYTES, blocks).unwrap();
    let new = file(&[2; 512], BYTES);
    running.exchange(new.path()).unwrap();
    // A write to the new file does not wait for the epoch of the old one, which has failed.
    assert_eq!(write(&mut running.driver, 0, &[3; 512]), OK);
    let copied = frozen.next(&mut Vec::new(), &mut [0; 4096]);
    assert!(matches!(copied, Err(CopyBeforeWriteError::Released)), "{copied:?}");
}

#[test]
fn busy_disk_keeps_its_file() {
    let engine = ManualEngine::new();
    let disk = Disk::new();
    let opened = Arc::new(DiskFile::open(&disk.config, disk.guest).unwrap());
    let manual = Engine::Manual(engine.clone());
    let block = BlockDevice::new(&disk.config, 2, opened, manual).unwrap();
    let mut running = RunningDisk::of(disk, block, DiskEngine::Blocking);
    let status = running.driver.writable(1);
    let flush = header(&mut running.driver, VIRTIO_BLK_T_FLUSH, 0);
    let head = running.driver.post(0, &[flush, status]);
    running.driver.kick(0);
    eventually(|| engine.pending() == 1);
    let new = file(&[], 2 * BYTES);
    let refused = running.control.exchange(new.path(), Duration::from_millis(1));
    // On a slow host, the device has not even looked.
    let is_busy = |e: &ExchangeError| {
        matches!(e, ExchangeError::Disk(DiskError::Busy { .. }) | ExchangeError::Call(_))
    };
    assert!(refused.as_ref().is_err_and(is_busy), "{refused:?}");
    engine.complete_all();
    running.driver.wait_used(0, head);
    // Nor does it get the file later.
    running.driver.quiesce();
    running.driver.transport.save().unwrap();
    assert_eq!(running.control.exchanged_path(), None);
    assert!(!running.was_told());
    eventually(|| descriptors(new.path()) == 1);
}
