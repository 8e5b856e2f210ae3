//! The trait that each tracking mode implements.

use std::io;

use driftline_dirty_tracker::Tracker;
use driftline_guest::CollectionReport;

use crate::tracking::TrackingMode;

/// A source's operation failed. No dirty frame is lost: the source still has it, or reports it
/// later.
#[derive(Debug, thiserror::Error)]
#[error("{what} failed: {cause}")]
pub struct SourceError {
    /// Name of the operation, usually of an ioctl.
    pub what: &'static str,
    /// Error of the system.
    #[source]
    pub cause: io::Error,
}

/// A source of dirty frames: finds out which frames a guest wrote.
///
/// One thread owns a source. `start` and `collect` uphold I2 and I3: a frame is reprotected before
/// it reaches `tracker`. Each call costs a few system calls, whose errors it returns.
pub trait DirtySource: Send {
    /// Returns the mode that this source implements. No system call.
    fn mode(&self) -> TrackingMode;

    /// Starts tracking: every write that begins after this call is collected. From here on the
    /// guest pays for the first write to each frame.
    ///
    /// # Errors
    ///
    /// Returns an error if a system call fails.
    fn start(&mut self) -> Result<(), SourceError>;

    /// Stops tracking; the guest runs at full speed again. Writes that were not collected are
    /// discarded.
    ///
    /// # Errors
    ///
    /// Returns an error if a system call fails.
    fn stop(&mut self) -> Result<(), SourceError>;

    /// Inserts every write since the last collection into all trees of `tracker`. If all vCPUs are
    /// paused, the trees are complete afterwards.
    ///
    /// # Errors
    ///
    /// Returns an error if a system call fails. No frame is lost: the next call reports it.
    fn collect(&mut self, tracker: &Tracker) -> Result<CollectionReport, SourceError>;

    /// Returns the number of frames that each vCPU has made dirty so far, see
    /// [`Harvester::dirtied`](driftline_dirty_tracker::ring::Harvester::dirtied). Empty
    /// where the writer of a frame is unknown. No system call.
    fn dirtied(&self) -> &[u64];

    /// Returns the number of entries that the last collection found in each vCPU's ring, see
    /// [`Harvester::harvested`](driftline_dirty_tracker::ring::Harvester::harvested). Empty
    /// where there are no rings. No system call.
    fn harvested(&self) -> &[u64];
}
