//! Write protection in software: a writer asks before it writes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::faults::{Faults, Op};
use crate::error::GuestError;
use crate::write_protect::WriteProtection;

#[derive(Debug, Default)]
struct ProtectionState {
    protected: FrameSet,
    awaited: VecDeque<Gfn>,
    /// How often frames were protected.
    times: u64,
}

/// Protected frames, and waiting writers.
#[derive(Debug, Default)]
pub(super) struct FrameProtectionState {
    state: Mutex<ProtectionState>,
    changed: Condvar,
}

impl FrameProtectionState {
    fn lock(&self) -> MutexGuard<'_, ProtectionState> {
        self.state.lock()
    }

    /// Waits until `gfn` may be written. The protection that counts is the one in effect at the
    /// pause, and no writer is between this call and its write then.
    pub(super) fn wait(&self, gfn: Gfn) {
        let mut state = self.lock();
        while state.protected.contains(gfn) {
            state.awaited.push_back(gfn);
            self.changed.notify_all();
            // If the frame was unprotected and protected again before this thread woke up, it waits
            // and reports again.
            let times = state.times;
            let waits = |s: &mut ProtectionState| s.protected.contains(gfn) && s.times == times;
            self.changed.wait_while(&mut state, waits);
        }
    }

    /// Returns the number of protected frames.
    pub(super) fn frames(&self) -> u64 {
        self.lock().protected.frames()
    }
}

/// The write protection of a guest; unprotects everything on drop.
pub(super) struct SoftwareWriteProtection {
    pub(super) protected: Arc<FrameProtectionState>,
    pub(super) faults: Arc<Faults>,
}

impl WriteProtection for SoftwareWriteProtection {
    fn protect(&self, frames: &[FrameRun]) -> Result<(), GuestError> {
        self.faults.check(Op::Protect, "protecting frames")?;
        let mut state = self.protected.lock();
        state.protected.insert_all(frames);
        state.times += 1;
        self.protected.changed.notify_all();
        Ok(())
    }

    fn unprotect(&self, frames: FrameRun) -> Result<(), GuestError> {
        self.faults.check(Op::Unprotect, "unprotecting frames")?;
        self.protected.lock().protected.remove(frames);
        self.protected.changed.notify_all();
        Ok(())
    }

    fn unprotect_all(&self) {
        self.protected.lock().protected.clear();
        self.protected.changed.notify_all();
    }

    fn awaited(&self, limit: Duration) -> Result<Option<FrameRun>, GuestError> {
        self.faults.check(Op::Awaited, "looking for waiting writers")?;
        let mut state = self.protected.lock();
        let none = |state: &mut ProtectionState| state.awaited.is_empty();
        self.protected.changed.wait_while_for(&mut state, none, limit);
        Ok(state.awaited.pop_front().map(|start| FrameRun { start, count: 1 }))
    }
}

impl Drop for SoftwareWriteProtection {
    fn drop(&mut self) {
        self.unprotect_all();
    }
}
