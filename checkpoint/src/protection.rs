//! The write-protected frames of one epoch, and the writers that wait for them.

use std::time::{Duration, Instant};

use driftline_dirty_tracker::FrameRun;
use driftline_guest::{GuestError, WriteProtection};
use parking_lot::Mutex;

use crate::report::EpochFailure;

/// Name of the copy thread in errors.
pub(crate) const COPY_THREAD: &str = "copy";

/// Write protection for the duration of one epoch. After `end` has unprotected everything, nothing
/// can be protected any more: otherwise a late caller would protect frames, and their writers would
/// wait for ever.
pub(crate) struct EpochProtection<'s> {
    protection: &'s dyn WriteProtection,
    over: Mutex<bool>,
}

impl<'s> EpochProtection<'s> {
    pub(crate) fn new(protection: &'s dyn WriteProtection) -> Self {
        Self { protection, over: Mutex::new(false) }
    }

    pub(crate) fn protect(&self, frames: &[FrameRun]) -> Result<(), EpochFailure> {
        // Held during the call: `end` runs before it, which is noticed, or after it.
        let over = self.over.lock();
        if *over {
            return Err(EpochFailure::ThreadEnded { thread: COPY_THREAD });
        }
        Ok(self.protection.protect(frames)?)
    }

    pub(crate) fn unprotect(&self, frames: FrameRun) -> Result<(), GuestError> {
        self.protection.unprotect(frames)
    }

    pub(crate) fn awaited(&self, limit: Duration) -> Result<Option<FrameRun>, GuestError> {
        self.protection.awaited(limit)
    }

    fn end(&self) {
        let mut over = self.over.lock();
        *over = true;
        self.protection.unprotect_all();
    }
}

/// Ends the write protection of an epoch on drop, so that no return path leaves a guest waiting.
pub(crate) struct UnprotectOnDrop<'s>(pub(crate) &'s EpochProtection<'s>);

impl Drop for UnprotectOnDrop<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Waiting writers, as far as the copy thread knows.
#[derive(Default)]
pub(crate) struct WriterWaits {
    /// Frames that a writer waits for and that have not been handled yet.
    pub(crate) awaited: Option<FrameRun>,
    /// Start of the current wait.
    pub(crate) since: Option<Instant>,
    pub(crate) times: u64,
    /// Time waited before `since`.
    before: Duration,
}

impl WriterWaits {
    /// Asks the host for a waiting writer, if none is known yet.
    pub(crate) fn look(
        &mut self,
        protection: &EpochProtection<'_>,
        limit: Duration,
    ) -> Result<(), GuestError> {
        if self.awaited.is_none()
            && let Some(frames) = protection.awaited(limit)?
        {
            self.awaited = Some(frames);
            self.times += 1;
            self.since = self.since.or(Some(Instant::now()));
        }
        Ok(())
    }

    /// Records that the known writer has resumed.
    pub(crate) fn over(&mut self) {
        self.before = self.all();
        (self.awaited, self.since) = (None, None);
    }

    /// Returns the total time for which writers have waited.
    pub(crate) fn all(&self) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
