//! The shared parts of a ring: its entries, shared with the kernel, and the count of its full
//! exits, shared with its vCPU's thread.

use crate::sync::{Arc, AtomicU32, AtomicU64, Ordering};

/// Flag: the kernel has published this entry.
pub const ENTRY_DIRTY: u32 = 1 << 0;
/// Flag: user space has taken this entry; the kernel may reprotect its frame and reuse the entry.
pub const ENTRY_RESET: u32 = 1 << 1;

/// `struct kvm_dirty_gfn` as shared with the kernel: 16 bytes. A slice of these is the mapping of a
/// vCPU's ring (`KVM_DIRTY_LOG_PAGE_OFFSET` pages into the vCPU's file).
#[repr(C)]
#[derive(Debug, Default)]
pub struct RingEntry {
    /// 0, [`ENTRY_DIRTY`] or [`ENTRY_RESET`].
    pub flags: AtomicU32,
    /// Address space (high 16 bits) and slot (low 16 bits).
    pub slot: AtomicU32,
    /// Offset of the frame in its slot, in frames.
    pub offset: AtomicU64,
}

impl RingEntry {
    // Pairs with the kernel's release store that publishes slot and offset.
    pub(super) fn is_dirty(&self) -> bool {
        self.flags.load(Ordering::Acquire) & ENTRY_DIRTY != 0
    }

    // Pairs with the kernel's acquire load in the walk.
    pub(super) fn mark_reset(&self) {
        self.flags.store(ENTRY_RESET, Ordering::Release);
    }

    /// Turns a clean entry into a RESET one. Fails if the kernel publishes the entry at the same
    /// moment.
    pub(super) fn mark_clean_reset(&self) -> bool {
        let (new, old) = (ENTRY_RESET, 0);
        self.flags.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// Counts how often a vCPU found its ring full. The vCPU thread reports, the consumer reads. A
/// clone is another handle to the same count. Example at
/// [`Harvester::ring_full`](crate::ring::Harvester::ring_full).
#[derive(Debug, Clone, Default)]
pub struct RingFull(Arc<AtomicU32>);

impl RingFull {
    /// Reports that one `KVM_RUN` of this vCPU returned `KVM_EXIT_DIRTY_RING_FULL`. Call it once
    /// for each such exit, before the vCPU's next `KVM_RUN`. The collector may read it at any later
    /// time. Costs one atomic add.
    pub fn report(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    pub(super) fn exits(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}
