//! Copy-before-write against a model, and the ends of its waits.

use std::os::unix::fs::FileExt;
use std::thread;

use proptest::prelude::*;

use super::*;

fn run(start: u64, count: u64) -> FrameRun {
    FrameRun { start: Gfn(start), count }
}

fn drive(blocks: u64) -> Arc<File> {
    let file = tempfile::tempfile().unwrap();
    for block in 0..blocks {
        file.write_all_at(&[block as u8 | 0x80; PAGE], block * PAGE_SIZE).unwrap();
    }
    Arc::new(file)
}

fn write(keeper: &Keeper, file: &File, run: FrameRun, with: u8) {
    keeper.before_write(run.start.gpa() + 7, run.bytes() - 7);
    file.write_all_at(&vec![with; run.bytes() as usize - 7], run.start.gpa() + 7).unwrap();
}

fn copy(keeping: &mut Keeping, into: &mut BTreeMap<u64, Vec<u8>>, at_once: usize) -> u64 {
    let (mut runs, mut contents) = (Vec::new(), vec![0; at_once * PAGE]);
    let count = keeping.next(&mut runs, &mut contents).unwrap();
    let frames = runs.iter().flat_map(|run| run.frames());
    for (block, content) in frames.zip(contents.chunks_exact(PAGE)) {
        assert_eq!(into.insert(block.0, content.to_vec()), None, "{block:?} twice");
    }
    count
}

proptest! {
    #[test]
    fn copied_blocks_have_their_content_at_the_freeze(
        kept in prop::collection::vec((0u64..60, 1u64..6), 0..8),
        steps in prop::collection::vec((0u64..60, 1u64..8, 0usize..4), 0..40),
    ) {
        let (file, keeper) = (drive(64), Arc::new(Keeper::with_room(12)));
        write(&keeper, &file, run(3, 1), 1);
        let bytes = 64 * PAGE_SIZE - 512;
        let kept: FrameSet = kept.iter().map(|(start, count)| run(*start, *count)).collect();
        let mut keeping = keeper.keep(file.clone(), bytes, kept.clone()).unwrap();
        let mut copied = BTreeMap::new();
        for (step, (start, count, at_once)) in steps.into_iter().enumerate() {
            // The device runs on this thread: it must not have to wait.
            while keeper.lock().kept.as_ref().unwrap().free.len() < 8 {
                copy(&mut keeping, &mut copied, 1);
            }
            write(&keeper, &file, run(start, count.min(64 - start)), step as u8 & 0x3f);
            if at_once > 0 {
                copy(&mut keeping, &mut copied, at_once);
            }
        }
        while copy(&mut keeping, &mut copied, 3) > 0 {}
        prop_assert!(copied.keys().copied().eq(kept.iter().flat_map(|r| r.frames()).map(|g| g.0)));
        for (block, content) in copied {
            let mut was = vec![block as u8 | 0x80; PAGE];
            if block == 3 {
                was[7..].fill(1);
            }
            if block == 63 {
                was[PAGE - 512..].fill(0);
            }
            prop_assert!(content == was, "block {block}");
        }
    }
}

#[test]
fn write_waits_for_room_and_continues() {
    let (file, keeper) = (drive(64), Arc::new(Keeper::with_room(4)));
    let blocks = FrameSet::from_iter([run(0, 64)]);
    let mut keeping = keeper.keep(file.clone(), 64 * PAGE_SIZE, blocks).unwrap();
    assert!(keeper.keep(file.clone(), 64 * PAGE_SIZE, FrameSet::new()).is_err());
    thread::scope(|scope| {
        let device = scope.spawn(|| write(&keeper, &file, run(10, 50), 1));
        thread::sleep(Duration::from_millis(20));
        assert!(!device.is_finished());
        let mut copied = BTreeMap::new();
        while copy(&mut keeping, &mut copied, 3) > 0 {}
        assert_eq!(copied.len(), 64);
        assert!(copied.iter().all(|(block, c)| c.iter().all(|b| *b == *block as u8 | 0x80)));
    });
    let waits = keeping.waits();
    assert!(waits.times > 0 && waits.time >= Duration::from_millis(10), "{waits:?}");
}

