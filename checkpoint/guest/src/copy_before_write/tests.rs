//! Copy-before-write against a model, and the ends of its waits.

use std::os::unix::fs::FileExt;
use std::thread;

use driftline_dirty_tracker::PAGE_SIZE;
use proptest::prelude::*;

use super::*;

fn run(start: u64, count: u64) -> FrameRun {
    FrameRun { start: Gfn(start), count }
}

fn drive(blocks: u64) -> Arc<File> {
    let file = tempfile::tempfile().unwrap();
    for block in 0..blocks {
        file.write_all_at(&[block as u8 | 0x80; PAGE_BYTES], block * PAGE_SIZE).unwrap();
    }
    Arc::new(file)
}

fn write(cbw: &CopyBeforeWrite, file: &File, run: FrameRun, with: u8) {
    cbw.before_write(run.start.gpa() + 7, run.bytes() - 7);
    file.write_all_at(&vec![with; run.bytes() as usize - 7], run.start.gpa() + 7).unwrap();
}

fn copy(frozen: &mut FrozenBlocks, into: &mut BTreeMap<u64, Vec<u8>>, at_a_time: usize) -> u64 {
    let (mut runs, mut contents) = (Vec::new(), vec![0; at_a_time * PAGE_BYTES]);
    let count = frozen.next(&mut runs, &mut contents).unwrap();
    let frames = runs.iter().flat_map(|run| run.frames());
    for (block, content) in frames.zip(contents.chunks_exact(PAGE_BYTES)) {
        assert_eq!(into.insert(block.0, content.to_vec()), None, "{block:?} twice");
    }
    count
}

/// Returns once a write has begun to wait.
fn until_a_write_waits(frozen: &FrozenBlocks) {
    let since = Instant::now();
    while frozen.waits().times == 0 {
        assert!(since.elapsed() < Duration::from_secs(60), "no write waits");
        thread::yield_now();
    }
}

proptest! {
    #[test]
    fn copied_blocks_have_their_content_at_the_freeze(
        active in prop::collection::vec((0u64..60, 1u64..6), 0..8),
        steps in prop::collection::vec((0u64..60, 1u64..8, 0usize..4), 0..40),
    ) {
        let (file, cbw) = (drive(64), Arc::new(CopyBeforeWrite::with_capacity(12)));
        write(&cbw, &file, run(3, 1), 1);
        let bytes = 64 * PAGE_SIZE - 512;
        let active: FrameSet = active.iter().map(|(start, count)| run(*start, *count)).collect();
        let mut frozen = cbw.freeze(file.clone(), bytes, active.clone()).unwrap();
        let mut copied = BTreeMap::new();
        for (step, (start, count, at_a_time)) in steps.into_iter().enumerate() {
            // The device runs on this thread: it must not have to wait.
            while cbw.lock().active.as_ref().unwrap().free.len() < 8 {
                copy(&mut frozen, &mut copied, 1);
            }
            write(&cbw, &file, run(start, count.min(64 - start)), step as u8 & 0x3f);
            if at_a_time > 0 {
                copy(&mut frozen, &mut copied, at_a_time);
            }
        }
        while copy(&mut frozen, &mut copied, 3) > 0 {}
        let blocks = active.iter().flat_map(|run| run.frames()).map(|block| block.0);
        prop_assert!(copied.keys().copied().eq(blocks));
        for (block, content) in copied {
            let mut was = vec![block as u8 | 0x80; PAGE_BYTES];
            if block == 3 {
                was[7..].fill(1);
            }
            if block == 63 {
                was[PAGE_BYTES - 512..].fill(0);
            }
            prop_assert!(content == was, "block {block}");
        }
    }
}

