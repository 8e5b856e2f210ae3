//! The block device driven through its queues, over real files, with io_uring and without.

mod exchange;
mod in_flight;
mod killed;
mod limits;
mod opened;
mod storage;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Once;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, Gfn, Subscription};
use tempfile::NamedTempFile;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_STATUS;

use super::request::SECTOR;
use super::*;
use crate::devices::stats::{DeviceStats, StatsHandle};
use crate::devices::virtio::Device;
use crate::devices::virtio::DriverBuffer;
use crate::devices::virtio::conformance::{self, TestedDevice};
use crate::devices::virtio::driver::Driver;
use crate::testing::{skip, soon};
use driftline_guest::NextHost;

const BYTES: u64 = 4 << 20;
pub(super) const OK: u8 = VIRTIO_BLK_S_OK as u8;
pub(super) const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EngineKind {
    Uring,
    Sync,
}

pub(super) struct Disk {
    pub(super) file: NamedTempFile,
    pub(super) config: DiskConfig,
    pub(super) guest: VmId,
}

impl Disk {
    pub(super) fn new() -> Self {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(BYTES).unwrap();
        let config = DiskConfig {
            serial: "serial-1".to_owned(),
            ..crate::testing::disk("d", file.path(), BYTES)
        };
        Self { file, config, guest: VmId::random() }
    }

    pub(super) fn block(&self, with: EngineKind) -> BlockDevice {
        let file = Arc::new(DiskFile::open(&self.config, self.guest).unwrap());
        let engine = match with {
            EngineKind::Uring => Engine::with_uring(file.clone(), 512).unwrap(),
            EngineKind::Sync => Engine::Sync(file.clone()),
        };
        BlockDevice::new(&self.config, 2, file, engine).unwrap()
    }

    pub(super) fn driver(&self, with: EngineKind) -> (Driver, Option<Subscription>) {
        let block = self.block(with);
        let writes = block.tracker().map(|tracker| tracker.subscribe("test").unwrap());
        (Driver::started(Box::new(block)), writes)
    }

    pub(super) fn contents(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.as_file().read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }
}

/// Returns the engines that this host has. Reports it, once, if io_uring is missing.
pub(super) fn engines() -> Vec<EngineKind> {
    let disk = Disk::new();
    let file = Arc::new(DiskFile::open(&disk.config, disk.guest).unwrap());
    match Engine::with_uring(file, 8) {
        Ok(_) => vec![EngineKind::Uring, EngineKind::Sync],
        Err(e) => {
            static REPORTED: Once = Once::new();
            REPORTED.call_once(|| skip("block_devices_over_io_uring", &e.to_string()));
            vec![EngineKind::Sync]
        }
    }
}

pub(super) fn header(driver: &mut Driver, kind: u32, sector: u64) -> DriverBuffer {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    driver.readable(&bytes)
}

/// Makes a request and returns its status.
#[track_caller]
pub(super) fn request(driver: &mut Driver, kind: u32, sector: u64, data: &[DriverBuffer]) -> u8 {
    let status = driver.writable(1);
    let header = header(driver, kind, sector);
    let pieces: Vec<DriverBuffer> = [&[header], data, &[status]].concat();
    driver.request(0, &pieces);
    driver.bytes(status)[0]
}

#[track_caller]
pub(super) fn write(driver: &mut Driver, sector: u64, bytes: &[u8]) -> u8 {
    let data = driver.readable(bytes);
    request(driver, VIRTIO_BLK_T_OUT, sector, &[data])
}

#[track_caller]
pub(super) fn read(driver: &mut Driver, sector: u64, len: u32) -> (u8, Vec<u8>) {
    let data = driver.writable(len);
    let status = request(driver, VIRTIO_BLK_T_IN, sector, &[data]);
    (status, driver.bytes(data))
}

pub(super) fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

pub(super) fn pattern(n: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u64 * 7 + n * 31 + 1) as u8).collect()
}

fn marked(writes: &mut Subscription) -> Vec<FrameRun> {
    let epoch = writes.drain();
    let runs = epoch.runs().collect();
    epoch.commit();
    runs
}

