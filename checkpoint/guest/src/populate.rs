//! The first contents of memory that nobody has touched: cheaper than writing to it, since no page
//! is cleared only to be written over.

use driftline_dirty_tracker::FrameRun;

use crate::error::GuestError;

/// Puts contents into memory that nobody has touched. As long as it is there nobody else may touch
/// that memory: who does waits until it is dropped.
pub trait Fill: Send + Sync {
    /// Puts `contents`, whole frames, into `run`. Any thread may, as long as each has frames of its
    /// own.
    fn fill(&self, run: FrameRun, contents: &[u8]) -> Result<(), GuestError>;

    /// Bytes of memory that this host can still give, those of its page cache included.
    fn available(&self) -> u64;
}
