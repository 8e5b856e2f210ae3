//! Copy-before-write for a drive: the old content of a block is saved before the guest overwrites
//! it, until the block has been copied.
//!
//! ```text
//! guest paused   CopyBeforeWrite::freeze: the changed blocks are put under copy-before-write
//! device         before_write: saves the content of such a block first; without room for it, the
//!                write waits
//! copy thread    FrozenBlocks::next: takes saved blocks first, then the others in order
//! ```
//!
//! While no block is under copy-before-write, a write costs one load of a flag. Every wait ends:
//!
//! | event | limit | effect on copy-before-write |
//! |---|---|---|
//! | the copy thread drops its `FrozenBlocks` | immediately | it ends and every write continues |
//! | one write has waited | 2 s | that write ends it |
//! | all writes of one epoch have waited | 10 s in total | the last of them ends it |
//! | the guest is to pause, a write waits for room | immediately | that write ends it |
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

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::blocks::{PAGE_BYTES, read_blocks};

/// Blocks that can be saved at a time: 4 MiB.
pub const SAVED_BLOCKS_MAX: usize = 1024;
/// Limit on the time for which a write to memory or a drive may wait until the old content has been
/// copied. It is shorter than the time that a pause waits for vCPUs and devices, because these may
/// be the ones that wait.
pub const WRITE_WAIT_LIMIT: Duration = Duration::from_secs(2);
/// Limit on the total time that a device waits during one epoch. 10 s, chosen: five waits of the
/// longest kind. A guest whose disk was that slow must not pay more for a checkpoint, which fails.
const TOTAL_WAIT_LIMIT: Duration = Duration::from_secs(10);
/// Interval at which a waiting write checks whether the guest is to pause.
const PAUSE_CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// Limit on the time for which a write waits for blocks that are being read, once the guest is to
/// pause. Reading them, at most some dozens, mostly takes microseconds.
const READ_WAIT_LIMIT: Duration = Duration::from_millis(10);

/// Why blocks are no longer under copy-before-write, or cannot be.
#[derive(Debug, thiserror::Error)]
pub enum CopyBeforeWriteError {
    /// A write has waited for too long.
    #[error("the guest has waited for too long to write to blocks that are not copied yet")]
    Stalled,
    /// A write waited while the guest was to be paused.
    #[error("the guest was paused while it waited to write to blocks that are not copied yet")]
    Paused,
    /// The guest has released the drive: another host may write to it.
    #[error("the guest has released it")]
    Released,
    /// Another epoch has blocks under copy-before-write.
    #[error("another checkpoint is copying it")]
    InUse,
    /// Copy-before-write has ended, after an error that was returned before.
    #[error("its copy has ended")]
    Ended,
    /// The drive cannot be read.
    #[error("{0}")]
    Unreadable(io::Error),
}

/// Copy-before-write state shared by a drive's device and the copy thread: see the module's
/// drawing. The device calls [`before_write`](Self::before_write) before each change of the drive.
pub struct CopyBeforeWrite {
    /// Whether any block is under copy-before-write. Changes from false to true only while the
    /// device is paused.
    is_active: AtomicBool,
    /// Whether the guest is to be paused: then no write waits for room.
    pausing: AtomicBool,
    state: Mutex<FreezeState>,
    /// Signals that room or a block has become free, or that copy-before-write has ended.
    changed: Condvar,
    /// Number of blocks that can be saved at a time.
    capacity: usize,
    /// [`READ_WAIT_LIMIT`].
    read_wait_limit: Duration,
}

#[derive(Default)]
struct FreezeState {
    active: Option<ActiveFreeze>,
    /// The drive is not the guest's: copy-before-write is refused.
    released: bool,
    /// Memory for saved blocks, reserved once and reused.
    buffer: Vec<u8>,
}

/// Blocks of one instant.
struct ActiveFreeze {
    file: Arc<File>,
    bytes: u64,
    /// All of them. Blocks from `cursor` on that are not in `saved_ahead` are unchanged in the
    /// file.
    blocks: FrameSet,
    /// Blocks before the cursor are copied, are being read, or were saved.
    cursor: u64,
    /// Blocks from the cursor on that were saved.
    saved_ahead: BTreeSet<u64>,
    /// Runs that the copy thread is reading at the moment, without the lock.
    reading: Vec<FrameRun>,
    /// Saved blocks, by number, with their position in the buffer.
    saved: BTreeMap<u64, usize>,
    free: Vec<usize>,
    waits: WriteWaits,
    failed: Option<CopyBeforeWriteError>,
    /// Whether all blocks are copied, or copy-before-write has ended.
    over: bool,
}

