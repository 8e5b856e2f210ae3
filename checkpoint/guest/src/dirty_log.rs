//! Which frames a guest writes.

use driftline_dirty_tracker::Subscription;

use crate::collection_report::CollectionReport;
use crate::delegate::Delegate;
use crate::error::GuestError;

/// Reports which frames of a guest's memory were written.
pub trait DirtyLog: Send + Sync {
    /// Begins to track writes for one more subscriber. When this returns, every later write will be
    /// in one of its epochs: a copy of memory taken from now on plus the epochs since is complete.
    ///
    /// # Errors
    ///
    /// The guest is not tracked, or the host lacks address space for one more tree.
    fn subscribe(&self, name: &str) -> Result<Subscription, GuestError>;

    /// Brings every subscriber's tree up to date: harvest, reprotect, insert. From a running guest
    /// it takes what has been reported so far; from a paused one, everything.
    ///
    /// # Errors
    ///
    /// The guest is not tracked, has ended, or the host refuses to say what was written.
    fn collect(&self) -> Result<CollectionReport, GuestError>;
}

impl<T: Delegate<dyn DirtyLog>> DirtyLog for T {
    fn subscribe(&self, name: &str) -> Result<Subscription, GuestError> {
        self.delegate().subscribe(name)
    }

    fn collect(&self) -> Result<CollectionReport, GuestError> {
        self.delegate().collect()
    }
}
