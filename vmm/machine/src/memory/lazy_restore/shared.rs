//! What the handle of a lazy restore and its thread share.

use std::sync::atomic::AtomicBool;

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
use driftline_guest::{GuestRam, LazyRestoreProgress};
use parking_lot::{Condvar, Mutex, MutexGuard};
use vm_memory::GuestMemoryBackend;

use crate::histogram::Histogram;
use crate::memory::region::all;
use crate::memory::userfault::Userfault;

#[derive(Debug)]
pub(super) struct LazyRestoreShared {
    pub(super) userfault: Userfault,
    /// Keeps the memory mapped.
    pub(super) ram: GuestRam,
    /// Whether the thread is to end.
    pub(super) over: AtomicBool,
    pub(super) state: Mutex<LazyRestoreState>,
    /// Times from reading a fault to answering it.
    pub(super) faults: Histogram,
    /// Notified when a fetch has ended.
    pub(super) idle: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct LazyRestoreState {
    /// Frames that are not in place yet.
    pub(super) left: FrameSet,
    /// The part of `left` that is being fetched.
    pub(super) under_way: Option<FrameRun>,
    /// The frame that a thread waits for without touching it.
    pub(super) requested: Option<Gfn>,
    /// Whether this process has listed the frames that are left, in order to read them. Faults
    /// after that are not the guest's.
    pub(super) is_read: bool,
    pub(super) fetching: LazyRestoreProgress,
}

impl LazyRestoreShared {
    pub(super) fn lock(&self) -> MutexGuard<'_, LazyRestoreState> {
        self.state.lock()
    }

    /// Returns the address of the first of `frames`, and the part of `frames` that lies in that
    /// mapping.
    pub(super) fn place(&self, frames: FrameRun) -> Option<(u64, FrameRun)> {
        self.ram.iter().find_map(|region| {
            let has = all(region);
            let count = frames.end().min(has.end()).0.checked_sub(frames.start.0)?;
            (frames.start >= has.start && count > 0).then(|| {
                let address = region.as_ptr() as u64 + (frames.start.gpa() - has.start.gpa());
                (address, FrameRun { count, ..frames })
            })
        })
    }
}
