//! One mapping of guest memory.

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE, TrackedBitmap};
use vm_memory::{GuestMemoryRegion, GuestRegionMmap};

pub(super) type Region = GuestRegionMmap<TrackedBitmap>;

/// Returns whether the region consists of huge pages from the pool.
pub(super) fn is_pooled(region: &Region) -> bool {
    region.is_hugetlbfs() == Some(true)
}

/// Returns all frames of a region.
pub(super) fn all(region: &Region) -> FrameRun {
    let start = Gfn::containing(region.start_addr().0);
    FrameRun { start, count: region.len() / PAGE_SIZE }
}
