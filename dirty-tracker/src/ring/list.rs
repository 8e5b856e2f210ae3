//! A vCPU's dirty list: a preallocated buffer for frames between harvest and reprotect.

use crate::SlotId;

/// A dirty frame in KVM's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DirtyFrame {
    /// Address space (high 16 bits) and slot (low 16 bits).
    pub(super) slot: u32,
    /// Offset of the frame in its slot, in frames.
    pub(super) offset: u64,
}

impl DirtyFrame {
    /// Returns the slot without the address space: all address spaces share the guest's memory.
    pub(super) fn slot_id(self) -> SlotId {
        SlotId(self.slot & 0xffff)
    }
}

/// Dirty frames in the order of their harvest. The list never grows past its capacity. Every
/// operation is O(1).
#[derive(Debug)]
pub(super) struct DirtyList {
    frames: Vec<DirtyFrame>,
    capacity: usize,
}

impl DirtyList {
    /// Creates an empty list with room for `capacity` frames. This is its only allocation.
    pub(super) fn with_capacity(capacity: usize) -> Self {
        Self { frames: Vec::with_capacity(capacity), capacity }
    }

    /// Appends `frame`, for which there must be room.
    pub(super) fn push(&mut self, frame: DirtyFrame) {
        debug_assert!(!self.is_full());
        self.frames.push(frame);
    }

    pub(super) fn is_full(&self) -> bool {
        self.frames.len() >= self.capacity
    }

    pub(super) fn frames(&self) -> &[DirtyFrame] {
        &self.frames
    }

    pub(super) fn clear(&mut self) {
        self.frames.clear();
    }
}