impl ActiveFreeze {
    /// Returns the first block of `run` that is unchanged in the file and must stay so.
    fn pending(&self, run: FrameRun) -> Option<u64> {
        let (start, end) = (run.start.0.max(self.cursor), run.end().0);
        let rest = FrameRun { start: Gfn(start), count: end.saturating_sub(start) };
        let mut blocks = self.blocks.within(rest).flat_map(|run| run.frames());
        blocks.find(|block| !self.saved_ahead.contains(&block.0)).map(|block| block.0)
    }

    /// Returns whether a block of `run` is being read.
    fn is_read(&self, run: FrameRun) -> bool {
        self.reading.iter().any(|read| read.start < run.end() && run.start < read.end())
    }

    /// Returns the error that ended copy-before-write, and to later calls
    /// [`CopyBeforeWriteError::Ended`].
    fn take_failure(&mut self) -> Result<(), CopyBeforeWriteError> {
        let Some(why) = self.failed.take() else { return Ok(()) };
        self.failed = Some(CopyBeforeWriteError::Ended);
        Err(why)
    }

    /// Copies saved blocks, as many as `contents` has room for, and frees their room. Returns the
    /// number of blocks.
    fn take_saved(&mut self, buffer: &[u8], runs: &mut Vec<FrameRun>, contents: &mut [u8]) -> u64 {
        let before = runs.len();
        for to in contents.chunks_exact_mut(PAGE_BYTES) {
            let Some((block, place)) = self.saved.pop_first() else { break };
            to.copy_from_slice(&buffer[place * PAGE_BYTES..(place + 1) * PAGE_BYTES]);
            self.free.push(place);
            runs.push(FrameRun { start: Gfn(block), count: 1 });
        }
        (runs.len() - before) as u64
    }

