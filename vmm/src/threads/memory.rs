//! Owns the workers' view of guest memory: the pages of the working set, each write of which marks the trees.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use checkpoint::{GuestError, GuestRam};
use dirty_tracker::TrackedBitmap;
use images::workload::{BATCH, PAGE_SIZE, PageMemory, Placement};
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestAddress, GuestMemoryBackend, VolatileMemory, VolatileSlice};

/// Working-set pages that lie side by side in guest memory.
struct Stretch<'r> {
    first: u64,
    pages: u64,
    slice: VolatileSlice<'r, TrackedBitmap>,
}

/// The working set as one worker reads and writes it.
pub(super) struct WorkingSet<'r> {
    placement: Placement,
    stretches: Vec<Stretch<'r>>,
    /// Pages written since the last [`publish`](Self::publish), in order.
    written: Vec<u64>,
}

impl<'r> WorkingSet<'r> {
    /// The working set that `placement` puts into `ram`.
    pub(super) fn new(ram: &'r GuestRam, placement: &Placement) -> Result<Self, GuestError> {
        let mut stretches = Vec::new();
        for s in placement.segments() {
            let bytes = usize::try_from(s.pages * PAGE_SIZE).map_err(|e| unusable(e.into()))?;
            let slice = ram
                .get_slice(GuestAddress(s.gfn * PAGE_SIZE), bytes)
                .map_err(|e| unusable(e.into()))?;
            stretches.push(Stretch { first: s.first, pages: s.pages, slice });
        }
        let written = Vec::with_capacity(2 * BATCH as usize);
        Ok(Self { placement: *placement, stretches, written })
    }

    /// Marks the pages written since the last call. Nothing of the guest's writes may be read as
    /// complete by someone whose tree did not get the mark, so they come first.
    pub(super) fn publish(&mut self) {
        if self.written.is_empty() {
            return;
        }
        // Pairs with the drain's and the subscriber's SeqCst stores: a mark that finds the bit set, or
        // nobody subscribed, was made after these writes became visible to whoever clears or subscribes.
        fence(Ordering::SeqCst);
        let mut written = std::mem::take(&mut self.written);
        for page in written.drain(..) {
            if let Some((slice, offset)) = self.locate(page) {
                slice.bitmap().mark_dirty(offset, PAGE_SIZE as usize);
            }
        }
        self.written = written;
    }

    fn locate(&self, page: u64) -> Option<(&VolatileSlice<'r, TrackedBitmap>, usize)> {
        let s = self.stretches.iter().find(|s| page.wrapping_sub(s.first) < s.pages)?;
        Some((&s.slice, ((page - s.first) * PAGE_SIZE) as usize))
    }

    fn word(&self, page: u64, word: usize) -> Option<&AtomicU64> {
        let (slice, offset) = self.locate(page)?;
        slice.get_atomic_ref(offset + word * 8).ok()
    }

    fn note(&mut self, page: u64) {
        if self.written.last() != Some(&page) {
            self.written.push(page);
        }
    }
}

/// Pages outside the working set, which only a damaged state asks for, read as zeros and swallow
/// writes: the workload then reports errors, as it should.
impl PageMemory for WorkingSet<'_> {
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
        self.note(page);
    }

    fn fill(&mut self, page: u64, words: Range<usize>, value: impl Fn(usize) -> u64) {
        if let Some((slice, offset)) = self.locate(page) {
            for word in words {
                if let Ok(w) = slice.get_atomic_ref::<AtomicU64>(offset + word * 8) {
                    w.store(value(word), Ordering::Relaxed);
                }
            }
        }
        self.note(page);
    }
}

fn unusable(cause: Box<dyn std::error::Error + Send + Sync>) -> GuestError {
    GuestError::System { what: "mapping the working set", cause }
}
