//! Owns the heap's memory for a hand-over, before the guest stands.
//!
//! The first write to each page of a heap that grows is a fault, of some microseconds on a host
//! that is itself a guest; the state and all that is made of it while a guest stands come to a
//! dozen pages. An allocator keeps what it was given back last.

use std::hint::black_box;

/// Of a guest with few vCPUs; below what allocators return to the system at once.
const BYTES: usize = 96 << 10;
const PAGE: usize = 4096;

/// Has the heap grow now, if it has to. Costs some ten microseconds then, and hardly any if it need
/// not.
pub(crate) fn grow() {
    let mut memory = Vec::<u8>::with_capacity(BYTES);
    for page in memory.spare_capacity_mut().chunks_mut(PAGE) {
        if let Some(byte) = page.first_mut() {
            byte.write(0);
        }
        black_box(&page);
    }
    black_box(&memory);
}
