//! Blocks of a drive that keep their content while the guest writes on, until somebody has copied
//! them.
//!
//! ```text
//! the guest stands   Keeper::keep: what changed is kept
//! the device         before_write: what a kept block holds is set aside first; where there is no room for that, the write waits
//! the copier         Keeping::next: what was set aside first, then the others in order; each is let go of
//! ```
//!
//! While nothing is kept a write costs one look at a flag. Nobody waits for ever: the copier's end
//! lets go of everything, and a write that has waited for two seconds, or the last of those that
//! have for ten in all, does so itself, as does one that waits for room when the guest is to stand;
//! one that waits for a block that is being read just then has that moment. The copier learns of
//! it, and its epoch fails. What is kept costs 16 bytes a run of blocks, and 40 or so a block that
//! was set aside.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE};

use crate::blocks::read_blocks;

const PAGE: usize = PAGE_SIZE as usize;
/// Blocks that can be set aside at a time: 4 MiB.
pub const SAVED_BLOCKS_MAX: usize = 1024;
/// Limit on the time that a write to memory or a drive may wait for what it overwrites to be
/// copied. Less than a pause waits for vCPUs and devices, which may be among those that wait.
pub const WRITE_WAIT_LIMIT: Duration = Duration::from_secs(2);
/// How long the device may have waited in all while something is kept.
const PATIENCE_IN_ALL: Duration = Duration::from_secs(10);
/// How often who waits looks whether the guest is to stand.
const LOOK: Duration = Duration::from_millis(5);
/// How long a guest that is to stand may wait for blocks that are being read: of at most some
/// dozens, which mostly takes microseconds.
const LAST_READ: Duration = Duration::from_millis(10);

/// Why blocks are not kept any more, or cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeepError {
    /// A write has waited for too long.
    #[error("the guest has waited for too long to write to what is not copied yet")]
    Stalled,
    /// A write waited, and the guest was to stand.
    #[error("the guest was paused while it waited to write to what is not copied yet")]
    Paused,
    /// The guest has let go of the drive: another host may write to it.
    #[error("the guest releases it")]
    LetGo,
    /// They are kept for another.
    #[error("its blocks are kept for another already")]
    Taken,
    /// Nothing is, since an error that was told before.
    #[error("its blocks are not kept any more")]
    Gone,
    /// The drive cannot be read.
    #[error("{0}")]
    Unread(io::Error),
}

/// What the device of a drive and whoever copies it share: see the module's drawing. The device
/// asks before each change of the drive, and is told when that may be made.
pub struct Keeper {
    /// Some blocks are kept. Changes from false to true only while the device stands.
    keeps: AtomicBool,
    /// The guest is to stand: nobody waits.
    hurried: AtomicBool,
    state: Mutex<State>,
    /// Something was let go of.
    news: Condvar,
    /// Blocks that can be set aside.
    most: usize,
    /// [`LAST_READ`].
    last_read: Duration,
}

#[derive(Default)]
struct State {
    kept: Option<Kept>,
    /// The drive is not the guest's: nothing can be kept.
    let_go: bool,
    /// Reserved once, reused.
    room: Vec<u8>,
}

/// Of one instant.
struct Kept {
    file: Arc<File>,
    bytes: u64,
    /// All of them. Those from `cursor` on that were not `taken` are in the file as they were.
    blocks: FrameSet,
    /// Those before it are copied, are being read, or were set aside.
    cursor: u64,
    /// Set aside, from the cursor on.
    taken: BTreeSet<u64>,
    /// What the copier reads just now, without the lock.
    reading: Vec<FrameRun>,
    /// Written to since; where in the room they are.
    aside: BTreeMap<u64, usize>,
    free: Vec<usize>,
    waits: WriteWaits,
    failed: Option<KeepError>,
    /// All are copied, or nothing is kept any more.
    over: bool,
}

impl Kept {
    /// The first block of `run` that is in the file and has to stay there.
    fn pending(&self, run: FrameRun) -> Option<u64> {
        let (start, end) = (run.start.0.max(self.cursor), run.end().0);
        let rest = FrameRun { start: Gfn(start), count: end.saturating_sub(start) };
        let mut blocks = self.blocks.within(rest).flat_map(|run| run.frames());
        blocks.find(|block| !self.taken.contains(&block.0)).map(|block| block.0)
    }

    /// Whether a block of `run` is being read.
    fn is_read(&self, run: FrameRun) -> bool {
        self.reading.iter().any(|read| read.start < run.end() && run.start < read.end())
    }

    /// Copies what was set aside, as much as `contents` has room for, and frees its room. How many
    /// blocks.
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

