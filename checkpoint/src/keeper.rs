//! Blocks of a drive that keep their content while the guest writes on, until somebody has copied them.
//!
//! ```text
//! the guest stands   Keeper::keep: what changed is kept
//! the device         before_write: what a kept block holds is set aside first; where there is no room for that, the write waits
//! the copier         Keeping::next: what was set aside first, then the others in order; each is let go of
//! ```
//!
//! While nothing is kept a write costs one look at a flag. Nobody waits for ever: the copier's end lets go of everything, and a device
//! that has waited for two seconds in all does so itself, which the copier learns.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE};

use crate::drive::read_blocks;
use crate::instant::PATIENCE;

const PAGE: usize = PAGE_SIZE as usize;
/// Blocks that can be set aside at a time: 4 MiB.
const ROOM: usize = 1024;

/// What the device of a drive and whoever copies it share: see the module's drawing. The device asks before each change
/// of the drive, and is told when that may be made.
pub struct Keeper {
    /// Some blocks are kept. Changes from false to true only while the device stands.
    keeps: AtomicBool,
    state: Mutex<State>,
    /// Something was let go of.
    news: Condvar,
    /// Blocks that can be set aside.
    most: usize,
}

#[derive(Default)]
struct State {
    kept: Option<Kept>,
    /// Reserved once, reused.
    room: Vec<u8>,
}

/// Of one instant.
struct Kept {
    file: Arc<File>,
    bytes: u64,
    /// In the file as they were.
    pending: FrameSet,
    /// Written to since; where in the room they are.
    aside: BTreeMap<u64, usize>,
    free: Vec<usize>,
    waits: Waits,
    failed: Option<io::Error>,
}

/// How often the device waited for room, and for how long in all.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waits {
    pub(crate) times: u64,
    pub(crate) time: Duration,
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").field("keeps", &self.keeps).finish_non_exhaustive()
    }
}

impl Default for Keeper {
    /// With room for 4 MiB, which is reserved when a first epoch is taken.
    fn default() -> Self {
        Self::with_room(ROOM)
    }
}

