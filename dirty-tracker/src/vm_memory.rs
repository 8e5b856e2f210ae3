//! An adapter from vm-memory's `Bitmap` to a [`Tracker`]: writes by the VMM mark the same trees as
//! writes by vCPUs.

use std::sync::Arc;

use vm_memory::bitmap::{Bitmap, RefSlice, WithBitmapSlice};

use crate::{Gfn, PageSize, Tracker};

/// The dirty bitmap of one guest memory region. Byte offsets in the region become frames of a
/// [`Tracker`].
///
/// `mark_dirty` marks every subscriber's tree. A write outside the layout (in a region that is
/// larger than its slot) is a bug in the VMM. It marks all memory, so that nothing is lost. The
/// first such write is logged, and
/// [`TrackerStats::marks_outside`](crate::TrackerStats::marks_outside) counts all of them. Slicing
/// costs nothing: a slice borrows the bitmap. Marking costs what [`Tracker::mark`] costs.
///
/// It has no length of its own, so `GuestMemoryMmap::from_ranges` cannot make it. Regions are built
/// with `MmapRegionBuilder::new_with_bitmap`.
///
/// ```
/// # use std::sync::Arc;
/// # use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId, TrackedBitmap, Tracker};
/// use vm_memory::bitmap::Bitmap;
/// use vm_memory::mmap::MmapRegionBuilder;
/// use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};
///
/// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0x100), frames: 1024 }])?;
/// # let tracker = Arc::new(Tracker::new(layout));
/// let devices = tracker.subscribe("devices")?;
/// let bitmap = TrackedBitmap::new(tracker.clone(), Gfn(0x100));
/// let region = MmapRegionBuilder::new_with_bitmap(1024 << 12, bitmap)
///     .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
///     .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
///     .build()?;
/// let region = GuestRegionMmap::new(region, GuestAddress(0x10_0000)).ok_or("too high")?;
/// let memory = GuestMemoryMmap::from_regions(vec![region])?;
/// memory.write_obj(1u64, GuestAddress(0x10_1ffc))?; // by a device
/// assert!(devices.contains(Gfn(0x101)) && devices.contains(Gfn(0x102)), "it spans two frames");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct TrackedBitmap {
    tracker: Arc<Tracker>,
    /// Guest physical address of offset 0.
    gpa: u64,
    page: PageSize,
}

impl TrackedBitmap {
    /// Creates the bitmap of the region whose first frame is `base`; byte offset 0 lies in that
    /// frame.
    pub fn new(tracker: Arc<Tracker>, base: Gfn) -> Self {
        let page = tracker.layout().page_size();
        Self { tracker, gpa: page.gpa(base), page }
    }

    #[cold]
    fn mark_outside(&self, offset: usize, len: usize) {
        if self.tracker.mark_outside() == 0 {
            tracing::error!(
                "the VMM wrote {len} bytes at offset {offset:#x} of the region at address {:#x}, \
                 which is outside guest memory; all guest pages count as dirty, now and at every \
                 later write of this kind; please report this as a bug",
                self.gpa
            );
        }
    }
}

impl<'a> WithBitmapSlice<'a> for TrackedBitmap {
    type S = RefSlice<'a, Self>;
}

impl Bitmap for TrackedBitmap {
    #[inline]
    fn mark_dirty(&self, offset: usize, len: usize) {
        let run = self.page.run(self.gpa.saturating_add(offset as u64), len as u64);
        if self.tracker.mark(run).is_err() {
            self.mark_outside(offset, len);
        }
    }

    /// Returns whether the frame is in any subscriber's tree.
    fn dirty_at(&self, offset: usize) -> bool {
        self.tracker.contains(self.page.gfn(self.gpa.saturating_add(offset as u64)))
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FrameRun;
    use crate::{Layout, PAGE_SHIFT, Slot, SlotId};

    #[test]
    fn mark_outside_the_layout_counts_and_marks_all() {
        let slot = Slot { id: SlotId(0), base: Gfn(0x100), frames: 1024 };
        let tracker = Arc::new(Tracker::new(Layout::new([slot]).unwrap()));
        let mut subscription = tracker.subscribe("test").unwrap();
        let bitmap = TrackedBitmap::new(tracker.clone(), Gfn(0x100));
        bitmap.mark_dirty(1023 << PAGE_SHIFT, 4096);
        assert_eq!((subscription.drain().frames(), tracker.stats().marks_outside), (1, 0));
        for offset in [1024 << PAGE_SHIFT, usize::MAX] {
            bitmap.mark_dirty(offset, 8);
            assert_eq!(subscription.drain().frames(), 1024);
        }
        let stats = tracker.stats();
        assert_eq!((stats.marks_outside, stats.marked_all), (2, 2));
    }

    #[test]
    fn offsets_are_divided_by_the_page_size() {
        for page in [PageSize::Kib4, PageSize::Kib16, PageSize::Kib64] {
            let slot = Slot { id: SlotId(0), base: Gfn(0x10), frames: 100 };
            let layout = Layout::with_page_size(page, [slot]).unwrap();
            let tracker = Arc::new(Tracker::new(layout));
            let mut subscription = tracker.subscribe("test").unwrap();
            let bitmap = TrackedBitmap::new(tracker, Gfn(0x10));
            bitmap.slice_at(page.bytes() as usize).mark_dirty(page.bytes() as usize - 1, 2);
            let run = FrameRun { start: Gfn(0x11), count: 2 };
            assert_eq!(subscription.drain().runs().collect::<Vec<_>>(), [run], "{page:?}");
            assert!(bitmap.dirty_at(2 * page.bytes() as usize) && !bitmap.dirty_at(0));
        }
    }
}
