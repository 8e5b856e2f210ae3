//! One mapping of guest memory.

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE, TrackedBitmap};
use driftline_guest::GuestRam;
use vm_memory::{FileOffset, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

pub(super) type Region = GuestRegionMmap<TrackedBitmap>;

/// Returns whether the region consists of huge pages from the pool.
pub(super) fn is_pooled(region: &Region) -> bool {
    region.is_hugetlbfs() == Some(true)
}

/// Returns the frame of `ram` that is mapped at `address` in this process, if there is one.
pub(super) fn frame_at(ram: &GuestRam, address: u64) -> Option<Gfn> {
    ram.iter().find_map(|region| {
        let offset = address.checked_sub(region.as_ptr() as u64)?;
        (offset < region.len()).then(|| Gfn::containing(region.start_addr().0 + offset))
    })
}

/// Returns all frames of a region.
pub(super) fn all(region: &Region) -> FrameRun {
    let start = Gfn::containing(region.start_addr().0);
    FrameRun { start, count: region.len() / PAGE_SIZE }
}

/// What a region is mapped from.
pub(super) enum RegionSource<'r> {
    /// Nothing: its pages are zeros until they are written.
    Anonymous,
    /// A memory file, which has all writes.
    Shared(&'r FileOffset),
    /// A file that has the first contents, and gets no writes.
    Private(&'r FileOffset),
}

/// Returns what the region is mapped from.
pub(super) fn source(region: &Region) -> RegionSource<'_> {
    match region.file_offset() {
        None => RegionSource::Anonymous,
        Some(file) if region.flags() & libc::MAP_PRIVATE != 0 => RegionSource::Private(file),
        Some(file) => RegionSource::Shared(file),
    }
}