#[test]
fn conforms_to_virtio() {
    for with in engines() {
        let disk = Disk::new();
        for (sector, n) in (0..BYTES / SECTOR).step_by(8).zip(0..) {
            let bytes = pattern(n, 4096);
            disk.file.as_file().write_all_at(&bytes, sector * SECTOR).unwrap();
        }
        conformance::check(&TestedDevice {
            make: &|| Box::new(disk.block(with)),
            queue: 1,
            // Reads and writes alternate, in several pieces.
            request: &|driver, n| {
                let (kind, sector) = (n as u32 % 2, n * 8 % 1000);
                let status = driver.writable(1);
                let data = match kind {
                    VIRTIO_BLK_T_IN => [driver.writable(1024), driver.writable(3072)],
                    _ => [driver.readable(&pattern(n, 512)), driver.readable(&pattern(n, 1024))],
                };
                [&[header(driver, kind, sector)], &data[..], &[status]].concat()
            },
        });
    }
}

#[test]
fn written_data_is_read_back_and_in_file() {
    for with in engines() {
        let disk = Disk::new();
        let (mut driver, _) = disk.driver(with);
        for (n, len) in [(0, 512), (1, 4096), (2, 65536)] {
            let (sector, bytes) = (n * 1000 + 3, pattern(n, len));
            assert_eq!(write(&mut driver, sector, &bytes), OK);
            assert_eq!(request(&mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), OK);
            assert_eq!(disk.contents(sector * 512, len), bytes);
            assert_eq!(read(&mut driver, sector, len as u32), (OK, bytes));
        }
        let id = driver.writable(20);
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_GET_ID, 0, &[id]), OK);
        assert_eq!(driver.bytes(id), b"serial-1\0\0\0\0\0\0\0\0\0\0\0\0");
    }
}

#[test]
fn zeroes_and_discards_change_only_their_ranges() {
    for with in engines() {
        let disk = Disk::new();
        let (mut driver, _) = disk.driver(with);
        assert_eq!(write(&mut driver, 0, &pattern(9, 65536)), OK);
        let zeros = driver.readable(&[range(8, 8, 0), range(24, 16, 1)].concat());
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_WRITE_ZEROES, 0, &[zeros]), OK);
        let mut want = pattern(9, 65536);
        want[4096..8192].fill(0);
        want[24 * 512..40 * 512].fill(0);
        assert_eq!(disk.contents(0, 65536), want);
        assert_eq!(disk.file.as_file().metadata().unwrap().len(), BYTES, "it keeps its size");
        let discard = driver.readable(&range(64, 8, 0));
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_DISCARD, 0, &[discard]), OK);
        for bad in [range(0, 8, 2), range(0, 8, 1)] {
            let bad = driver.readable(&bad);
            assert_eq!(request(&mut driver, VIRTIO_BLK_T_DISCARD, 0, &[bad]), UNSUPP);
        }
        for bad in
            [range(BYTES / 512 - 7, 8, 0), range(u64::MAX, 8, 0), range(0, 0, 0), vec![0; 15]]
        {
            let bad = driver.readable(&bad);
            assert_eq!(request(&mut driver, VIRTIO_BLK_T_DISCARD, 0, &[bad]), IOERR);
        }
    }
}

#[test]
fn tracker_has_exactly_the_written_blocks() {
    for with in engines() {
        let disk = Disk::new();
        let (mut driver, writes) = disk.driver(with);
        let mut writes = writes.unwrap();
        assert_eq!(read(&mut driver, 0, 65536).0, OK);
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), OK);
        assert_eq!(marked(&mut writes), [], "nothing was written");
        let run = |start, count| FrameRun { start: Gfn(start), count };
        assert_eq!(write(&mut driver, 15, &pattern(1, 1024)), OK);
        assert_eq!(marked(&mut writes), [run(1, 2)], "it crosses into the third block");
        assert_eq!(write(&mut driver, BYTES / 512 - 1, &pattern(1, 512)), OK);
        assert_eq!(marked(&mut writes), [run(BYTES / 4096 - 1, 1)]);
        let zeros = driver.readable(&range(80, 8, 0));
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_WRITE_ZEROES, 0, &[zeros]), OK);
        assert_eq!(marked(&mut writes), [run(10, 1)]);
        let discard = driver.readable(&range(160, 16, 0));
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_DISCARD, 0, &[discard]), OK);
        assert_eq!(marked(&mut writes), [run(20, 2)]);
        let scattered = [range(320, 8, 0), range(800, 8, 0), range(640, 16, 0)].concat();
        for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            let ranges = driver.readable(&scattered);
            assert_eq!(request(&mut driver, kind, 0, &[ranges]), OK);
            assert_eq!(marked(&mut writes), [run(40, 1), run(80, 2), run(100, 1)]);
        }
    }
}

