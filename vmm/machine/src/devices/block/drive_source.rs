//! The view of a disk for copying it while its guest is on this host. The copier reads the disk
//! beside the device, through an open file of its own.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use driftline_dirty_tracker::{NoMemory, Subscription, Tracker};
use driftline_guest::{CopyBeforeWrite, DriveHead, GuestDrive};

use super::flusher::CurrentFlusher;

/// The view of one disk for a copier; see the module. It does not lock the file: the device holds
/// the lock.
#[derive(Clone, Debug)]
pub(crate) struct DriveSource {
    pub(super) head: DriveHead,
    /// Tracks the guest's writes; `None` for a read-only disk.
    pub(super) tracker: Option<Arc<Tracker>>,
    /// Copy-before-write; the device asks it before each write.
    pub(super) copy_before_write: Arc<CopyBeforeWrite>,
    /// The flusher, which can open the file again.
    pub(super) flusher: CurrentFlusher,
    /// Whether the disk's file or size was exchanged since the guest's start, so that it cannot be
    /// copied.
    pub(super) is_exchanged: Arc<AtomicBool>,
}

impl DriveSource {
    /// Cancels the device's waits for an epoch: the guest is about to pause.
    pub(crate) fn cancel_waits(&self) {
        self.copy_before_write.set_pausing(true);
    }

    /// Allows the device's waits for an epoch again.
    pub(crate) fn allow_waits(&self) {
        self.copy_before_write.set_pausing(false);
    }
}

impl GuestDrive for DriveSource {
    fn head(&self) -> DriveHead {
        self.head.clone()
    }

    fn subscribe(&self, name: &str) -> Result<Option<Subscription>, NoMemory> {
        self.tracker.as_ref().map(|tracker| tracker.subscribe(name)).transpose()
    }

    fn open(&self) -> io::Result<File> {
        // Taken before the check: an exchange sets the mark first.
        let flusher = self.flusher.get();
        if self.is_exchanged.load(Ordering::Acquire) {
            return Err(io::Error::other("its file or size was exchanged since the guest's start"));
        }
        flusher.open_another()
    }

