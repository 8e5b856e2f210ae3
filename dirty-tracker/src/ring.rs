//! The consumer side of one KVM dirty ring: entries in order, DIRTY -> RESET, overruns noticed.
//!
//! *Ring*: `size` entries in memory shared with the kernel, `size` a power of two. *Publish*: the
//! kernel writes slot and offset, then DIRTY with a release store. *Harvest*: we read DIRTY with
//! acquire, copy slot and offset, and store RESET with release. *Reset*: the kernel's
//! `KVM_RESET_DIRTY_RINGS` walks RESET entries from its own index, write-protects their frames and
//! makes the entries clean. Both sides go strictly in ring order.
//!
//! Source: `virt/kvm/dirty_ring.c` and Documentation/virt/kvm/api.rst, KVM_CAP_DIRTY_LOG_RING.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::list::{DirtyFrame, DirtyList};

/// The kernel has published this entry.
pub const ENTRY_DIRTY: u32 = 1 << 0;
/// User space has taken this entry; the kernel may reprotect its frame and reuse it.
pub const ENTRY_RESET: u32 = 1 << 1;

/// `struct kvm_dirty_gfn`, as shared with the kernel: 16 bytes.
#[repr(C)]
#[derive(Debug, Default)]
pub struct RingEntry {
    /// 0, [`ENTRY_DIRTY`] or [`ENTRY_RESET`].
    pub flags: AtomicU32,
    /// Address space (high 16 bits) and slot (low 16 bits).
    pub slot: AtomicU32,
    /// The frame's offset in its slot.
    pub offset: AtomicU64,
}

/// What one harvest of one ring took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingHarvest {
    /// Entries now marked RESET: the reprotect must report as many.
    pub entries: u32,
    /// The ring was overrun (I6): entries were overwritten before anyone saw them.
    pub overrun: bool,
}

/// Our place in one ring.
#[derive(Debug, Default)]
pub struct RingConsumer {
    /// Free-running index of the next entry to take.
    next: u32,
    /// After an overrun the kernel's write index may be ahead of `next` with clean entries between.
    suspect: bool,
}

impl RingConsumer {
    /// A consumer of a ring that nobody has harvested yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves published entries from `ring` to `list`, in order, until one is not published or the
    /// list is full. Costs a few loads and one store an entry; allocates nothing.
    ///
    /// `ring` must be the whole ring, and the same one at every call; its length is a power of two.
    pub fn harvest(&mut self, ring: &[RingEntry], list: &mut DirtyList) -> RingHarvest {
        debug_assert!(ring.len().is_power_of_two(), "a dirty ring has a power of two entries");
        if ring.is_empty() {
            return RingHarvest::default();
        }
        let mut out = RingHarvest::default();
        if self.suspect {
            out.entries += self.step_over_hole(ring);
        }
        let mut taken = 0;
        while taken < ring.len() && !list.is_full() {
            let entry = self.entry(ring, 0);
            // Pairs with the kernel's release store that publishes slot and offset.
            if entry.flags.load(Ordering::Acquire) & ENTRY_DIRTY == 0 {
                break;
            }
            list.push(DirtyFrame {
                slot: entry.slot.load(Ordering::Relaxed),
                offset: entry.offset.load(Ordering::Relaxed),
            });
            // Pairs with the kernel's acquire load in the reset walk.
            entry.flags.store(ENTRY_RESET, Ordering::Release);
            self.next = self.next.wrapping_add(1);
            taken += 1;
        }
        out.entries += taken as u32;
        // The kernel stops the vCPU while a reserve is left, so a ring full to the last entry has
        // been written past its end (I6).
        if taken == ring.len() {
            out.overrun = true;
            self.suspect = true;
        }
        out
    }

    /// After an overrun: entries between `next` and the next published one were overwritten and
    /// never published again. Marks them RESET, so that the kernel's reset index passes them too.
    fn step_over_hole(&mut self, ring: &[RingEntry]) -> u32 {
        let hole = (0..ring.len())
            .find(|&i| self.entry(ring, i).flags.load(Ordering::Acquire) & ENTRY_DIRTY != 0);
        let Some(hole) = hole else { return 0 };
        for i in 0..hole {
            self.entry(ring, i).flags.store(ENTRY_RESET, Ordering::Release);
        }
        self.next = self.next.wrapping_add(hole as u32);
        self.suspect = false;
        hole as u32
    }

    fn entry<'r>(&self, ring: &'r [RingEntry], ahead: usize) -> &'r RingEntry {
        &ring[(self.next as usize).wrapping_add(ahead) & (ring.len() - 1)]
    }
}
