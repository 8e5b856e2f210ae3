//! One vCPU's dirty ring: the memory that it shares with the kernel, as a slice of atomics.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use driftline_dirty_tracker::{PAGE_SIZE, RingEntry};
use kvm_bindings::KVM_DIRTY_LOG_PAGE_OFFSET;
use kvm_ioctls::VcpuFd;

/// Mapping of one vCPU's dirty ring.
#[derive(Debug)]
pub struct RingMap {
    entries: NonNull<RingEntry>,
    count: usize,
}

// SAFETY: the mapping belongs to the process, and its entries are atomics.
unsafe impl Send for RingMap {}
// SAFETY: as above.
unsafe impl Sync for RingMap {}

impl RingMap {
    /// Maps the ring of `vcpu`, whose VM was given rings of `count` entries. The mapping keeps the
    /// vCPU alive in the kernel.
    pub fn new(vcpu: &VcpuFd, count: u32) -> io::Result<Self> {
        let count = count as usize;
        let bytes = count * size_of::<RingEntry>();
        let offset = i64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * PAGE_SIZE as i64;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let null = std::ptr::null_mut();
        // Populated, so that the first harvests do not take a page fault for each page.
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing of ours.
        let map = unsafe { libc::mmap(null, bytes, prot, flags, vcpu.as_raw_fd(), offset) };
        match NonNull::new(map.cast()) {
            Some(entries) if map != libc::MAP_FAILED => Ok(Self { entries, count }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns all entries of the ring.
    pub fn entries(&self) -> &[RingEntry] {
        // SAFETY: the mapping is page-aligned, holds `count` entries of 16 bytes for which all bits
        // are valid, and lives as long as self. The kernel may write to the entries meanwhile, but
        // they are atomics.
        unsafe { std::slice::from_raw_parts(self.entries.as_ptr(), self.count) }
    }
}

impl Drop for RingMap {
    fn drop(&mut self) {
        let bytes = self.count * size_of::<RingEntry>();
        // SAFETY: this struct owns the mapping, and no reference into it can exist any more.
        unsafe { libc::munmap(self.entries.as_ptr().cast(), bytes) };
    }
}
