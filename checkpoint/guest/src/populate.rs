//! The first contents of untouched memory. Cheaper than a write, because the kernel does not clear
//! a page that is overwritten at once.

use driftline_dirty_tracker::FrameRun;

use crate::error::GuestError;

/// Puts contents into untouched memory. While this exists, nothing else may touch that memory; an
/// access waits until it is dropped.
pub trait Fill: Send + Sync {
    /// Puts `contents`, whole frames, into `run`. Several threads may call this at once, each with
    /// its own frames.
    fn fill(&self, run: FrameRun, contents: &[u8]) -> Result<(), GuestError>;

    /// Returns the bytes of memory that this host can still provide, including its page cache.
    fn available(&self) -> u64;
}
