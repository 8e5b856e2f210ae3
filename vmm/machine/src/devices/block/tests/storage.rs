//! Tests of a disk on its storage: the page cache, a block device, and storage that loses data.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::*;
use crate::devices::virtio::Transport;
use crate::memory::Memory;
use crate::testing::skip;

fn not_run(program: &str, why: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("{program}: {why}"))
}

/// Returns whether the host has any of the disk in its page cache. The test does not read the disk,
/// because that would fill the cache. Fails on a host that cannot tell.
fn is_cached(disk: &Disk) -> io::Result<bool> {
    let mut fincore = Command::new("fincore");
    let output = fincore.args(["--noheadings", "--output", "PAGES"]).arg(disk.file.path()).output();
    let output = output.map_err(|e| not_run("fincore", e))?;
    let pages = String::from_utf8_lossy(&output.stdout).trim().parse::<u64>();
    pages.map(|pages| pages > 0).map_err(|e| not_run("fincore", e))
}

fn hand_over_and_back(device: &Transport) {
    device.resume();
    device.begin_quiesce(Instant::now() + Duration::from_secs(20)).wait().unwrap();
    device.release().unwrap();
    device.acquire().unwrap();
}

#[test]
fn acquire_drops_cached_pages_of_the_disk() {
    const TEST: &str = "acquire_drops_cached_pages_of_the_disk";
    let disk = Disk::new();
    let file = disk.file.as_file();
    file.write_all_at(&[7; 1 << 20], 0).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    match is_cached(&disk) {
        Ok(false) => {}
        Ok(true) => return skip(TEST, "the file system keeps all of it in memory"),
        Err(why) => return skip(TEST, &why.to_string()),
    }
    disk.contents(0, 4096);
    assert!(is_cached(&disk).unwrap());
    // A new guest's disk: no other host can have written to it since it was opened.
    let mut block = disk.block(EngineKind::Sync);
    block.acquire(NextHost::Another).unwrap();
    assert!(is_cached(&disk).unwrap());
    block.release(soon(), NextHost::Another).unwrap();
    // A disk that waits for its guest, on its own thread.
    let memory = Memory::new(16 << 20, &Default::default()).unwrap();
    let waits = Transport::spawn("d", Box::new(block), memory.ram().clone()).unwrap();
    waits.acquire().unwrap();
    assert!(!is_cached(&disk).unwrap());
    assert_eq!(disk.contents(0, 512), [7; 512]);
    // Acquired again before the guest ran here: it had resumed on its old host.
    waits.release().unwrap();
    waits.acquire().unwrap();
    assert!(!is_cached(&disk).unwrap());
    assert_eq!(disk.contents(0, 512), [7; 512]);
    // The guest was to move to another host, and did not.
    hand_over_and_back(&waits);
    assert!(is_cached(&disk).unwrap());
    drop(waits);
    // A disk whose file was filled on this host.
    let mut block = disk.block(EngineKind::Sync);
    block.note_created_here();
    let waits = Transport::spawn("d", Box::new(block), memory.ram().clone()).unwrap();
    waits.acquire().unwrap();
    assert!(is_cached(&disk).unwrap());
    drop(waits);
    let mut block = disk.block(EngineKind::Sync);
    block.acquire(NextHost::Another).unwrap();
    let launched = Transport::spawn("d", Box::new(block), memory.ram().clone()).unwrap();
    hand_over_and_back(&launched);
    assert!(is_cached(&disk).unwrap());
}

/// A block device over a file; detached on drop.
struct LoopDevice(String);

impl LoopDevice {
    /// Creates a device with blocks of 4 KiB.
    fn new(file: &Path) -> io::Result<Self> {
        let mut losetup = Command::new("losetup");
        let made = losetup.args(["--find", "--show", "--sector-size", "4096"]).arg(file).output();
        let made = made.map_err(|e| not_run("losetup", e))?;
        match made.status.success() {
            true => Ok(Self(String::from_utf8_lossy(&made.stdout).trim().to_owned())),
            false => Err(not_run("losetup", String::from_utf8_lossy(&made.stderr))),
        }
    }
}

/// Returns a disk that accepts every write and loses it when it is to be made durable: a block
/// device over sealed memory.
fn losing_disk() -> io::Result<(Disk, LoopDevice)> {
    let mut disk = Disk::new();
    let memory = memfd_create("losing", MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memory, disk.config.bytes)?;
    let pid = std::process::id();
    let device = LoopDevice::new(Path::new(&format!("/proc/{pid}/fd/{}", memory.as_raw_fd())))?;
    fcntl_add_seals(&memory, SealFlags::WRITE)?;
    disk.config.path = device.0.clone().into();
    Ok((disk, device))
}