#[test]
fn every_wait_ends() {
    // A copy thread that does not come.
    let (file, keeper) = (drive(64), Arc::new(Keeper::with_room(4)));
    let blocks = FrameSet::from_iter([run(0, 64)]);
    let mut keeping = keeper.keep(file.clone(), 64 * PAGE_SIZE, blocks.clone()).unwrap();
    let since = Instant::now();
    write(&keeper, &file, run(0, 64), 1);
    assert!(
        (WRITE_WAIT_LIMIT..2 * WRITE_WAIT_LIMIT).contains(&since.elapsed()),
        "{:?}",
        since.elapsed()
    );
    let (mut runs, mut contents) = (Vec::new(), vec![0; PAGE]);
    let said = keeping.next(&mut runs, &mut contents).unwrap_err();
    assert!(matches!(said, KeepError::Stalled), "{said}");
    drop(keeping);
    // A copy thread that goes away.
    let keeping = keeper.keep(file.clone(), 64 * PAGE_SIZE, blocks).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| write(&keeper, &file, run(0, 64), 2));
        thread::sleep(Duration::from_millis(20));
        drop(keeping);
    });
}

#[test]
fn unreadable_drive_ends_copy_before_write() {
    let dir = tempfile::tempdir().unwrap();
    let write_only = Arc::new(File::create(dir.path().join("drive")).unwrap());
    write_only.set_len(8 * PAGE_SIZE).unwrap();
    let keeper = Arc::new(Keeper::default());
    let blocks = FrameSet::from_iter([run(0, 8)]);
    for device_first in [false, true] {
        let mut keeping = keeper.keep(write_only.clone(), 8 * PAGE_SIZE, blocks.clone()).unwrap();
        if device_first {
            write(&keeper, &write_only, run(2, 1), 1);
        }
        let (mut runs, mut contents) = (Vec::new(), vec![0; PAGE]);
        let said = keeping.next(&mut runs, &mut contents).unwrap_err();
        let KeepError::Unread(said) = said else { panic!("{said}") };
        assert_eq!(said.raw_os_error(), Some(9), "EBADF");
        let said = keeping.next(&mut runs, &mut contents).unwrap_err();
        assert!(matches!(said, KeepError::Gone), "{said}");
        write(&keeper, &write_only, run(3, 1), 1);
    }
}

#[test]
fn pausing_guest_does_not_wait_for_room() {
    let (file, keeper) = (drive(64), Arc::new(Keeper::with_room(4)));
    let blocks = FrameSet::from_iter([run(0, 64)]);
    let mut keeping = keeper.keep(file.clone(), 64 * PAGE_SIZE, blocks.clone()).unwrap();
    let since = Instant::now();
    thread::scope(|scope| {
        let device = scope.spawn(|| write(&keeper, &file, run(0, 64), 1));
        thread::sleep(Duration::from_millis(20));
        assert!(!device.is_finished());
        keeper.hurry(true);
    });
    assert!(since.elapsed() < WRITE_WAIT_LIMIT, "{:?}", since.elapsed());
    let (mut runs, mut contents) = (Vec::new(), vec![0; PAGE]);
    let said = keeping.next(&mut runs, &mut contents).unwrap_err();
    assert!(matches!(said, KeepError::Paused), "{said}");
    drop(keeping);
    // The next one begins while the guest is paused.
    let mut keeping = keeper.keep(file.clone(), 64 * PAGE_SIZE, blocks.clone()).unwrap();
    keeper.hurry(false);
    write(&keeper, &file, run(0, 4), 2);
    assert_eq!(keeping.next(&mut runs, &mut contents).unwrap(), 1);
}

/// A keeper for a host whose threads get processors late.
fn patient() -> Keeper {
    Keeper { last_read: WRITE_WAIT_LIMIT, ..Keeper::default() }
}

/// A write waits only for the block that is being read when the guest is to be paused. Whatever the
/// timing, it waits for that read, and the epoch has the old content. It does not wait for a copy
/// thread that never returns from its read.
#[test]
fn pausing_guest_waits_for_a_read_in_progress() {
    let (file, keeper) = (drive(64), Arc::new(patient()));
    let blocks = || FrameSet::from_iter([run(0, 64)]);
    let reads = |keeper: &Keeper, of: Vec<FrameRun>| {
        let mut state = keeper.lock();
        let kept = state.kept.as_mut().unwrap();
        kept.cursor = of.last().map_or(kept.cursor, |run| run.end().0);
        kept.reading = of;
        drop(state);
        keeper.news.notify_all();
    };
    for late in [Duration::ZERO, Duration::from_millis(1)] {
        let keeping = keeper.keep(file.clone(), 64 * PAGE_SIZE, blocks()).unwrap();
        reads(&keeper, vec![run(0, 4)]);
        keeper.hurry(true);
        thread::scope(|scope| {
            let device = scope.spawn(|| keeper.before_write(0, 6 * PAGE_SIZE));
            thread::sleep(late);
            assert!(keeper.lock().kept.as_ref().unwrap().failed.is_none());
            reads(&keeper, Vec::new());
            device.join().unwrap();
        });
        let state = keeper.lock();
        let kept = state.kept.as_ref().unwrap();
        assert!(kept.failed.is_none() && !kept.over, "{:?}", kept.failed);
        assert!(kept.aside.keys().eq(&[4, 5]));
        drop(state);
        keeper.hurry(false);
        drop(keeping);
    }
    let keeper = Arc::new(Keeper::default());
    let mut keeping = keeper.keep(file, 64 * PAGE_SIZE, blocks()).unwrap();
    reads(&keeper, vec![run(0, 4)]);
    keeper.hurry(true);
    let since = Instant::now();
    keeper.before_write(0, PAGE_SIZE);
    assert!((LAST_READ..WRITE_WAIT_LIMIT).contains(&since.elapsed()), "{:?}", since.elapsed());
    let said = keeping.next(&mut Vec::new(), &mut [0; PAGE]).unwrap_err();
    assert!(matches!(said, KeepError::Paused), "{said}");
}