    /// Moves the cursor over the next blocks, `most` at most, that are in the file.
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

/// How often the device waited for room, and for how long in all.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteWaits {
    /// Waits begun.
    pub times: u64,
    /// Time waited in all.
    pub time: Duration,
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").field("keeps", &self.keeps).finish_non_exhaustive()
    }
}

impl Default for Keeper {
    /// With room for 4 MiB, which is reserved when a first epoch is taken.
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called by the device before it changes `bytes` bytes from `from` on: returns when it
    /// may. WriteWaits for about two seconds at most.
    pub fn before_write(&self, from: u64, bytes: u64) {
        if bytes > 0 && self.keeps.load(Ordering::Acquire) {
            let (start, last) = (Gfn::containing(from), Gfn::containing(from + bytes - 1));
            self.set_aside(FrameRun { start, count: last.0 - start.0 + 1 });
        }
    }

    fn set_aside(&self, run: FrameRun) {
        let (mut state, mut waited, mut rest) = (self.lock(), Duration::ZERO, run);
        // Of which the guest was to stand.
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
                // No block is pending again.
                rest = FrameRun { start: Gfn(block + 1), count: run.end().0 - (block + 1) };
                continue;
            }
            let hurry = self.hurried.load(Ordering::Acquire);
            // No block of the run is read a second time: it ends with that read. Room may not come.
            if hurry && (pending.is_some() || hurried >= self.last_read) {
                return self.give_up(kept, KeepError::Paused);
            }
            if waited >= WRITE_WAIT_LIMIT || kept.waits.time >= PATIENCE_IN_ALL {
                return self.give_up(kept, KeepError::Stalled);
            }
            kept.waits.times += u64::from(waited.is_zero());
            let since = Instant::now();
            let woken = self.news.wait_timeout(state, LOOK.min(WRITE_WAIT_LIMIT - waited));
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
            let more = since.elapsed().max(Duration::from_nanos(1));
            waited += more;
            hurried += if hurry { more } else { Duration::ZERO };
            if let Some(kept) = &mut state.kept {
                kept.waits.time += more;
            }
        }
    }

    /// Lets go of everything, since what is kept cannot be had.
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

    /// The guest is to stand, or is not any more. While it is nobody waits for room: a write that
    /// would have to lets go of what is kept; and for some milliseconds at most for a block that is
    /// being read. To be said before anybody who may wait for a write is told to stand, and, of the
    /// end, before they go on; by one thread.
    pub fn hurry(&self, hurry: bool) {
        self.hurried.store(hurry, Ordering::Release);
        // Without the lock, which may be held while a block is read: who misses this looks soon.
        self.news.notify_all();
    }

    /// How many blocks can be set aside: of so many, whatever is written over, no write waits for
    /// room.
    pub fn room(&self) -> u64 {
        self.most as u64
    }

    /// The guest lets go of the drive: from now on another host may write to it. Nothing of it is
    /// kept, nor read for an epoch, until it is [held](Self::hold) again. To be called before that
    /// other one can have it.
    pub fn let_go(&self) {
        let mut state = self.lock();
        state.let_go = true;
        if let Some(kept) = &mut state.kept {
            self.give_up(kept, KeepError::LetGo);
        }
    }

    /// The drive is the guest's again.
    pub fn hold(&self) {
        self.lock().let_go = false;
    }

    /// Reserves the room for what is set aside, so that this is not done in a pause.
    pub fn reserve(&self) {
        let mut state = self.lock();
        if state.room.is_empty() {
            state.room = vec![1; self.most * PAGE];
        }
    }

    /// Keeps `blocks` of the drive in `file`, of `bytes`, as they are now. The device stands:
    /// nothing that it was asked for is under way. An error is that some are kept already, or that
    /// the drive is [let go of](Self::let_go).
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

/// Blocks that are kept until they are copied, or this is dropped.
#[derive(Debug)]
pub struct Keeping {
    keeper: Arc<Keeper>,
}

impl Keeping {
    /// Copies as many blocks as `contents` has room for, replaces `runs` with which those are, and
    /// lets go of them. How many; 0 if none is left. After an error none is kept, and what was
    /// copied before is of no use.
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
        // Under the one lock with the look whether any are left: or what is set aside in between
        // would be in no epoch.
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
        // Who writes to one of these waits; the others do not meet this.
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
        // Whoever gave up may have written, here or on another host, while this was read.
        if let Some(e) = kept.failed.replace(KeepError::Gone) {
            return Err(e);
        }
        kept.failed = None;
        self.keeper.news.notify_all();
        runs.extend(chosen);
        Ok(aside + (filled / PAGE) as u64)
    }

    /// As [`next`](Self::next), only what was set aside: somebody may wait for its room. 0 also
    /// after an error, of which `next` tells.
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

    /// How the device has waited so far.
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
