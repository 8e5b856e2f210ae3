//! An adapter from vm-memory's `Bitmap` to a [`Tracker`]: writes by the VMM mark the same trees as
//! writes by vCPUs.

use std::sync::Arc;

use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};

use crate::{FrameRun, Gfn, PAGE_SHIFT, Tracker};

/// The dirty bitmap of one guest memory region. Byte offsets in the region become frames of a
/// [`Tracker`].
///
/// `mark_dirty` marks every subscriber's tree. A write outside the layout (in a region that is
/// larger than its slot) is a bug in the VMM. It marks all memory, so that nothing is lost. The
/// first such write is logged, and
/// [`TrackerStats::marks_outside`](crate::TrackerStats::marks_outside) counts all of them. Cloning
/// and slicing cost a reference count. Marking costs what [`Tracker::mark`] costs: one load while
/// there is no subscriber.
///
/// ```
/// # use std::sync::Arc;
/// # use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId, TrackedBitmap, Tracker};
/// use vm_memory::bitmap::Bitmap;
///
/// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0x100), frames: 1024 }])?;
/// # let tracker = Arc::new(Tracker::new(layout));
/// let devices = tracker.subscribe("devices")?;
/// // `GuestRegionMmap<TrackedBitmap>` does this when a device writes 8 bytes at offset 0x1ffc.
/// let bitmap = TrackedBitmap::new(tracker.clone(), Gfn(0x100));
/// bitmap.mark_dirty(0x1ffc, 8);
/// assert!(devices.is_marked(Gfn(0x101)) && devices.is_marked(Gfn(0x102)), "it spans two frames");
/// assert!(bitmap.slice_at(0x2000).dirty_at(0) && !bitmap.dirty_at(0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct TrackedBitmap {
    tracker: Arc<Tracker>,
    /// Guest physical address of offset 0.
    gpa: u64,
}

impl TrackedBitmap {
    /// Creates the bitmap of the region whose first frame is `base`; byte offset 0 lies in that
    /// frame.
    pub fn new(tracker: Arc<Tracker>, base: Gfn) -> Self {
        Self { tracker, gpa: base.gpa() }
    }
}

impl<'a> WithBitmapSlice<'a> for TrackedBitmap {
    type S = Self;
}

impl BitmapSlice for TrackedBitmap {}

impl Bitmap for TrackedBitmap {
    fn mark_dirty(&self, offset: usize, len: usize) {
        if len == 0 {
            return;
        }
        let first = self.gpa.saturating_add(offset as u64);
        let last = first.saturating_add(len as u64 - 1);
        let start = Gfn::containing(first);
        let count = (last >> PAGE_SHIFT) - start.0 + 1;
        if let Err(e) = self.tracker.mark(FrameRun { start, count })
            && self.tracker.mark_outside() == 0
        {
            tracing::error!(
                "the VMM wrote outside guest memory: {e}; all guest pages count as dirty, now and \
                 at every later write of this kind; please report this as a bug"
            );
        }
    }

    /// Returns whether the frame is in any subscriber's tree.
    fn dirty_at(&self, offset: usize) -> bool {
        self.tracker.is_marked(Gfn::containing(self.gpa.saturating_add(offset as u64)))
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { tracker: self.tracker.clone(), gpa: self.gpa.saturating_add(offset as u64) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, Slot, SlotId};

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
}