#[test]
fn malformed_requests_fail_alone() {
    for with in engines() {
        let disk = Disk::new();
        let (mut driver, writes) = disk.driver(with);
        let last = BYTES / 512 - 1;
        for (sector, len) in
            [(last, 1024), (last + 1, 512), (u64::MAX, 512), (1 << 55, 512), (0, 100)]
        {
            assert_eq!(read(&mut driver, sector, len).0, IOERR, "read {len} at {sector}");
            assert_eq!(write(&mut driver, sector, &vec![1; len as usize]), IOERR);
        }
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 0, &[]), IOERR, "of nothing");
        for kind in [2, 3, 14, 15, 99, u32::MAX] {
            assert_eq!(request(&mut driver, kind, 0, &[]), UNSUPP, "kind {kind}");
        }
        assert_eq!(marked(&mut writes.unwrap()), []);
        assert!(!driver.is_stopped());
        // Without room for a status, or with half a header, no answer is possible.
        let half = driver.readable(&[0; 15]);
        let status = driver.writable(1);
        for pieces in [vec![half, status], vec![header(&mut driver, 0, 0)]] {
            driver.post(0, &pieces);
            driver.kick(0);
            driver.wait_stopped("a malformed request");
            driver.start(!0);
        }
        assert_eq!(read(&mut driver, 0, 512).0, OK);
    }
}

#[test]
fn readonly_disk_is_not_written() {
    for with in engines() {
        let mut disk = Disk::new();
        disk.file.as_file().write_all_at(&pattern(5, 4096), 0).unwrap();
        disk.config.readonly = true;
        let (mut driver, writes) = disk.driver(with);
        assert!(writes.is_none());
        assert_ne!(driver.offered() & 1 << VIRTIO_BLK_F_RO, 0);
        assert_eq!(driver.offered() & 1 << VIRTIO_BLK_F_DISCARD, 0);
        assert_eq!(write(&mut driver, 0, &[0; 512]), IOERR);
        let zeros = driver.readable(&range(0, 8, 0));
        for kind in [VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_T_DISCARD] {
            assert_eq!(request(&mut driver, kind, 0, &[zeros]), IOERR);
        }
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), OK);
        assert_eq!(read(&mut driver, 0, 4096), (OK, pattern(5, 4096)));
        assert_eq!(disk.contents(0, 4096), pattern(5, 4096));
    }
}

#[test]
fn shrunken_file_fails_requests_not_the_device() {
    for with in engines() {
        let disk = Disk::new();
        let (mut driver, _) = disk.driver(with);
        disk.file.as_file().set_len(4096).unwrap();
        assert_eq!(read(&mut driver, 100, 4096).0, IOERR);
        assert_eq!(read(&mut driver, 7, 1024).0, IOERR, "half of it is there");
        assert_eq!(read(&mut driver, 0, 4096).0, OK);
        driver.quiesce();
        let saved = driver.transport.save().unwrap();
        let bytes = postcard::to_stdvec(&BlockState { errors: 2, lost: false }).unwrap();
        assert_eq!(saved.device(), bytes, "failures are counted");
    }
}

#[test]
fn concurrent_requests_on_all_queues_complete() {
    for with in engines() {
        let disk = Disk::new();
        let (mut driver, _) = disk.driver(with);
        let size = u64::from(driver.queue_size(0));
        let mut sent = Vec::new();
        for round in 0..3u64 {
            for n in 0..size / 3 {
                for queue in 0..2usize {
                    let sector = (n * 2 + queue as u64) * 8;
                    let bytes = pattern(round * 1000 + sector, 512);
                    let pieces =
                        [header(&mut driver, VIRTIO_BLK_T_OUT, sector), driver.readable(&bytes)];
                    let status = driver.writable(1);
                    let head = driver.post(queue, &[&pieces[..], &[status]].concat());
                    sent.push((queue, head, sector, bytes, status));
                }
            }
            // The device is paused while these are in flight. Then all of them have ended.
            driver.kick(0);
            driver.kick(1);
            driver.quiesce();
            driver.transport.resume();
            for (queue, head, sector, bytes, status) in sent.drain(..) {
                driver.wait_used(queue, head);
                assert_eq!(driver.bytes(status), [OK]);
                assert_eq!(disk.contents(sector * 512, 512), bytes);
            }
            driver.forget_buffers();
        }
        driver.write(VIRTIO_MMIO_STATUS, 0);
    }
}

