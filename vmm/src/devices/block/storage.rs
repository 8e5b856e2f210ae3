//! Tests of a disk on what is under it: page cache, file system, block device.

use std::io::IoSliceMut;
use std::os::unix::fs::FileExt;

use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::tests::{Disk, With};
use crate::devices::virtio::Device;
use crate::devices::virtio::Transport;
use crate::memory::Memory;
use crate::testing::skip;

/// Whether the host has the first block of the disk in its cache; the error is a file system that does not say.
fn is_cached(disk: &Disk) -> Result<bool, String> {
    let mut block = [0; 4096];
    let into = &mut [IoSliceMut::new(&mut block)];
    match preadv2(disk.file.as_file(), into, 0, ReadWriteFlags::NOWAIT) {
        Ok(4096) => Ok(true),
        Ok(_) | Err(Errno::AGAIN) => Ok(false),
        Err(e) => Err(format!("the file system does not say what is cached: {e}")),
    }
}

#[test]
fn what_was_cached_before_a_disk_is_taken_is_not_read() {
    const TEST: &str = "what_was_cached_before_a_disk_is_taken_is_not_read";
    let disk = Disk::new();
    let file = disk.file.as_file();
    file.write_all_at(&[7; 1 << 20], 0).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    match is_cached(&disk) {
        Ok(false) => {}
        Ok(true) => return skip(TEST, "the file system keeps all of it in memory"),
        Err(why) => return skip(TEST, &why),
    }
    disk.contents(0, 4096);
    assert_eq!(is_cached(&disk), Ok(true));
    // A new guest's: there is nobody who may have written since it was opened.
    let mut block = disk.block(With::Plain);
    block.acquire().unwrap();
    assert_eq!(is_cached(&disk), Ok(true));
    block.release().unwrap();
    // One that has waited, on its own thread.
    let memory = Memory::new(16 << 20, &Default::default()).unwrap();
    let waits = Transport::spawn("d", Box::new(block), memory.ram().clone()).unwrap();
    waits.acquire().unwrap();
    assert_eq!(is_cached(&disk), Ok(false));
    assert_eq!(disk.contents(0, 512), [7; 512]);
}
