//! Putting contents into the memory of a guest: before its first run, or while it runs already.

use driftline_dirty_tracker::FrameRun;

use crate::delegate::Delegate;
use crate::error::GuestError;
use crate::page_source::{LazyRestoreProgress, PageSource};

/// Takes the memory contents of a guest that is restored or received.
pub trait Populate: Send + Sync {
    /// Populates frames that are about to be written, which is cheaper for many in one call than
    /// for one at a time. Frames that are not reached are populated by the write itself. Contents
    /// are unchanged.
    fn prefault(&self, frames: FrameRun);

    /// Returns a way to put contents into untouched memory of a paused guest that has never run, at
    /// less cost than a write. `None` means unsupported, or that the host's pages make a write
    /// cheaper.
    fn memory_loader(&self) -> Option<Box<dyn MemoryLoader>>;

    /// Begins a lazy restore: a fault fetches its frame from `source`, and the other frames are
    /// fetched in the background, into untouched memory. The guest may run meanwhile. Returns
    /// `source` to the caller if lazy restore is unsupported: the caller then puts all frames into
    /// memory before the guest runs. If a frame cannot be read, the guest ends before it sees other
    /// content in its place.
    ///
    /// # Errors
    ///
    /// The host refuses, although it supports this.
    fn fetch_lazily(
        &self,
        source: Box<dyn PageSource>,
    ) -> Result<Option<Box<dyn PageSource>>, GuestError>;

    /// Returns the progress of a lazy restore; `None` if there was none.
    fn fetching(&self) -> Option<LazyRestoreProgress>;
}

impl<T: Delegate<dyn Populate>> Populate for T {
    fn prefault(&self, frames: FrameRun) {
        self.delegate().prefault(frames);
    }

    fn memory_loader(&self) -> Option<Box<dyn MemoryLoader>> {
        self.delegate().memory_loader()
    }

    fn fetch_lazily(
        &self,
        source: Box<dyn PageSource>,
    ) -> Result<Option<Box<dyn PageSource>>, GuestError> {
        self.delegate().fetch_lazily(source)
    }

    fn fetching(&self) -> Option<LazyRestoreProgress> {
        self.delegate().fetching()
    }
}

/// Puts contents into untouched memory, which is cheaper than a write because the kernel does not
/// clear a page that is overwritten immediately. While this exists, nothing else may touch that
/// memory; an access waits until it is dropped.
pub trait MemoryLoader: Send + Sync {
    /// Puts `contents`, whole frames, into `run`. Several threads may call this at the same time,
    /// each with its own frames.
    ///
    /// # Errors
    ///
    /// The host refuses; some of the frames may have their contents.
    fn fill(&self, run: FrameRun, contents: &[u8]) -> Result<(), GuestError>;

    /// Returns the bytes of memory that this host can still provide, including its page cache.
    fn available(&self) -> u64;
}
