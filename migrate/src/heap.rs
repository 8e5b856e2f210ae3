//! Populates heap memory before the guest is paused.
//!
//! The first write to each page of a growing heap is a page fault, which takes some microseconds on
//! a host that is itself a guest. The guest's state and its encoded forms take about a dozen pages.
//! The allocator reuses memory that was freed last, so a block that is written and freed before the
//! pause saves these faults during it.

use std::hint::black_box;

use driftline_guest::PAGE_BYTES;

/// Bytes to populate: twice the dozen pages of a guest with few vCPUs, and less than the 128 KiB
/// from which on the allocators of glibc and musl return a freed block to the system.
const BYTES: usize = 96 << 10;

/// Grows the heap if it has less free memory than [`BYTES`]. If it has to grow, that takes about
/// ten microseconds, or a hundred on a host that is itself a guest.
pub(crate) fn grow() {
    let mut memory = Vec::<u8>::with_capacity(BYTES);
    for page in memory.spare_capacity_mut().chunks_mut(PAGE_BYTES) {
        if let Some(byte) = page.first_mut() {
            byte.write(0);
        }
        black_box(&page);
    }
    black_box(&memory);
}
