//! Copy-before-write for a drive: the old content of a block is saved before the guest overwrites
//! it, until the block has been copied.
//!
//! ```text
//! guest paused   Keeper::keep: the changed blocks are put under copy-before-write
//! device         before_write: saves the content of such a block first; without room for it, the
//!                write waits
//! copy thread    Keeping::next: takes saved blocks first, then the others in order
//! ```
//!
//! While no block is under copy-before-write, a write costs one load of a flag. Every wait ends:
//!
//! | event | limit | effect on copy-before-write |
//! |---|---|---|
//! | the copy thread drops its `Keeping` | at once | it ends and every write continues |
//! | one write has waited | 2 s | that write ends it |
//! | all writes of one epoch have waited | 10 s in total | the last of them ends it |
//! | the guest is to pause, a write waits for room | at once | that write ends it |
//! | the guest is to pause, a write waits for a read | 10 ms | that write ends it |
//!
//! In the last four cases the copy thread gets an error, and its epoch fails. Memory: 16 bytes per
//! run of blocks, and about 40 bytes per saved block besides its content.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::blocks::read_blocks;

const PAGE: usize = PAGE_SIZE as usize;
/// Blocks that can be saved at a time: 4 MiB.
pub const SAVED_BLOCKS_MAX: usize = 1024;
/// Limit on the time that a write to memory or a drive may wait for what it overwrites to be
/// copied. It is shorter than the time that a pause waits for vCPUs and devices, because these may
/// be the ones that wait.
pub const WRITE_WAIT_LIMIT: Duration = Duration::from_secs(2);
/// Limit on the total time that a device waits during one epoch.
const PATIENCE_IN_ALL: Duration = Duration::from_secs(10);
/// Interval at which a waiting write checks whether the guest is to pause.
const LOOK: Duration = Duration::from_millis(5);
/// Limit on the wait of a guest that is to pause for blocks that are being read. These are at most
/// some dozens, which mostly takes microseconds.
const LAST_READ: Duration = Duration::from_millis(10);

/// Why blocks are no longer under copy-before-write, or cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeepError {
    /// A write has waited for too long.
    #[error("the guest has waited for too long to write to what is not copied yet")]
    Stalled,
    /// A write waited while the guest was to be paused.
    #[error("the guest was paused while it waited to write to what is not copied yet")]
    Paused,
    /// The guest has released the drive: another host may write to it.
    #[error("the guest releases it")]
    LetGo,
    /// Another epoch has blocks under copy-before-write.
    #[error("its blocks are kept for another already")]
    Taken,
    /// Copy-before-write has ended, after an error that was returned before.
    #[error("its blocks are not kept any more")]
    Gone,
    /// The drive cannot be read.
    #[error("{0}")]
    Unread(io::Error),
}

/// Copy-before-write state shared by a drive's device and the copy thread: see the module's
/// drawing. The device calls [`before_write`](Self::before_write) before each change of the drive.
pub struct Keeper {
    /// Whether any block is under copy-before-write. Changes from false to true only while the
    /// device is paused.
    keeps: AtomicBool,
    /// Whether the guest is to be paused: then no write waits for room.
    hurried: AtomicBool,
    state: Mutex<State>,
    /// Signals that room or a block has become free, or that copy-before-write has ended.
    news: Condvar,
    /// Number of blocks that can be saved at a time.
    most: usize,
    /// [`LAST_READ`].
    last_read: Duration,
}

#[derive(Default)]
struct State {
    kept: Option<Kept>,
    /// The drive is not the guest's: copy-before-write is refused.
    let_go: bool,
    /// Memory for saved blocks, reserved once and reused.
    room: Vec<u8>,
}