impl Keeper {
    fn with_room(blocks: usize) -> Self {
        let (keeps, state, news) = Default::default();
        Self { keeps, state, news, most: blocks.max(1) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called by the device before it changes `bytes` bytes from `from` on: returns when it may. Waits for two seconds at most, all
    /// in all in an epoch.
    pub fn before_write(&self, from: u64, bytes: u64) {
        if bytes > 0 && self.keeps.load(Ordering::Acquire) {
            let (start, last) = (Gfn::containing(from), Gfn::containing(from + bytes - 1));
            self.set_aside(FrameRun { start, count: last.0 - start.0 + 1 });
        }
    }

    fn set_aside(&self, run: FrameRun) {
        let mut state = self.lock();
        loop {
            let State { kept: Some(kept), room } = &mut *state else { return };
            let Some(FrameRun { start: block, .. }) = kept.pending.within(run).next() else {
                return;
            };
            if let Some(place) = kept.free.pop() {
                let to = &mut room[place * PAGE..(place + 1) * PAGE];
                if let Err(e) = read_blocks(&kept.file, kept.bytes, block, to) {
                    self.give_up(kept, e);
                    return;
                }
                kept.pending.remove(FrameRun { start: block, count: 1 });
                kept.aside.insert(block.0, place);
                continue;
            }
            kept.waits.times += 1;
            let (since, left) = (Instant::now(), PATIENCE.saturating_sub(kept.waits.time));
            let waited = self.news.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if let Some(kept) = &mut state.kept {
                kept.waits.time += since.elapsed();
                if kept.waits.time >= PATIENCE {
                    self.give_up(kept, io::ErrorKind::TimedOut.into());
                }
            }
        }
    }

    /// Lets go of everything, since what is kept cannot be had.
    fn give_up(&self, kept: &mut Kept, why: io::Error) {
        kept.pending.clear();
        kept.aside.clear();
        kept.failed.get_or_insert(why);
        self.keeps.store(false, Ordering::Release);
        self.news.notify_all();
    }

    /// Reserves the room for what is set aside, so that this is not done in a pause.
    pub fn reserve(&self) {
        let mut state = self.lock();
        if state.room.is_empty() {
            state.room = vec![1; self.most * PAGE];
        }
    }

    /// Keeps `blocks` of the drive in `file`, of `bytes`, as they are now. The device stands: nothing that it was asked for is under way.
    /// An error is that some are kept already.
    pub fn keep(
        self: &Arc<Self>,
        file: Arc<File>,
        bytes: u64,
        blocks: FrameSet,
    ) -> io::Result<Keeping> {
        self.reserve();
        let mut state = self.lock();
        if state.kept.is_some() {
            return Err(io::Error::other("its blocks are kept for another already"));
        }
        let keeps = !blocks.is_empty();
        let (aside, waits, failed) = Default::default();
        let free = (0..self.most).collect();
        state.kept = Some(Kept { file, bytes, pending: blocks, aside, free, waits, failed });
        self.keeps.store(keeps, Ordering::Release);
        Ok(Keeping { keeper: self.clone() })
    }
}

/// Blocks that are kept until they are copied, or this is dropped.
#[derive(Debug)]
pub struct Keeping {
    keeper: Arc<Keeper>,
}

impl Keeping {
    /// Copies as many blocks as `contents` has room for, replaces `runs` with which those are, and lets go of them. How many; 0 if none
    /// is left. [`TimedOut`](io::ErrorKind::TimedOut) if the device has waited for too long. After an error none is kept.
    pub fn next(&mut self, runs: &mut Vec<FrameRun>, contents: &mut [u8]) -> io::Result<u64> {
        runs.clear();
        let mut state = self.keeper.lock();
        let State { kept: Some(kept), room } = &mut *state else { return Ok(0) };
        if let Some(e) = kept.failed.take() {
            return Err(e);
        }
        let (most, mut filled) = (contents.len() / PAGE, 0);
        // Somebody may wait for their room.
        while filled < most
            && let Some((block, place)) = kept.aside.pop_first()
        {
            let from = &room[place * PAGE..(place + 1) * PAGE];
            contents[filled * PAGE..(filled + 1) * PAGE].copy_from_slice(from);
            kept.free.push(place);
            runs.push(FrameRun { start: Gfn(block), count: 1 });
            filled += 1;
        }
        // Under the lock: nobody writes to them meanwhile.
        while filled < most
            && let Some(run) = kept.pending.take_first((most - filled) as u64)
        {
            let end = filled + run.count as usize;
            let to = &mut contents[filled * PAGE..end * PAGE];
            if let Err(e) = read_blocks(&kept.file, kept.bytes, run.start, to) {
                self.keeper.give_up(kept, e);
                return kept.failed.take().map_or(Ok(0), Err);
            }
            runs.push(run);
            filled = end;
        }
        self.keeper.news.notify_all();
        Ok(filled as u64)
    }

    /// How the device has waited so far.
    pub(crate) fn waits(&self) -> Waits {
        self.keeper.lock().kept.as_ref().map(|kept| kept.waits).unwrap_or_default()
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        let mut state = self.keeper.lock();
        self.keeper.keeps.store(false, Ordering::Release);
        state.kept = None;
        self.keeper.news.notify_all();
    }
}

#[cfg(test)]
mod tests {
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
        fn what_is_copied_is_what_was_there_at_the_instant(
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
                // The device is on this thread: it must not have to wait.
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
    fn who_writes_waits_for_room_and_goes_on() {
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
    fn nobody_waits_for_ever() {
        // For a copier that does not come.
        let (file, keeper) = (drive(64), Arc::new(Keeper::with_room(4)));
        let blocks = FrameSet::from_iter([run(0, 64)]);
        let mut keeping = keeper.keep(file.clone(), 64 * PAGE_SIZE, blocks.clone()).unwrap();
        let since = Instant::now();
        write(&keeper, &file, run(0, 64), 1);
        assert!((PATIENCE..2 * PATIENCE).contains(&since.elapsed()), "{:?}", since.elapsed());
        let (mut runs, mut contents) = (Vec::new(), vec![0; PAGE]);
        let said = keeping.next(&mut runs, &mut contents).unwrap_err();
        assert_eq!(said.kind(), io::ErrorKind::TimedOut);
        drop(keeping);
        // For one that goes.
        let keeping = keeper.keep(file.clone(), 64 * PAGE_SIZE, blocks).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| write(&keeper, &file, run(0, 64), 2));
            thread::sleep(Duration::from_millis(20));
            drop(keeping);
        });
    }

    #[test]
    fn a_drive_that_cannot_be_read_is_let_go_of() {
        let dir = tempfile::tempdir().unwrap();
        let write_only = Arc::new(File::create(dir.path().join("drive")).unwrap());
        write_only.set_len(8 * PAGE_SIZE).unwrap();
        let keeper = Arc::new(Keeper::default());
        let blocks = FrameSet::from_iter([run(0, 8)]);
        for device_first in [false, true] {
            let mut keeping =
                keeper.keep(write_only.clone(), 8 * PAGE_SIZE, blocks.clone()).unwrap();
            if device_first {
                write(&keeper, &write_only, run(2, 1), 1);
            }
            let (mut runs, mut contents) = (Vec::new(), vec![0; PAGE]);
            let said = keeping.next(&mut runs, &mut contents).unwrap_err();
            assert_eq!(said.raw_os_error(), Some(9), "EBADF");
            assert_eq!(keeping.next(&mut runs, &mut contents).unwrap(), 0);
            write(&keeper, &write_only, run(3, 1), 1);
        }
    }
}