#[test]
fn write_waits_for_room_and_continues() {
    let (file, cbw) = (drive(64), Arc::new(CopyBeforeWrite::with_capacity(4)));
    let blocks = FrameSet::from_iter([run(0, 64)]);
    let mut frozen = cbw.freeze(file.clone(), 64 * PAGE_SIZE, blocks).unwrap();
    assert!(cbw.freeze(file.clone(), 64 * PAGE_SIZE, FrameSet::new()).is_err());
    thread::scope(|scope| {
        scope.spawn(|| write(&cbw, &file, run(10, 50), 1));
        until_a_write_waits(&frozen);
        let mut copied = BTreeMap::new();
        while copy(&mut frozen, &mut copied, 3) > 0 {}
        assert_eq!(copied.len(), 64);
        assert!(copied.iter().all(|(block, c)| c.iter().all(|b| *b == *block as u8 | 0x80)));
    });
    assert!(frozen.waits().time > Duration::ZERO, "{:?}", frozen.waits());
}

#[test]
fn every_wait_ends() {
    // A copy thread that copies nothing.
    let (file, cbw) = (drive(64), Arc::new(CopyBeforeWrite::with_capacity(4)));
    let blocks = FrameSet::from_iter([run(0, 64)]);
    let mut frozen = cbw.freeze(file.clone(), 64 * PAGE_SIZE, blocks.clone()).unwrap();
    let since = Instant::now();
    write(&cbw, &file, run(0, 64), 1);
    assert!(since.elapsed() >= WRITE_WAIT_LIMIT, "{:?}", since.elapsed());
    let (mut runs, mut contents) = (Vec::new(), vec![0; PAGE_BYTES]);
    let error = frozen.next(&mut runs, &mut contents).unwrap_err();
    assert!(matches!(error, CopyBeforeWriteError::Stalled), "{error}");
    drop(frozen);
    // A copy thread that drops its blocks.
    let frozen = cbw.freeze(file.clone(), 64 * PAGE_SIZE, blocks.clone()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| write(&cbw, &file, run(0, 64), 2));
        until_a_write_waits(&frozen);
        drop(frozen);
        // Otherwise the write would wait as long as the first one.
        assert!(cbw.lock().active.is_none());
    });
    let mut frozen = cbw.freeze(file, 64 * PAGE_SIZE, blocks).unwrap();
    assert_eq!(frozen.next(&mut runs, &mut contents).unwrap(), 1);
}

#[test]
fn unreadable_drive_ends_copy_before_write() {
    let dir = tempfile::tempdir().unwrap();
    let write_only = Arc::new(File::create(dir.path().join("drive")).unwrap());
    write_only.set_len(8 * PAGE_SIZE).unwrap();
    let cbw = Arc::new(CopyBeforeWrite::default());
    let blocks = FrameSet::from_iter([run(0, 8)]);
    for device_first in [false, true] {
        let mut frozen = cbw.freeze(write_only.clone(), 8 * PAGE_SIZE, blocks.clone()).unwrap();
        if device_first {
            write(&cbw, &write_only, run(2, 1), 1);
        }
        let (mut runs, mut contents) = (Vec::new(), vec![0; PAGE_BYTES]);
        let error = frozen.next(&mut runs, &mut contents).unwrap_err();
        let CopyBeforeWriteError::Unreadable(error) = error else { panic!("{error}") };
        assert_eq!(error.raw_os_error(), Some(9), "EBADF");
        let error = frozen.next(&mut runs, &mut contents).unwrap_err();
        assert!(matches!(error, CopyBeforeWriteError::Ended), "{error}");
        write(&cbw, &write_only, run(3, 1), 1);
    }
}

