//! The protected frames of one epoch, and who waits to write to them.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::FrameRun;
use driftline_guest::{GuestError, Shield};

/// A shield as long as one epoch has it. Once everything is let go of nothing can be protected any
/// more: whoever does it may have been late, and nobody would serve those who wait.
pub(crate) struct OfEpoch<'s> {
    shield: &'s dyn Shield,
    over: Mutex<bool>,
}

impl<'s> OfEpoch<'s> {
    pub(crate) fn new(shield: &'s dyn Shield) -> Self {
        Self { shield, over: Mutex::new(false) }
    }

    pub(crate) fn protect(&self, frames: &[FrameRun]) -> Result<(), GuestError> {
        // Held meanwhile: everything is let go of before, which is noticed, or after.
        let over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        if *over {
            let cause = io::Error::other("the copy thread has ended").into();
            return Err(GuestError::System { what: "protecting frames", cause });
        }
        self.shield.protect(frames)
    }

    pub(crate) fn release(&self, frames: FrameRun) -> Result<(), GuestError> {
        self.shield.release(frames)
    }

    pub(crate) fn awaited(&self, limit: Duration) -> Result<Option<FrameRun>, GuestError> {
        self.shield.awaited(limit)
    }

    fn end(&self) {
        let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        *over = true;
        self.shield.release_all();
    }
}

/// Lets go of everything, for good, when it goes, so that no way out leaves a guest waiting.
pub(crate) struct Released<'s>(pub(crate) &'s OfEpoch<'s>);

impl Drop for Released<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Who waits to write, as far as the saver knows.
#[derive(Default)]
pub(crate) struct Waits {
    /// Somebody waits for them, and that is not looked at yet.
    pub(crate) awaited: Option<FrameRun>,
    /// Since when somebody does.
    pub(crate) since: Option<Instant>,
    pub(crate) times: u64,
    /// Without what is since then.
    before: Duration,
}

impl Waits {
    /// Learns whether somebody waits, if that is not known yet.
    pub(crate) fn look(&mut self, shield: &OfEpoch<'_>, limit: Duration) -> Result<(), GuestError> {
        if self.awaited.is_none()
            && let Some(frames) = shield.awaited(limit)?
        {
            self.awaited = Some(frames);
            self.times += 1;
            self.since = self.since.or(Some(Instant::now()));
        }
        Ok(())
    }

    /// Who was known to wait goes on.
    pub(crate) fn over(&mut self) {
        self.before = self.all();
        (self.awaited, self.since) = (None, None);
    }

    /// For how long somebody has waited.
    pub(crate) fn all(&self) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
