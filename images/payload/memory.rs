//! Access to the working set: plain loads and stores at virtual addresses that equal the physical
//! ones.

use core::arch::asm;

use crate::pvh::BootSetup;
use crate::workload::{PAGE_SIZE, PageMemory, PayloadRing, STAMP_WORD, WorkingSetPlacement};

/// The working set in guest RAM.
pub struct WorkingSet {
    placement: Option<WorkingSetPlacement>,
    /// Frame of the first segment, which has most pages.
    first_gfn: u64,
    first_pages: u64,
    prefetch: bool,
}

impl WorkingSet {
    /// Creates the working set as placed at boot.
    pub fn new(setup: &BootSetup) -> Self {
        let first = setup.placement.as_ref().and_then(|placement| placement.segments().first());
        WorkingSet {
            placement: setup.placement,
            first_gfn: first.map_or(0, |segment| segment.gfn),
            first_pages: first.map_or(0, |segment| segment.pages),
            // Where ring 0 is emulated, a prefetch only costs time.
            prefetch: setup.spec.ring == PayloadRing::Three,
        }
    }

    #[inline(always)]
    fn at(&self, page: u64, word: usize) -> *mut u64 {
        (self.gfn(page) * PAGE_SIZE + 8 * word as u64) as *mut u64
    }
}

impl PageMemory for WorkingSet {
    #[inline(always)]
    fn gfn(&self, page: u64) -> u64 {
        if page < self.first_pages {
            return self.first_gfn + page;
        }
        self.placement.as_ref().map_or(0, |placement| placement.gfn(page))
    }

    #[inline(always)]
    fn read_u64(&self, page: u64, word: usize) -> u64 {
        // SAFETY: the page is RAM, mapped, and written by this vCPU alone.
        unsafe { self.at(page, word).read_volatile() }
    }

    #[inline(always)]
    fn write_u64(&mut self, page: u64, word: usize, value: u64) {
        // SAFETY: as for reads; no other data of the program lies there.
        unsafe { self.at(page, word).write_volatile(value) }
    }

    #[inline(always)]
    fn prefetch(&self, page: u64) {
        if self.prefetch {
            let head = self.at(page, 0);
            let stamp = self.at(page, STAMP_WORD);
            // SAFETY: a prefetch cannot fault.
            unsafe {
                asm!("prefetchw [{}]", "prefetchw [{}]", in(reg) head, in(reg) stamp,
                    options(nostack, preserves_flags, readonly))
            };
        }
    }
}
