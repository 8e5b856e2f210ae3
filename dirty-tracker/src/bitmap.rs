//! vm-memory's `Bitmap` over a [`Tracker`]: what the VMM itself writes marks the same trees.

use std::sync::Arc;

use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};

use crate::{FrameRun, Gfn, PAGE_SHIFT, Tracker};

/// The dirty bitmap of one guest memory region: byte offsets in it become frames of a [`Tracker`].
///
/// `mark_dirty` marks every subscriber's tree. Bytes outside the layout (a region larger than its
/// slot) are a programming error: refused in debug builds, and in release all memory is marked, so
/// that nothing is ever lost. Cloning and slicing cost a reference count; marking costs as
/// [`Tracker::mark`] does: a load while nobody subscribes.
///
/// ```
/// # use std::sync::Arc;
/// # use dirty_tracker::{Gfn, Layout, Slot, SlotId, TrackedBitmap, Tracker};
/// use vm_memory::bitmap::Bitmap;
///
/// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0x100), frames: 1024 }])?;
/// # let tracker = Arc::new(Tracker::new(layout));
/// let devices = tracker.subscribe("devices");
/// // What `GuestRegionMmap<TrackedBitmap>` calls when a device writes 8 bytes at offset 0x1ffc.
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
    /// For the region whose first frame is `base`: byte offset 0 of the bitmap.
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
        if let Err(e) = self.tracker.mark(FrameRun { start, count }) {
            debug_assert!(false, "a write of the VMM lies outside guest memory: {e}");
            self.tracker.mark_all();
        }
    }

    /// Whether any subscriber's tree has the frame.
    fn dirty_at(&self, offset: usize) -> bool {
        self.tracker.is_marked(Gfn::containing(self.gpa.saturating_add(offset as u64)))
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { tracker: self.tracker.clone(), gpa: self.gpa.saturating_add(offset as u64) }
    }
}