/// The guest pauses and resumes at any moment of a copy under load. No epoch is lost if there is
/// room for what is overwritten, and every epoch has the content of its instant.
#[test]
fn pause_fails_no_epoch_that_has_room() {
    const BLOCKS: u64 = 512;
    let (file, keeper) = (drive(BLOCKS), Arc::new(patient()));
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
                let under_way = device.lock();
                let (block, with) = (n * 37 % BLOCKS, n as u8 & 0x7f);
                keeper.before_write(block * PAGE_SIZE, PAGE_SIZE);
                file.write_all_at(&[with; PAGE], block * PAGE_SIZE).unwrap();
                drop(under_way);
                // Otherwise no other thread would ever get the lock.
                thread::sleep(Duration::from_micros(1));
            }
        });
        for round in 0..150u32 {
            keeper.hurry(true);
            let stands = device.lock();
            for (block, was) in was.iter_mut().enumerate() {
                let mut byte = [0];
                file.read_exact_at(&mut byte, block as u64 * PAGE_SIZE + 9).unwrap();
                *was = byte[0];
            }
            let kept = FrameSet::from_iter([run(0, BLOCKS)]);
            let mut keeping = keeper.keep(file.clone(), BLOCKS * PAGE_SIZE, kept).unwrap();
            keeper.hurry(false);
            drop(stands);
            let mut copied = BTreeMap::new();
            // Another pause, during the copy.
            thread::scope(|inner| {
                inner.spawn(|| {
                    thread::sleep(Duration::from_micros(u64::from(round) * 5));
                    keeper.hurry(true);
                    drop(device.lock());
                    keeper.hurry(false);
                });
                while copy(&mut keeping, &mut copied, 16) > 0 {}
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
    let (file, keeper) = (drive(8), Arc::new(Keeper::default()));
    let blocks = FrameSet::from_iter([run(0, 8)]);
    let mut keeping = keeper.keep(file.clone(), 8 * PAGE_SIZE, blocks.clone()).unwrap();
    let (mut runs, mut contents) = (Vec::new(), vec![0; 4 * PAGE]);
    assert_eq!(keeping.next(&mut runs, &mut contents).unwrap(), 4);
    keeper.let_go();
    let said = keeping.next(&mut runs, &mut contents).unwrap_err();
    assert!(matches!(said, KeepError::LetGo), "{said}");
    drop(keeping);
    let said = keeper.keep(file.clone(), 8 * PAGE_SIZE, blocks.clone()).unwrap_err();
    assert!(matches!(said, KeepError::LetGo), "{said}");
    keeper.hold();
    let mut keeping = keeper.keep(file, 8 * PAGE_SIZE, blocks).unwrap();
    while keeping.next(&mut runs, &mut contents).unwrap() > 0 {}
    // Everything was copied by then.
    keeper.let_go();
    assert_eq!(keeping.next(&mut runs, &mut contents).unwrap(), 0);
}

/// The guest writes to all remaining blocks at the moment at which the copy thread asks for more.
#[test]
fn block_saved_at_the_last_moment_is_copied() {
    let (file, keeper) = (drive(64), Arc::new(Keeper::default()));
    for round in 0..2000u32 {
        let mut keeping =
            keeper.keep(file.clone(), 64 * PAGE_SIZE, [run(20, 10)].into_iter().collect()).unwrap();
        let mut copied = BTreeMap::new();
        thread::scope(|scope| {
            let device = scope.spawn(|| {
                (0..round % 64).for_each(|_| std::hint::spin_loop());
                keeper.before_write(20 * PAGE_SIZE, 10 * PAGE_SIZE);
            });
            while copy(&mut keeping, &mut copied, 64) > 0 {}
            device.join().unwrap();
        });
        assert_eq!(copied.len(), 10, "round {round}");
    }
}