    /// Moves the cursor over the next blocks that are unchanged in the file, at most `most`.
    fn take_unsaved(&mut self, most: u64) -> Vec<FrameRun> {
        let (mut runs, mut left): (Vec<FrameRun>, u64) = (Vec::new(), most);
        while left > 0 {
            let rest = FrameRun { start: Gfn(self.cursor), count: u64::MAX };
            let Some(block) = self.blocks.within(rest).next().map(|run| run.start) else { break };
            self.cursor = block.0 + 1;
            if self.saved_ahead.remove(&block.0) {
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

impl fmt::Debug for CopyBeforeWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyBeforeWrite")
            .field("is_active", &self.is_active)
            .finish_non_exhaustive()
    }
}

impl Default for CopyBeforeWrite {
    /// Has room for 4 MiB, which is reserved when the first epoch is taken.
    fn default() -> Self {
        Self::with_capacity(SAVED_BLOCKS_MAX)
    }
}

impl CopyBeforeWrite {
    fn with_capacity(blocks: usize) -> Self {
        let (is_active, pausing, state, changed) = Default::default();
        Self {
            is_active,
            pausing,
            state,
            changed,
            capacity: blocks.max(1),
            read_wait_limit: READ_WAIT_LIMIT,
        }
    }

    fn lock(&self) -> MutexGuard<'_, FreezeState> {
        self.state.lock()
    }

    /// Waits until the device may change `bytes` bytes from `from` on. The device calls this before
    /// the change. Returns after about two seconds at most, if the drive's storage answers: a block
    /// that would be overwritten may be read first.
    pub fn before_write(&self, from: u64, bytes: u64) {
        if bytes > 0 && self.is_active.load(Ordering::Acquire) {
            let (start, last) = (Gfn::containing(from), Gfn::containing(from + bytes - 1));
            self.save_before_write(FrameRun { start, count: last.0 - start.0 + 1 });
        }
    }

    fn save_before_write(&self, run: FrameRun) {
        let (mut state, mut waited, mut rest) = (self.lock(), Duration::ZERO, run);
        // Part of `waited` during which the guest was to be paused.
        let mut pausing_wait = Duration::ZERO;
        loop {
            let FreezeState { active: Some(active), buffer, .. } = &mut *state else { return };
            if active.over {
                return;
            }
            let pending = active.pending(rest);
            if pending.is_none() && !active.is_read(run) {
                return;
            }
            if let Some(block) = pending
                && let Some(place) = active.free.pop()
            {
                let to = &mut buffer[place * PAGE_BYTES..(place + 1) * PAGE_BYTES];
                if let Err(e) = read_blocks(&active.file, active.bytes, Gfn(block), to) {
                    return self.fail(active, CopyBeforeWriteError::Unreadable(e));
                }
                active.saved_ahead.insert(block);
                active.saved.insert(block, place);
                // A block does not become pending again.
                rest = FrameRun { start: Gfn(block + 1), count: run.end().0 - (block + 1) };
                continue;
            }
            let pausing = self.pausing.load(Ordering::Acquire);
            // No block of the run is read a second time, so that wait ends with this read. Room,
            // however, may never come.
            if pausing && (pending.is_some() || pausing_wait >= self.read_wait_limit) {
                return self.fail(active, CopyBeforeWriteError::Paused);
            }
            if waited >= WRITE_WAIT_LIMIT || active.waits.time >= TOTAL_WAIT_LIMIT {
                return self.fail(active, CopyBeforeWriteError::Stalled);
            }
            active.waits.times += u64::from(waited.is_zero());
            let since = Instant::now();
            self.changed.wait_for(&mut state, PAUSE_CHECK_INTERVAL.min(WRITE_WAIT_LIMIT - waited));
            let more = since.elapsed().max(Duration::from_nanos(1));
            waited += more;
            pausing_wait += if pausing { more } else { Duration::ZERO };
            if let Some(active) = &mut state.active {
                active.waits.time += more;
            }
        }
    }

    /// Ends copy-before-write after an error.
    fn fail(&self, active: &mut ActiveFreeze, why: CopyBeforeWriteError) {
        if !active.over {
            active.over = true;
            active.failed = Some(why);
            active.saved.clear();
            active.saved_ahead.clear();
            self.is_active.store(false, Ordering::Release);
            self.changed.notify_all();
        }
    }

    /// Tells waiting writes whether the guest is to be paused. While it is, a write that needs room
    /// ends copy-before-write immediately; a write to a block that is being read waits some
    /// milliseconds at most. Call with `true` before any thread that may wait for a write is told
    /// to pause, and with `false` before those threads resume. Only one thread may call this.
    pub fn set_pausing(&self, pausing: bool) {
        self.pausing.store(pausing, Ordering::Release);
        // Without the lock, which may be held while a block is read: a writer that misses this
        // checks again soon.
        self.changed.notify_all();
    }

    /// Returns how many blocks can be saved. With at most this many blocks, no write waits for
    /// room, whatever the guest overwrites.
    pub fn capacity(&self) -> u64 {
        self.capacity as u64
    }

    /// Records that the guest releases the drive: another host may write to it afterwards.
    /// Copy-before-write ends, and no block is read for an epoch, until [`acquire`](Self::acquire).
    /// Must be called before the other host can get the drive.
    pub fn release(&self) {
        let mut state = self.lock();
        state.released = true;
        if let Some(active) = &mut state.active {
            self.fail(active, CopyBeforeWriteError::Released);
        }
    }

    /// Records that the drive is the guest's again.
    pub fn acquire(&self) {
        self.lock().released = false;
    }

    /// Reserves the memory for saved blocks, so that this does not happen in a pause.
    pub fn reserve(&self) {
        let mut state = self.lock();
        if state.buffer.is_empty() {
            state.buffer = vec![1; self.capacity * PAGE_BYTES];
        }
    }

    /// Puts `blocks` of the drive in `file`, which has `bytes` bytes, under copy-before-write, with
    /// their content at this instant. The device must be paused, with no request in progress.
    ///
    /// # Errors
    ///
    /// Other blocks are under copy-before-write already, or the drive is [released](Self::release).
    pub fn freeze(
        self: &Arc<Self>,
        file: Arc<File>,
        bytes: u64,
        blocks: FrameSet,
    ) -> Result<FrozenBlocks, CopyBeforeWriteError> {
        self.reserve();
        let mut state = self.lock();
        if state.released {
            return Err(CopyBeforeWriteError::Released);
        }
        if state.active.is_some() {
            return Err(CopyBeforeWriteError::InUse);
        }
        let over = blocks.is_empty();
        let (cursor, saved_ahead, reading, saved, waits, failed) = Default::default();
        let free = (0..self.capacity).collect();
        state.active = Some(ActiveFreeze {
            file,
            bytes,
            blocks,
            cursor,
            saved_ahead,
            reading,
            saved,
            free,
            waits,
            failed,
            over,
        });
        self.is_active.store(!over, Ordering::Release);
        Ok(FrozenBlocks { owner: self.clone() })
    }
}

/// Blocks under copy-before-write until they are copied or this is dropped.
#[derive(Debug)]
pub struct FrozenBlocks {
    owner: Arc<CopyBeforeWrite>,
}

impl FrozenBlocks {
    /// Copies as many blocks as `contents` has room for, replaces `runs` with their runs, and ends
    /// copy-before-write for them. `contents` must have room for at least one block. Returns the
    /// number of blocks; 0 if none is left.
    ///
    /// # Errors
    ///
    /// After an error, no block is under copy-before-write, and the caller must discard what was
    /// copied before.
    pub fn next(
        &mut self,
        runs: &mut Vec<FrameRun>,
        contents: &mut [u8],
    ) -> Result<u64, CopyBeforeWriteError> {
        runs.clear();
        let mut state = self.owner.lock();
        let FreezeState { active: Some(active), buffer, .. } = &mut *state else {
            return Err(CopyBeforeWriteError::Ended);
        };
        active.take_failure()?;
        // Under the same lock as the check whether any are left: a block saved in between would be
        // in no epoch.
        let saved = active.take_saved(buffer, runs, contents);
        if saved > 0 {
            self.owner.changed.notify_all();
        }
        let to = &mut contents[saved as usize * PAGE_BYTES..];
        let chosen = active.take_unsaved((to.len() / PAGE_BYTES) as u64);
        if chosen.is_empty() {
            if saved == 0 {
                active.over = true;
                self.owner.is_active.store(false, Ordering::Release);
            }
            return Ok(saved);
        }
        active.reading.clone_from(&chosen);
        let (file, bytes) = (active.file.clone(), active.bytes);
        drop(state);
        // A write to one of these blocks waits; writes to other blocks do not.
        let (mut read, mut filled) = (Ok(()), 0);
        for run in &chosen {
            let end = filled + run.bytes() as usize;
            read = read.and_then(|()| read_blocks(&file, bytes, run.start, &mut to[filled..end]));
            filled = end;
        }
        let mut state = self.owner.lock();
        let Some(active) = &mut state.active else { return Err(CopyBeforeWriteError::Ended) };
        active.reading.clear();
        if let Err(e) = read {
            self.owner.fail(active, CopyBeforeWriteError::Unreadable(e));
        }
        // The write that ended copy-before-write may have happened, here or on another host, during
        // this read.
        active.take_failure()?;
        self.owner.changed.notify_all();
        runs.extend(chosen);
        Ok(saved + (filled / PAGE_BYTES) as u64)
    }

    /// Like [`next`](Self::next), but copies only saved blocks: a write may wait for their room.
    /// Also returns 0 after an error, which `next` reports.
    pub fn next_saved(&mut self, runs: &mut Vec<FrameRun>, contents: &mut [u8]) -> u64 {
        runs.clear();
        let mut state = self.owner.lock();
        let FreezeState { active: Some(active), buffer, .. } = &mut *state else { return 0 };
        let saved = active.take_saved(buffer, runs, contents);
        if saved > 0 {
            self.owner.changed.notify_all();
        }
        saved
    }

    /// Returns how often and how long the device has waited so far.
    pub fn waits(&self) -> WriteWaits {
        self.owner.lock().active.as_ref().map(|active| active.waits).unwrap_or_default()
    }
}

impl Drop for FrozenBlocks {
    fn drop(&mut self) {
        let mut state = self.owner.lock();
        self.owner.is_active.store(false, Ordering::Release);
        state.active = None;
        self.owner.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
