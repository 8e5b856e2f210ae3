//! Owns the guest's memory: mapped without reserving any, in the same slots as the KVM machine's.

use std::sync::Arc;

use checkpoint::{GuestError, GuestRam};
use dirty_tracker::{Gfn, Layout, Slot, SlotId, TrackedBitmap, Tracker};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestRegionMmap};

/// Memory stops here and goes on at 4 GiB: the gap is for devices.
const HOLE_START: u64 = 3 << 30;
const HOLE_END: u64 = 4 << 30;

/// Zeroed memory of `bytes`, and the tracker over its slots.
pub(super) fn build(bytes: u64) -> Result<(Arc<Tracker>, GuestRam), GuestError> {
    let failed = |cause| GuestError::System { what: "mapping guest memory", cause };
    let layout = Layout::new(slots(bytes)).map_err(|e| failed(e.into()))?;
    let tracker = Arc::new(Tracker::new(layout));
    let mut regions = Vec::new();
    for slot in tracker.layout().slots() {
        let bitmap = TrackedBitmap::new(tracker.clone(), slot.base);
        let len = usize::try_from(slot.run().bytes()).map_err(|e| failed(e.into()))?;
        let region = MmapRegionBuilder::new_with_bitmap(len, bitmap)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | libc::MAP_NORESERVE)
            .build()
            .map_err(|e| failed(e.into()))?;
        let at = GuestAddress(slot.base.gpa());
        regions.extend(GuestRegionMmap::new(region, at));
    }
    let ram = GuestRam::from_regions(regions).map_err(|e| failed(e.into()))?;
    Ok((tracker, ram))
}

fn slots(bytes: u64) -> Vec<Slot> {
    let slot = |id, base: u64, bytes: u64| Slot {
        id: SlotId(id),
        base: Gfn::containing(base),
        frames: bytes / dirty_tracker::PAGE_SIZE,
    };
    let low = slot(0, 0, bytes.min(HOLE_START));
    let high = slot(1, HOLE_END, bytes.saturating_sub(HOLE_START));
    if high.frames == 0 { vec![low] } else { vec![low, high] }
}
