//! Frames that keep their content while the guest runs on, until somebody has copied them.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::FrameRun;

use crate::GuestError;

/// Keeps what frames of a guest hold: whoever writes to one that is protected, a vCPU, a device or the host's kernel for
/// either, waits until it is released. Reading goes on.
///
/// Whoever protects frames releases all of them, soon and whatever happens: nobody else does, until this is dropped.
/// And it never writes to guest memory itself meanwhile. All methods may be called by several threads at a time.
pub trait Shield: Send + Sync {
    /// From now on nobody writes to `frames`, ascending and in the guest's memory. Frames that have never been written
    /// are protected as well. Costs a call of the kernel for each run and something for each frame that has memory, so that
    /// runs with small gaps between them are better made one. After an error some of them are protected.
    fn protect(&self, frames: &[FrameRun]) -> Result<(), GuestError>;

    /// Lets go of `frames`, protected or not, and of who waits to write to them.
    fn release(&self, frames: FrameRun) -> Result<(), GuestError>;

    /// Lets go of everything. Does all that can be done if the system underneath refuses something.
    fn release_all(&self);

    /// Frames that somebody waits for, each time somebody begins to wait; they may have been released since. Waits for
    /// such for up to `limit`. Who waits for more than one frame says so again when the first is released.
    fn awaited(&self, limit: Duration) -> Result<Option<FrameRun>, GuestError>;
}

/// A shield as long as one epoch has it. Once everything is let go of nothing can be protected any more: whoever does it
/// may have been late, and nobody would serve those who wait.
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