/// Blocks of one instant.
struct Kept {
    file: Arc<File>,
    bytes: u64,
    /// All of them. Blocks from `cursor` on that are not in `taken` are unchanged in the file.
    blocks: FrameSet,
    /// Blocks before the cursor are copied, are being read, or were saved.
    cursor: u64,
    /// Blocks from the cursor on that were saved.
    taken: BTreeSet<u64>,
    /// Runs that the copy thread is reading at the moment, without the lock.
    reading: Vec<FrameRun>,
    /// Saved blocks, by number, with their position in the room.
    aside: BTreeMap<u64, usize>,
    free: Vec<usize>,
    waits: WriteWaits,
    failed: Option<KeepError>,
    /// Whether all blocks are copied, or copy-before-write has ended.
    over: bool,
}

impl Kept {
    /// Returns the first block of `run` that is unchanged in the file and must stay so.
    fn pending(&self, run: FrameRun) -> Option<u64> {
        let (start, end) = (run.start.0.max(self.cursor), run.end().0);
        let rest = FrameRun { start: Gfn(start), count: end.saturating_sub(start) };
        let mut blocks = self.blocks.within(rest).flat_map(|run| run.frames());
        blocks.find(|block| !self.taken.contains(&block.0)).map(|block| block.0)
    }

    /// Returns whether a block of `run` is being read.
    fn is_read(&self, run: FrameRun) -> bool {
        self.reading.iter().any(|read| read.start < run.end() && run.start < read.end())
    }

    /// Copies saved blocks, as many as `contents` has room for, and frees their room. Returns the
    /// number of blocks.
    fn take_aside(&mut self, room: &[u8], runs: &mut Vec<FrameRun>, contents: &mut [u8]) -> u64 {
        let before = runs.len();
        for to in contents.chunks_exact_mut(PAGE) {
            let Some((block, place)) = self.aside.pop_first() else { break };
            to.copy_from_slice(&room[place * PAGE..(place + 1) * PAGE]);
            self.free.push(place);
            runs.push(FrameRun { start: Gfn(block), count: 1 });
        }
        (runs.len() - before) as u64
    }

    /// Moves the cursor over the next blocks that are unchanged in the file, at most `most`.
    fn take_pending(&mut self, most: u64) -> Vec<FrameRun> {
        let (mut runs, mut left): (Vec<FrameRun>, u64) = (Vec::new(), most);
        while left > 0 {
            let rest = FrameRun { start: Gfn(self.cursor), count: u64::MAX };
            let Some(block) = self.blocks.within(rest).next().map(|run| run.start) else { break };
            self.cursor = block.0 + 1;
            if self.taken.remove(&block.0) {
                continue;
            }
            left -= 1;
            match runs.last_mut().filter(|last| last.end() == block) {
                Some(last) => last.count += 1,
                None => runs.push(FrameRun { start: block, count: 1 }),
            }
        }
        runs
    }
}

/// How often the device waited, and for how long in total.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteWaits {
    /// Waits begun.
    pub times: u64,
    /// Total time waited.
    pub time: Duration,
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").field("keeps", &self.keeps).finish_non_exhaustive()
    }
}

impl Default for Keeper {
    /// Has room for 4 MiB, which is reserved when the first epoch is taken.
    fn default() -> Self {
        Self::with_room(SAVED_BLOCKS_MAX)
    }
}

