//! One vCPU's dirty ring: the memory that it shares with the kernel, as a slice of atomics.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_dirty_tracker::ring::RingEntry;
use kvm_bindings::KVM_DIRTY_LOG_PAGE_OFFSET;
use kvm_ioctls::VcpuFd;

use super::mapping::Mapping;
use super::vm::KvmVm;

/// Mapping of one vCPU's dirty ring.
#[derive(Debug)]
pub struct RingMap {
    map: Mapping,
    count: usize,
}

impl RingMap {
    /// Maps the ring of a vCPU of `vm`, which was given rings of `count` entries.
    pub fn new(vm: Arc<KvmVm>, vcpu: &VcpuFd, count: u32) -> io::Result<Self> {
        let count = count as usize;
        let bytes = count * size_of::<RingEntry>();
        let offset = u64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * PAGE_SIZE;
        Ok(Self { map: Mapping::new(vm, vcpu, bytes, offset)?, count })
    }

    /// Reads an entry of each page, so that the first harvests take no page faults. A guest that is
    /// never tracked does without these mappings; the kernel has the ring's memory in any case.
    pub fn populate(&self) {
        let entries_a_page = PAGE_SIZE as usize / size_of::<RingEntry>();
        for entry in self.entries().iter().step_by(entries_a_page) {
            std::hint::black_box(entry.flags.load(Ordering::Relaxed));
        }
    }

    /// Returns all entries of the ring.
    pub fn entries(&self) -> &[RingEntry] {
        let first = self.map.start().cast::<RingEntry>();
        // SAFETY: the mapping is page-aligned, holds `count` entries of 16 bytes for which all bits
        // are valid, and lives as long as self. The kernel may write to the entries meanwhile, but
        // they are atomics.
        unsafe { std::slice::from_raw_parts(first.as_ptr(), self.count) }
    }
}