/// Linux keeps for each open file whether it has reported lost data. The guest must be told once,
/// not once for each open file.
#[test]
fn linux_write_back_error_is_reported_once() {
    const TEST: &str = "linux_write_back_error_is_reported_once";
    let (disk, _device) = match losing_disk() {
        Ok(made) => made,
        Err(why) => return skip(TEST, &format!("no disk that loses data: {why}")),
    };
    let mut block = disk.block(EngineKind::Sync);
    block.acquire(NextHost::Another).unwrap();
    let (file, flusher) = (block.file.clone(), block.flusher().get());
    let lose = |n| file.file().write_all_at(&[n; 4096], 0).unwrap();
    let flush_of_guest = || {
        let answer = flusher.answer(DurabilityPromise::Everything, file.file().sync_data());
        flusher.note_delivery(&answer, true);
        answer.result
    };
    let early = || flush_all([&flusher].into_iter(), Duration::from_secs(20));
    // The guest's own flush meets the error.
    lose(1);
    flush_of_guest().unwrap_err();
    assert!(early().unwrap(), "it is known");
    flush_of_guest().unwrap();
    block.release(soon(), NextHost::Another).unwrap();
    block.acquire(NextHost::Another).unwrap();
    // The hand-over meets it.
    lose(2);
    block.release(soon(), NextHost::Another).unwrap_err();
    flush_of_guest().unwrap_err();
    assert!(early().unwrap(), "it is known");
    flush_of_guest().unwrap();
    // A flush while the guest runs meets it.
    lose(3);
    early().unwrap_err();
    flush_of_guest().unwrap_err();
    assert!(early().unwrap(), "it is known");
    flush_of_guest().unwrap();
    block.release(soon(), NextHost::Another).unwrap();
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn guest_sees_block_size_and_may_access_sectors() {
    const TEST: &str = "guest_sees_block_size_and_may_access_sectors";
    let mut disk = Disk::new();
    disk.config.block_bytes = 4096;
    let sizes_in_config = |block: &BlockDevice| {
        let space = block.config_space();
        (space[..8].to_vec(), space[20..24].to_vec())
    };
    let sectors = (disk.config.bytes / 512).to_le_bytes().to_vec();
    let want = (sectors, 4096u32.to_le_bytes().to_vec());
    assert_eq!(sizes_in_config(&disk.block(EngineKind::Sync)), want);
    let device = match LoopDevice::new(disk.file.path()) {
        Ok(device) => device,
        Err(why) => return skip(TEST, &format!("no loop device of 4 KiB sectors: {why}")),
    };
    let path = Path::new(&device.0);
    assert_eq!(probe(path, false).unwrap(), (disk.config.bytes, 4096));
    disk.config.path = path.to_owned();
    for with in engines() {
        let mut block = disk.block(with);
        assert_eq!(sizes_in_config(&block), want);
        assert_eq!(block.disk_identity(), None, "its number is this host's alone");
        block.acquire(NextHost::Another).unwrap();
        let mut driver = Driver::started(Box::new(block));
        assert_eq!(write(&mut driver, 8, &pattern(1, 4096)), OK);
        assert_eq!(write(&mut driver, 9, &pattern(2, 512)), OK, "a part of a block");
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), OK);
        let mut wanted = pattern(1, 4096);
        wanted[512..1024].copy_from_slice(&pattern(2, 512));
        assert_eq!(read(&mut driver, 8, 4096), (OK, wanted.clone()));
        assert_eq!(read(&mut driver, 9, 512), (OK, pattern(2, 512)));
        assert_eq!(disk.contents(4096, 4096), wanted, "in the file behind it");
        driver.quiesce();
        driver.transport.release().unwrap();
    }
}

/// Returns a disk that has lost data while its driver asked for nothing, and the driver.
fn lost(with: EngineKind, without: u64) -> (Disk, Driver) {
    let disk = Disk::new();
    let block = disk.block(with);
    let flusher = block.flusher().get();
    let driver = Driver::started_without(Box::new(block), without);
    flusher.note_lost(&io::Error::from_raw_os_error(libc::EIO));
    (disk, driver)
}

#[test]
fn lost_data_is_reported_once_also_after_move() {
    for with in engines() {
        let (_disk, mut driver) = lost(with, 0);
        assert_eq!(write(&mut driver, 0, &pattern(1, 512)), OK, "that promises nothing");
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), IOERR);
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), OK);
        // A driver without flushes is told by a write, which then makes the same promise.
        let (_disk, mut driver) = lost(with, 1 << VIRTIO_BLK_F_FLUSH);
        assert_eq!(read(&mut driver, 0, 512).0, OK);
        assert_eq!(write(&mut driver, 0, &pattern(1, 512)), IOERR);
        assert_eq!(write(&mut driver, 0, &pattern(1, 512)), OK);
        // The loss is part of the device's state.
        let (disk, driver) = lost(with, 0);
        driver.quiesce();
        let state = driver.transport.save().unwrap();
        let copy = Disk::new();
        let block = Box::new(copy.block(with));
        let transport = Transport::spawn("copy", block, driver.memory.ram().clone()).unwrap();
        transport.restore(state).unwrap();
        transport.resume();
        let mut driver = driver.moved_to(transport);
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), IOERR);
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), OK);
        drop(disk);
    }
}
