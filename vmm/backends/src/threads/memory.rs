//! The workers' view of guest memory: the pages of the working set. Each write marks the dirty
//! trees.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use driftline_dirty_tracker::TrackedBitmap;
use driftline_guest::GuestRam;
use driftline_images::workload::{PAGE_SIZE, PageMemory, WorkingSetPlacement};
use vm_memory::bitmap::{BS, Bitmap};
use vm_memory::{GuestAddress, GuestMemoryBackend, VolatileMemory, VolatileSlice};

use super::error::ThreadMachineError;

/// Working-set pages that are adjacent in guest memory.
struct ContiguousPages<'r> {
    first: u64,
    pages: u64,
    slice: VolatileSlice<'r, BS<'r, TrackedBitmap>>,
}

/// The working set as one worker reads and writes it.
pub(super) struct WorkerMemory<'r> {
    placement: WorkingSetPlacement,
    ranges: Vec<ContiguousPages<'r>>,
}

impl<'r> WorkerMemory<'r> {
    /// Returns the working set that `placement` puts into `ram`.
    pub(super) fn new(
        ram: &'r GuestRam,
        placement: &WorkingSetPlacement,
    ) -> Result<Self, ThreadMachineError> {
        let mut ranges = Vec::new();
        for s in placement.segments() {
            let bytes = usize::try_from(s.pages * PAGE_SIZE)?;
            let slice = ram.get_slice(GuestAddress(s.gfn * PAGE_SIZE), bytes)?;
            ranges.push(ContiguousPages { first: s.first, pages: s.pages, slice });
        }
        Ok(Self { placement: *placement, ranges })
    }

    fn locate(&self, page: u64) -> Option<(&VolatileSlice<'r, BS<'r, TrackedBitmap>>, usize)> {
        let s = self.ranges.iter().find(|s| page.wrapping_sub(s.first) < s.pages)?;
        Some((&s.slice, ((page - s.first) * PAGE_SIZE) as usize))
    }

    fn word(&self, page: u64, word: usize) -> Option<&AtomicU64> {
        let (slice, offset) = self.locate(page)?;
        slice.get_atomic_ref(offset + word * 8).ok()
    }
}

/// Only a damaged state uses pages outside the working set. They read as zeros and ignore writes,
/// so the workload reports errors, as it should.
impl PageMemory for WorkerMemory<'_> {
    fn gfn(&self, page: u64) -> u64 {
        self.placement.gfn(page)
    }

    fn read_u64(&self, page: u64, word: usize) -> u64 {
        self.word(page, word).map_or(0, |w| w.load(Ordering::Relaxed))
    }

    fn write_u64(&mut self, page: u64, word: usize, value: u64) {
        if let Some(w) = self.word(page, word) {
            w.store(value, Ordering::Relaxed);
        }
    }

    fn wrote(&mut self, page: u64) {
        let Some((slice, offset)) = self.locate(page) else { return };
        // Pairs with the SeqCst stores of a drain and of a new subscriber: if the mark finds the
        // bit set, or no subscriber, then the page's content is already visible to them.
        fence(Ordering::SeqCst);
        slice.bitmap().mark_dirty(offset, PAGE_SIZE as usize);
    }

    fn fill(&mut self, page: u64, words: Range<usize>, value: impl Fn(usize) -> u64) {
        if let Some((slice, offset)) = self.locate(page) {
            for word in words {
                if let Ok(w) = slice.get_atomic_ref::<AtomicU64>(offset + word * 8) {
                    w.store(value(word), Ordering::Relaxed);
                }
            }
        }
    }
}