impl Keeper {
    fn with_room(blocks: usize) -> Self {
        let (keeps, hurried, state, news) = Default::default();
        Self { keeps, hurried, state, news, most: blocks.max(1), last_read: LAST_READ }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits until the device may change `bytes` bytes from `from` on. The device calls this before
    /// the change. Returns after about two seconds at most.
    pub fn before_write(&self, from: u64, bytes: u64) {
        if bytes > 0 && self.keeps.load(Ordering::Acquire) {
            let (start, last) = (Gfn::containing(from), Gfn::containing(from + bytes - 1));
            self.set_aside(FrameRun { start, count: last.0 - start.0 + 1 });
        }
    }

    fn set_aside(&self, run: FrameRun) {
        let (mut state, mut waited, mut rest) = (self.lock(), Duration::ZERO, run);
        // Part of `waited` during which the guest was to be paused.
        let mut hurried = Duration::ZERO;
        loop {
            let State { kept: Some(kept), room, .. } = &mut *state else { return };
            if kept.over {
                return;
            }
            let pending = kept.pending(rest);
            if pending.is_none() && !kept.is_read(run) {
                return;
            }
            if let Some(block) = pending
                && let Some(place) = kept.free.pop()
            {
                let to = &mut room[place * PAGE..(place + 1) * PAGE];
                if let Err(e) = read_blocks(&kept.file, kept.bytes, Gfn(block), to) {
                    return self.give_up(kept, KeepError::Unread(e));
                }
                kept.taken.insert(block);
                kept.aside.insert(block, place);
                // A block does not become pending again.
                rest = FrameRun { start: Gfn(block + 1), count: run.end().0 - (block + 1) };
                continue;
            }
            let hurry = self.hurried.load(Ordering::Acquire);
            // No block of the run is read a second time, so that wait ends with this read. Room,
            // however, may never come.
            if hurry && (pending.is_some() || hurried >= self.last_read) {
                return self.give_up(kept, KeepError::Paused);
            }
            if waited >= WRITE_WAIT_LIMIT || kept.waits.time >= PATIENCE_IN_ALL {
                return self.give_up(kept, KeepError::Stalled);
            }
            kept.waits.times += u64::from(waited.is_zero());
            let since = Instant::now();
            self.news.wait_for(&mut state, LOOK.min(WRITE_WAIT_LIMIT - waited));
            let more = since.elapsed().max(Duration::from_nanos(1));
            waited += more;
            hurried += if hurry { more } else { Duration::ZERO };
            if let Some(kept) = &mut state.kept {
                kept.waits.time += more;
            }
        }
    }

    /// Ends copy-before-write after an error.
    fn give_up(&self, kept: &mut Kept, why: KeepError) {
        if !kept.over {
            kept.over = true;
            kept.failed = Some(why);
            kept.aside.clear();
            kept.taken.clear();
            self.keeps.store(false, Ordering::Release);
            self.news.notify_all();
        }
    }

    /// Tells waiting writes that the guest is to be paused (`true`), or no longer is (`false`).
    /// While it is, a write that needs room ends copy-before-write at once; a write to a block that
    /// is being read waits some milliseconds at most. Call with `true` before any thread that may
    /// wait for a write is told to pause, and with `false` before those threads resume. Only one
    /// thread may call this.
    pub fn hurry(&self, hurry: bool) {
        self.hurried.store(hurry, Ordering::Release);
        // Without the lock, which may be held while a block is read: a writer that misses this
        // checks again soon.
        self.news.notify_all();
    }

    /// Returns how many blocks can be saved. With at most this many blocks, no write waits for
    /// room, whatever the guest overwrites.
    pub fn room(&self) -> u64 {
        self.most as u64
    }

    /// Records that the guest releases the drive: another host may write to it afterwards.
    /// Copy-before-write ends, and no block is read for an epoch, until [`hold`](Self::hold). Must
    /// be called before the other host can get the drive.
    pub fn let_go(&self) {
        let mut state = self.lock();
        state.let_go = true;
        if let Some(kept) = &mut state.kept {
            self.give_up(kept, KeepError::LetGo);
        }
    }

    /// Records that the drive is the guest's again.
    pub fn hold(&self) {
        self.lock().let_go = false;
    }

    /// Reserves the memory for saved blocks, so that this does not happen in a pause.
    pub fn reserve(&self) {
        let mut state = self.lock();
        if state.room.is_empty() {
            state.room = vec![1; self.most * PAGE];
        }
    }

    /// Puts `blocks` of the drive in `file`, which has `bytes` bytes, under copy-before-write, with
    /// their content at this instant. The device must be paused, with no request in progress.
    ///
    /// # Errors
    ///
    /// Other blocks are under copy-before-write already, or the drive is [released](Self::let_go).
    pub fn keep(
        self: &Arc<Self>,
        file: Arc<File>,
        bytes: u64,
        blocks: FrameSet,
    ) -> Result<Keeping, KeepError> {
        self.reserve();
        let mut state = self.lock();
        if state.let_go {
            return Err(KeepError::LetGo);
        }
        if state.kept.is_some() {
            return Err(KeepError::Taken);
        }
        let over = blocks.is_empty();
        let (cursor, taken, reading, aside, waits, failed) = Default::default();
        let free = (0..self.most).collect();
        state.kept = Some(Kept {
            file,
            bytes,
            blocks,
            cursor,
            taken,
            reading,
            aside,
            free,
            waits,
            failed,
            over,
        });
        self.keeps.store(!over, Ordering::Release);
        Ok(Keeping { keeper: self.clone() })
    }
}

/// Blocks under copy-before-write until they are copied or this is dropped.
#[derive(Debug)]
pub struct Keeping {
    keeper: Arc<Keeper>,
}

impl Keeping {
    /// Copies as many blocks as `contents` has room for, replaces `runs` with their runs, and ends
    /// copy-before-write for them. Returns their number; 0 if none is left.
    ///
    /// # Errors
    ///
    /// After an error, no block is under copy-before-write any more, and what was copied before is
    /// of no use.
    pub fn next(
        &mut self,
        runs: &mut Vec<FrameRun>,
        contents: &mut [u8],
    ) -> Result<u64, KeepError> {
        runs.clear();
        let mut state = self.keeper.lock();
        let State { kept: Some(kept), room, .. } = &mut *state else {
            return Err(KeepError::Gone);
        };
        if let Some(e) = kept.failed.replace(KeepError::Gone) {
            return Err(e);
        }
        kept.failed = None;
        // Under the same lock as the check whether any are left: a block saved in between would be
        // in no epoch.
        let aside = kept.take_aside(room, runs, contents);
        if aside > 0 {
            self.keeper.news.notify_all();
        }
        let to = &mut contents[aside as usize * PAGE..];
        let chosen = kept.take_pending((to.len() / PAGE) as u64);
        if chosen.is_empty() {
            if aside == 0 {
                kept.over = true;
                self.keeper.keeps.store(false, Ordering::Release);
            }
            return Ok(aside);
        }
        kept.reading.clone_from(&chosen);
        let (file, bytes) = (kept.file.clone(), kept.bytes);
        drop(state);
        // A write to one of these blocks waits; writes to other blocks do not.
        let (mut read, mut filled) = (Ok(()), 0);
        for run in &chosen {
            let end = filled + run.bytes() as usize;
            read = read.and_then(|()| read_blocks(&file, bytes, run.start, &mut to[filled..end]));
            filled = end;
        }
        let mut state = self.keeper.lock();
        let Some(kept) = &mut state.kept else { return Err(KeepError::Gone) };
        kept.reading.clear();
        if let Err(e) = read {
            self.keeper.give_up(kept, KeepError::Unread(e));
        }
        // The write that ended copy-before-write may have happened, here or on another host, during
        // this read.
        if let Some(e) = kept.failed.replace(KeepError::Gone) {
            return Err(e);
        }
        kept.failed = None;
        self.keeper.news.notify_all();
        runs.extend(chosen);
        Ok(aside + (filled / PAGE) as u64)
    }

    /// Like [`next`](Self::next), but copies only saved blocks: a write may wait for their room.
    /// Also returns 0 after an error, which `next` reports.
    pub fn aside(&mut self, runs: &mut Vec<FrameRun>, contents: &mut [u8]) -> u64 {
        runs.clear();
        let mut state = self.keeper.lock();
        let State { kept: Some(kept), room, .. } = &mut *state else { return 0 };
        let aside = kept.take_aside(room, runs, contents);
        if aside > 0 {
            self.keeper.news.notify_all();
        }
        aside
    }

    /// Returns how often and how long the device has waited so far.
    pub fn waits(&self) -> WriteWaits {
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
mod tests;