#[test]
fn pausing_guest_does_not_wait_for_room() {
    let (file, cbw) = (drive(64), Arc::new(CopyBeforeWrite::with_capacity(4)));
    let blocks = FrameSet::from_iter([run(0, 64)]);
    let mut frozen = cbw.freeze(file.clone(), 64 * PAGE_SIZE, blocks.clone()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| write(&cbw, &file, run(0, 64), 1));
        until_a_write_waits(&frozen);
        cbw.set_pausing(true);
    });
    let (mut runs, mut contents) = (Vec::new(), vec![0; PAGE_BYTES]);
    let error = frozen.next(&mut runs, &mut contents).unwrap_err();
    assert!(matches!(error, CopyBeforeWriteError::Paused), "{error}");
    drop(frozen);
    // The next one begins while the guest is paused.
    let mut frozen = cbw.freeze(file.clone(), 64 * PAGE_SIZE, blocks.clone()).unwrap();
    cbw.set_pausing(false);
    write(&cbw, &file, run(0, 4), 2);
    assert_eq!(frozen.next(&mut runs, &mut contents).unwrap(), 1);
}

/// Copy-before-write for a host whose threads get processors late.
fn with_long_read_wait() -> CopyBeforeWrite {
    CopyBeforeWrite { read_wait_limit: WRITE_WAIT_LIMIT, ..CopyBeforeWrite::default() }
}

/// A write waits only for the block that is being read when the guest is to be paused. Whatever the
/// timing, it waits for that read, and the epoch has the old content. It does not wait for a copy
/// thread that never returns from its read.
#[test]
fn pausing_guest_waits_for_a_read_in_progress() {
    let (file, cbw) = (drive(64), Arc::new(with_long_read_wait()));
    let blocks = || FrameSet::from_iter([run(0, 64)]);
    let reads = |cbw: &CopyBeforeWrite, of: Vec<FrameRun>| {
        let mut state = cbw.lock();
        let active = state.active.as_mut().unwrap();
        active.cursor = of.last().map_or(active.cursor, |run| run.end().0);
        active.reading = of;
        drop(state);
        cbw.changed.notify_all();
    };
    for delay in [Duration::ZERO, Duration::from_millis(1)] {
        let frozen = cbw.freeze(file.clone(), 64 * PAGE_SIZE, blocks()).unwrap();
        reads(&cbw, vec![run(0, 4)]);
        cbw.set_pausing(true);
        thread::scope(|scope| {
            let device = scope.spawn(|| cbw.before_write(0, 6 * PAGE_SIZE));
            thread::sleep(delay);
            assert!(cbw.lock().active.as_ref().unwrap().failed.is_none());
            reads(&cbw, Vec::new());
            device.join().unwrap();
        });
        let state = cbw.lock();
        let active = state.active.as_ref().unwrap();
        assert!(active.failed.is_none() && !active.over, "{:?}", active.failed);
        assert!(active.saved.keys().eq(&[4, 5]));
        drop(state);
        cbw.set_pausing(false);
        drop(frozen);
    }
    let cbw = Arc::new(CopyBeforeWrite::default());
    let mut frozen = cbw.freeze(file, 64 * PAGE_SIZE, blocks()).unwrap();
    reads(&cbw, vec![run(0, 4)]);
    cbw.set_pausing(true);
    let since = Instant::now();
    cbw.before_write(0, PAGE_SIZE);
    assert!(since.elapsed() >= READ_WAIT_LIMIT, "{:?}", since.elapsed());
    let error = frozen.next(&mut Vec::new(), &mut [0; PAGE_BYTES]).unwrap_err();
    assert!(matches!(error, CopyBeforeWriteError::Paused), "{error}");
}

