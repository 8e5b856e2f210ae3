//! Write protection of guest frames: while the guest runs, a protected frame keeps its content
//! until it has been copied.

use std::time::Duration;

use driftline_dirty_tracker::FrameRun;

use crate::error::GuestError;

/// Write-protects frames of a guest. A write to a protected frame, by a vCPU, a device or the
/// host's kernel on behalf of either, waits until the frame is unprotected. Reads continue.
///
/// The caller that protects frames must unprotect all of them soon, also after an error: nothing
/// else unprotects them until this is dropped. The caller must not write to guest memory meanwhile.
/// All methods may be called by several threads at a time.
pub trait WriteProtection: Send + Sync {
    /// Write-protects `frames`, which are ascending and in the guest's memory, including frames
    /// that have never been written. Costs a system call per run and some time per frame that has
    /// memory, so runs with small gaps between them are better merged.
    ///
    /// # Errors
    ///
    /// After an error, some of the frames are protected.
    fn protect(&self, frames: &[FrameRun]) -> Result<(), GuestError>;

    /// Unprotects `frames`, protected or not, and wakes the writers that wait for them.
    ///
    /// # Errors
    ///
    /// The host refuses; some of the frames may still be protected.
    fn unprotect(&self, frames: FrameRun) -> Result<(), GuestError>;

    /// Unprotects everything. If the underlying system refuses something, does what it can.
    fn unprotect_all(&self);

    /// Returns frames that a writer waits for, once for each wait that begins; they may have been
    /// unprotected since. Blocks for up to `limit`. A writer that waits for more than one frame
    /// reports again when the first is unprotected.
    ///
    /// # Errors
    ///
    /// The host does not report waits any more.
    fn awaited(&self, limit: Duration) -> Result<Option<FrameRun>, GuestError>;
}
