//! Frames that keep their content while the guest runs on, until somebody has copied them.

use std::time::Duration;

use driftline_dirty_tracker::FrameRun;

use crate::error::GuestError;

/// Keeps what frames of a guest hold: whoever writes to one that is protected, a vCPU, a device or
/// the host's kernel for either, waits until it is released. Reading goes on.
///
/// Whoever protects frames releases all of them, soon and whatever happens: nobody else does, until
/// this is dropped. And it never writes to guest memory itself meanwhile. All methods may be called
/// by several threads at a time.
pub trait Shield: Send + Sync {
    /// From now on nobody writes to `frames`, ascending and in the guest's memory. Frames that have
    /// never been written are protected as well. Costs a call of the kernel for each run and
    /// something for each frame that has memory, so that runs with small gaps between them are
    /// better made one. After an error some of them are protected.
    fn protect(&self, frames: &[FrameRun]) -> Result<(), GuestError>;

    /// Lets go of `frames`, protected or not, and of who waits to write to them.
    fn release(&self, frames: FrameRun) -> Result<(), GuestError>;

    /// Lets go of everything. Does all that can be done if the system underneath refuses something.
    fn release_all(&self);

    /// Frames that somebody waits for, each time somebody begins to wait; they may have been
    /// released since. Waits for such for up to `limit`. Who waits for more than one frame says so
    /// again when the first is released.
    fn awaited(&self, limit: Duration) -> Result<Option<FrameRun>, GuestError>;
}