/// The guest pauses and resumes at any moment of a copy under load. No epoch is lost if there is
/// room for what is overwritten, and every epoch has the content of its instant.
#[test]
fn pause_fails_no_epoch_that_has_room() {
    const BLOCKS: u64 = 512;
    let (file, cbw) = (drive(BLOCKS), Arc::new(with_long_read_wait()));
    let mut was: Vec<u8> = (0..BLOCKS).map(|block| block as u8 | 0x80).collect();
    let over = AtomicBool::new(false);
    // The device holds this while it writes; a thread that holds it has a paused device.
    let device = Mutex::new(());
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1u64.. {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let in_progress = device.lock();
                let (block, with) = (n * 37 % BLOCKS, n as u8 & 0x7f);
                cbw.before_write(block * PAGE_SIZE, PAGE_SIZE);
                file.write_all_at(&[with; PAGE_BYTES], block * PAGE_SIZE).unwrap();
                drop(in_progress);
                // Otherwise no other thread would ever get the lock.
                thread::sleep(Duration::from_micros(1));
            }
        });
        for round in 0..150u32 {
            cbw.set_pausing(true);
            let paused = device.lock();
            for (block, was) in was.iter_mut().enumerate() {
                let mut byte = [0];
                file.read_exact_at(&mut byte, block as u64 * PAGE_SIZE + 9).unwrap();
                *was = byte[0];
            }
            let active = FrameSet::from_iter([run(0, BLOCKS)]);
            let mut frozen = cbw.freeze(file.clone(), BLOCKS * PAGE_SIZE, active).unwrap();
            cbw.set_pausing(false);
            drop(paused);
            let mut copied = BTreeMap::new();
            // Another pause, during the copy.
            thread::scope(|inner| {
                inner.spawn(|| {
                    thread::sleep(Duration::from_micros(u64::from(round) * 5));
                    cbw.set_pausing(true);
                    drop(device.lock());
                    cbw.set_pausing(false);
                });
                while copy(&mut frozen, &mut copied, 16) > 0 {}
            });
            assert_eq!(copied.len() as u64, BLOCKS, "round {round}");
            let wrong =
                copied.iter().find(|(block, c)| c.iter().any(|b| *b != was[**block as usize]));
            assert_eq!(wrong.map(|(block, _)| block), None, "round {round}");
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn released_drive_is_in_no_epoch() {
    let (file, cbw) = (drive(8), Arc::new(CopyBeforeWrite::default()));
    let blocks = FrameSet::from_iter([run(0, 8)]);
    let mut frozen = cbw.freeze(file.clone(), 8 * PAGE_SIZE, blocks.clone()).unwrap();
    let (mut runs, mut contents) = (Vec::new(), vec![0; 4 * PAGE_BYTES]);
    assert_eq!(frozen.next(&mut runs, &mut contents).unwrap(), 4);
    cbw.release();
    let error = frozen.next(&mut runs, &mut contents).unwrap_err();
    assert!(matches!(error, CopyBeforeWriteError::Released), "{error}");
    drop(frozen);
    let error = cbw.freeze(file.clone(), 8 * PAGE_SIZE, blocks.clone()).unwrap_err();
    assert!(matches!(error, CopyBeforeWriteError::Released), "{error}");
    cbw.acquire();
    let mut frozen = cbw.freeze(file, 8 * PAGE_SIZE, blocks).unwrap();
    while frozen.next(&mut runs, &mut contents).unwrap() > 0 {}
    // Everything was copied by then.
    cbw.release();
    assert_eq!(frozen.next(&mut runs, &mut contents).unwrap(), 0);
}

/// The guest writes to all remaining blocks at the moment at which the copy thread asks for more.
#[test]
fn block_saved_at_the_last_moment_is_copied() {
    let (file, cbw) = (drive(64), Arc::new(CopyBeforeWrite::default()));
    for round in 0..2000u32 {
        let mut frozen =
            cbw.freeze(file.clone(), 64 * PAGE_SIZE, [run(20, 10)].into_iter().collect()).unwrap();
        let mut copied = BTreeMap::new();
        thread::scope(|scope| {
            let device = scope.spawn(|| {
                (0..round % 64).for_each(|_| std::hint::spin_loop());
                cbw.before_write(20 * PAGE_SIZE, 10 * PAGE_SIZE);
            });
            while copy(&mut frozen, &mut copied, 64) > 0 {}
            device.join().unwrap();
        });
        assert_eq!(copied.len(), 10, "round {round}");
    }
}
