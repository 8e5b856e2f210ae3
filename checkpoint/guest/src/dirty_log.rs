//! Which frames a guest writes.

use driftline_dirty_tracker::Subscription;

use crate::collection_report::CollectionReport;
use crate::delegate::Delegate;
use crate::error::GuestError;

/// Reports which frames of a guest's memory were written.
pub trait DirtyLog: Send + Sync {
    /// Begins to track writes for one more subscriber. After this returns, every later write is in
    /// one of the subscriber's epochs. A copy of memory that is taken after that is complete
    /// together with these epochs.
    ///
    /// # Errors
    ///
    /// The guest is not tracked, or the host lacks address space for one more tree.
    fn subscribe(&self, name: &str) -> Result<Subscription, GuestError>;

    /// Brings every subscriber's tree up to date: harvest, reprotect, insert. From a running guest
    /// this takes the writes that were reported so far; from a paused guest, all writes.
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
