//! The result of a collection of dirty frames.

use serde::{Deserialize, Serialize};

/// The result of one collection, with the time of each step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CollectionReport {
    /// Frames that reached the trees; a frame counts as often as it was collected.
    pub frames: u64,
    /// Rings that were overrun since the last collection (I6).
    pub overruns: u64,
    /// Whether all memory was marked because the source could not be trusted.
    pub marked_all: bool,
    /// Time to move ring entries (or bitmap words) to lists, ns.
    pub harvest_ns: u64,
    /// Time to reprotect, ns.
    pub reprotect_ns: u64,
    /// Time to insert into the trees, ns.
    pub insert_ns: u64,
}
