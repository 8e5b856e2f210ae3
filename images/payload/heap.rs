//! The low memory beside the payload's image: stacks, page directories, clock pages, the generation
//! table.

use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::workload::{LineBuffer, PayloadSpec, TABLE_BASE, WorkingSetPlacement};

unsafe extern "C" {
    static payload_end: u8;
    static mut page_pdpt: [u64; 512];
}

static NEXT: AtomicU64 = AtomicU64::new(0);
const PAGE: u64 = 4096;
const GIB: u64 = 1 << 30;
/// Bits of a page table entry: present, writable, accessible in ring 3, and a page (bit 7) instead
/// of a table.
const HUGE: u64 = TABLE | 1 << 7;
/// The same for an entry that refers to a table.
const TABLE: u64 = 0x07;

/// Starts the heap above the image. Ends the machine with a message if there is no RAM for it.
pub fn start(mut ram: impl Iterator<Item = (u64, u64)>) {
    let begin = (&raw const payload_end) as u64;
    NEXT.store(begin, Ordering::Relaxed);
    let fits = ram.any(|(start, bytes)| start <= begin && start + bytes >= TABLE_BASE);
    if !fits {
        crate::end_with(
            LineBuffer::new()
                .text("payload fatal: there is no RAM from 1M to 8M for the payload itself"),
        );
    }
}

/// Allocates whole pages. Their content is that of fresh memory: zero unless the machine was
/// restarted.
pub fn take(bytes: u64) -> u64 {
    let at = NEXT.fetch_add(bytes.next_multiple_of(PAGE), Ordering::Relaxed);
    if at + bytes > TABLE_BASE {
        crate::end_with(LineBuffer::new().text("payload fatal: the memory below 8M is used up"));
    }
    at
}

/// Identity-maps memory above 4 GiB, with 1 GiB pages where the CPU has them.
pub fn map_above_4g(end: u64) {
    let huge = crate::cpu::has_1g_pages();
    for index in 4..end.div_ceil(GIB).min(512) {
        let entry = if huge { (index * GIB) | HUGE } else { directory(index * GIB) | TABLE };
        // SAFETY: only the boot processor runs, and no access to this range has happened yet.
        unsafe { (&raw mut page_pdpt[index as usize]).write_volatile(entry) };
    }
}

fn directory(base: u64) -> u64 {
    let at = take(PAGE);
    for index in 0..512 {
        let entry = (base + index * (2 << 20)) | HUGE;
        // SAFETY: the page was just allocated and is mapped.
        unsafe { ptr::write_volatile((at as *mut u64).add(index as usize), entry) };
    }
    at
}

/// Zeroes the generation table, if there is one. The memory of a fresh machine is already zero;
/// that of a restarted machine is not.
pub fn clear_table(spec: &PayloadSpec) {
    if !spec.pattern.needs_table() {
        return;
    }
    debug_assert!(TABLE_BASE + spec.ws_pages() * 4 <= WorkingSetPlacement::base(spec));
    let words = spec.ws_pages().div_ceil(2);
    for word in 0..words {
        let at = (TABLE_BASE as *mut u64).wrapping_add(word as usize);
        // SAFETY: the working set begins above the table, and RAM reaches up to it.
        unsafe {
            if ptr::read_volatile(at) != 0 {
                ptr::write_volatile(at, 0);
            }
        }
    }
}

/// Returns the part of the table that belongs to a share.
pub fn table(first_page: u64, entries: usize) -> &'static mut [u32] {
    let start = (TABLE_BASE as *mut u32).wrapping_add(first_page as usize);
    // SAFETY: shares do not overlap, and each vCPU takes its own once.
    unsafe { core::slice::from_raw_parts_mut(start, entries) }
}