    fn copy_before_write(&self) -> Option<Arc<CopyBeforeWrite>> {
        Some(self.copy_before_write.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
    use driftline_guest::{CopyBeforeWriteError, NextHost};
    use virtio_bindings::virtio_blk::*;

    use super::super::tests::{Disk, OK, engines, header, pattern, range, request};
    use super::*;
    use crate::devices::virtio::Device;
    use crate::devices::virtio::driver::Driver;

    /// Copies one epoch after another from the disk while its device runs, until it is `paused`,
    /// then copies the rest. Returns the copy. `epochs` counts those that were not empty.
    fn copy_on(
        source: &DriveSource,
        mut writes: Subscription,
        paused: &AtomicBool,
        epochs: &AtomicU64,
    ) -> Vec<u8> {
        let file = source.open().unwrap();
        let mut copy = vec![0; source.head().bytes as usize];
        file.read_exact_at(&mut copy, 0).unwrap();
        let mut pass = |writes: &mut Subscription| {
            let epoch = writes.drain();
            let is_empty = epoch.is_empty();
            for run in epoch.runs() {
                let at = run.start.gpa();
                let to = &mut copy[at as usize..(at + run.bytes()) as usize];
                file.read_exact_at(to, at).unwrap();
            }
            epoch.commit();
            epochs.fetch_add(u64::from(!is_empty), Ordering::SeqCst);
        };
        while !paused.load(Ordering::SeqCst) {
            pass(&mut writes);
        }
        pass(&mut writes);
        assert!(writes.drain().is_empty());
        copy
    }

    /// Writes to a number of blocks with one request each, and waits for all of them.
    fn write_some(driver: &mut Driver, blocks: u64, round: u64) {
        let mut sent = Vec::new();
        for n in 0..24u64 {
            let (queue, sector) =
                ((n % 2) as usize, (round * 7 + n * (blocks / 24)) % (blocks - 1) * 8);
            let head = header(driver, VIRTIO_BLK_T_OUT, sector + n % 3);
            let (data, status) =
                (driver.readable(&pattern(round * 24 + n, 4096)), driver.writable(1));
            sent.push((queue, driver.post(queue, &[head, data, status]), status));
        }
        driver.kick(0);
        driver.kick(1);
        for (queue, head, status) in sent {
            driver.wait_used(queue, head);
            assert_eq!(driver.bytes(status), [OK]);
        }
        driver.forget_buffers();
        let kind = [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES][(round % 2) as usize];
        let ranges = driver.readable(&range(round * 80 % 8000, 1 + round as u32 % 40, 0));
        assert_eq!(request(driver, kind, 0, &[ranges]), OK);
        driver.forget_buffers();
    }

    /// Works as a checkpoint does: what the driver writes after the pause to blocks that are not
    /// copied yet is not in the epoch.
    #[test]
    fn copy_before_write_keeps_the_pauses_content() {
        for with in engines() {
            let disk = Disk::new();
            let block = disk.block(with);
            let (source, bytes) = (block.source(), disk.config.bytes);
            let mut driver = Driver::started(Box::new(block));
            let (file, copy_before_write) =
                (Arc::new(source.open().unwrap()), source.copy_before_write().unwrap());
            let mut writes = source.subscribe("epochs").unwrap().unwrap();
            let mut copy = vec![0; bytes as usize];
            let (mut round, mut rounds_beside_copy) = (0, 0);
            for _ in 0..8 {
                (0..3).for_each(|n| write_some(&mut driver, bytes / PAGE_SIZE, round + n));
                round += 3;
                driver.quiesce();
                let was = disk.contents(0, bytes as usize);
                let changed = writes.drain();
                let blocks = changed.runs().collect();
                let mut frozen = copy_before_write.freeze(file.clone(), bytes, blocks).unwrap();
                driver.transport.resume();
                thread::scope(|scope| {
                    let copier = scope.spawn(|| {
                        let (mut runs, mut some) = (Vec::new(), vec![0; 4 * 4096]);
                        while frozen.next(&mut runs, &mut some).unwrap() > 0 {
                            let mut at = 0;
                            for run in &runs {
                                let to = run.start.gpa() as usize;
                                let len = run.bytes() as usize;
                                copy[to..to + len].copy_from_slice(&some[at..at + len]);
                                at += len;
                            }
                            thread::sleep(std::time::Duration::from_micros(300));
                        }
                    });
                    while !copier.is_finished() {
                        write_some(&mut driver, bytes / PAGE_SIZE, round);
                        (round, rounds_beside_copy) = (round + 1, rounds_beside_copy + 1);
                    }
                });
                changed.commit();
                let wrong = copy.chunks(512).zip(was.chunks(512)).position(|(a, b)| a != b);
                assert_eq!(wrong, None, "the first wrong sector");
            }
            assert!(rounds_beside_copy > 0, "nothing was written while it was copied");
        }
    }

    /// Works as a migration does that ends while an epoch is copied: from then on the destination
    /// may write.
    #[test]
    fn released_disk_is_not_copied_further() {
        let disk = Disk::new();
        let mut block = disk.block(engines()[0]);
        let (source, bytes) = (block.source(), disk.config.bytes);
        block.acquire(NextHost::Another).unwrap();
        let (file, copy_before_write) =
            (Arc::new(source.open().unwrap()), source.copy_before_write().unwrap());
        let all = FrameRun { start: Gfn(0), count: bytes / PAGE_SIZE };
        let freeze = || copy_before_write.freeze(file.clone(), bytes, [all].into_iter().collect());
        let mut frozen = freeze().unwrap();
        let (mut runs, mut some) = (Vec::new(), vec![0; 4 * 4096]);
        assert_eq!(frozen.next(&mut runs, &mut some).unwrap(), 4);
        block.release(crate::testing::soon(), NextHost::Another).unwrap();
        let error = frozen.next(&mut runs, &mut some).unwrap_err();
        assert!(matches!(error, CopyBeforeWriteError::Released), "{error}");
        drop(frozen);
        freeze().unwrap_err();
        block.acquire(NextHost::Another).unwrap();
        assert_eq!(freeze().unwrap().next(&mut runs, &mut some).unwrap(), 4);
    }

    /// Works as a migration does: whichever requests were in flight, the copy equals what the
    /// driver has written.
    #[test]
    fn drained_epochs_add_up_to_the_disk() {
        for with in engines() {
            let disk = Disk::new();
            let block = disk.block(with);
            let source = block.source();
            let mut driver = Driver::started(Box::new(block));
            let blocks = disk.config.bytes / PAGE_SIZE;
            let (paused, epochs) = (AtomicBool::new(false), AtomicU64::new(0));
            thread::scope(|scope| {
                let writes = source.subscribe("copy").unwrap().unwrap();
                let copier = scope.spawn(|| copy_on(&source, writes, &paused, &epochs));
                for round in 0..60u64 {
                    // The writes of earlier rounds are in an epoch of their own.
                    while round == 30 && epochs.load(Ordering::SeqCst) == 0 && !copier.is_finished()
                    {
                        thread::yield_now();
                    }
                    let mut sent = Vec::new();
                    for n in 0..24u64 {
                        // No two requests that are in flight write to the same block: virtio does
                        // not define their order.
                        let (n, seed) = (round * 24 + n, n);
                        let block = (round * 7 + seed * (blocks / 24)) % blocks;
                        let (sector, len) = (block * 8 + n % 3, 512 * (1 + n as usize % 5));
                        let bytes = pattern(n, len);
                        let head = header(&mut driver, VIRTIO_BLK_T_OUT, sector);
                        let (data, status) = (driver.readable(&bytes), driver.writable(1));
                        let head = driver.post((n % 2) as usize, &[head, data, status]);
                        sent.push(((n % 2) as usize, head, status));
                    }
                    driver.kick(0);
                    driver.kick(1);
                    for (queue, head, status) in sent {
                        driver.wait_used(queue, head);
                        assert_eq!(driver.bytes(status), [OK]);
                    }
                    driver.forget_buffers();
                    let kind = match round % 2 {
                        0 => VIRTIO_BLK_T_DISCARD,
                        _ => VIRTIO_BLK_T_WRITE_ZEROES,
                    };
                    let ranges =
                        driver.readable(&range(round * 80 % 8000, 1 + round as u32 % 40, 0));
                    assert_eq!(request(&mut driver, kind, 0, &[ranges]), OK);
                    driver.forget_buffers();
                }
                driver.quiesce();
                paused.store(true, Ordering::SeqCst);
                let copy = copier.join().unwrap();
                let epochs = epochs.load(Ordering::SeqCst);
                let written = disk.contents(0, disk.config.bytes as usize);
                let wrong = copy.chunks(512).zip(written.chunks(512)).position(|(a, b)| a != b);
                assert_eq!(wrong, None, "the first wrong sector, of {epochs} epochs");
                assert!(written.iter().any(|b| *b != 0) && epochs > 1, "{epochs} epochs");
            });
        }
    }
}