#[test]
fn locked_disk_is_not_acquired_by_another_device() {
    let disk = Disk::new();
    let (mut a, mut b) = (disk.block(EngineKind::Sync), disk.block(EngineKind::Sync));
    a.acquire(NextHost::Another).unwrap();
    let error = b.acquire(NextHost::Another).unwrap_err().to_string();
    assert!(error.contains(&format!("fuser -v {}", disk.config.path.display())));
    assert!(error.contains("in use") && error.contains(&*disk.config.path.to_string_lossy()));
    a.release(soon(), NextHost::Another).unwrap();
    b.acquire(NextHost::Another).unwrap();
    assert!(a.acquire(NextHost::Another).is_err());
    // The same guest's file can be opened while it is locked, as on a destination host. Another
    // guest's file cannot even be opened.
    drop(disk.block(EngineKind::Sync));
    let error = DiskFile::open(&disk.config, VmId::random()).unwrap_err();
    assert!(error.to_string().contains("is in use by another"), "{error}");
    drop(b);
    lock::tests::eventually(|| a.acquire(NextHost::Another).is_ok());
    a.release(soon(), NextHost::Another).unwrap();
    let readonly = Disk { config: DiskConfig { readonly: true, ..disk.config.clone() }, ..disk };
    let (mut c, mut d) = (readonly.block(EngineKind::Sync), readonly.block(EngineKind::Sync));
    c.acquire(NextHost::Another).unwrap();
    d.acquire(NextHost::Another).unwrap();
    assert!(a.acquire(NextHost::Another).is_err(), "others read it");
}

#[test]
fn unusable_files_are_refused_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let small = dir.path().join("small");
    File::create(&small).unwrap().set_len(511).unwrap();
    let refusal_of = |path: &std::path::Path| probe(path, false).unwrap_err().to_string();
    assert!(refusal_of(&small).contains("511 bytes, which are not whole sectors"));
    let empty = dir.path().join("empty");
    File::create(&empty).unwrap();
    assert!(refusal_of(&empty).contains("0 bytes"));
    assert!(refusal_of(dir.path()).contains("neither a regular file nor a block device"));
    assert!(refusal_of(&dir.path().join("none")).contains("cannot be opened for writing"));
    let disk = Disk::new();
    assert_eq!(probe(disk.file.path(), false).unwrap(), (BYTES, 512));
    disk.file.as_file().set_len(BYTES + 100).unwrap();
    assert!(refusal_of(disk.file.path()).contains("4194404 bytes, which are not whole sectors"));
    disk.file.as_file().set_len(BYTES - 1).unwrap();
    let error = DiskFile::open(&disk.config, disk.guest).unwrap_err().to_string();
    assert!(error.contains("4194304 bytes") && error.contains("only 4194303"), "{error}");
}

#[test]
fn requests_are_counted() {
    let disk = Disk::new();
    let block = disk.block(EngineKind::Sync);
    let stats = StatsHandle::Disk("d".to_owned(), block.counters().clone());
    let mut driver = Driver::started(Box::new(block));
    assert_eq!(write(&mut driver, 0, &pattern(1, 1024)), OK);
    assert_eq!(write(&mut driver, 4, &pattern(2, 512)), OK);
    assert_eq!(read(&mut driver, 0, 512).0, OK);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), OK);
    assert_eq!(read(&mut driver, BYTES, 512).0, IOERR, "past the end of the file");
    let (id, flushes, errors, stalls) = ("d".to_owned(), 1, 0, 0);
    let (reads, read_bytes, writes, written_bytes) = (1, 512, 2, 1536);
    let figures =
        DeviceStats::Disk { id, reads, read_bytes, writes, written_bytes, flushes, errors, stalls };
    assert_eq!(stats.read(), figures);
}

/// After a failed take-over there is nothing to make durable, even if the guest arrived with data
/// that was lost before.
#[test]
fn failed_acquire_leaves_no_disk_locked() {
    let lost = postcard::to_stdvec(&BlockState { errors: 1, lost: true }).unwrap();
    for has_run in [false, true] {
        let disk = Disk::new();
        let mut block = disk.block(EngineKind::Sync);
        // As `start` sets it for a guest that starts here, and for one that arrives.
        block.has_run = has_run;
        block.restore(&lost).unwrap();
        block.acquire(NextHost::Another).unwrap();
        let undone = block.undo_acquire(soon(), NextHost::Another);
        let other = disk.block(EngineKind::Sync).acquire(NextHost::Another);
        assert_eq!(undone.is_ok(), !has_run, "{undone:?}");
        assert_eq!(other.is_ok(), !has_run, "{other:?}");
        assert_eq!(block.locked, has_run);
    }
}
