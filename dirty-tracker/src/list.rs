//! A vCPU's dirty list: a preallocated buffer for frames between harvest and reprotect.

/// A dirty frame in KVM's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirtyFrame {
    /// Address space (high 16 bits) and slot (low 16 bits).
    pub slot: u32,
    /// Offset of the frame in its slot, in frames.
    pub offset: u64,
}

/// Dirty frames in the order of their harvest. The list never grows past its capacity. Every
/// operation is O(1).
///
/// ```
/// use driftline_dirty_tracker::{DirtyFrame, DirtyList};
/// let mut list = DirtyList::with_capacity(1);
/// assert!(list.is_empty() && list.push(DirtyFrame { slot: 0, offset: 7 }));
/// assert!(list.is_full());
/// assert!(!list.push(DirtyFrame { slot: 0, offset: 8 }), "a full list refuses the frame");
/// assert_eq!(list.len(), 1);
/// ```
#[derive(Debug)]
pub struct DirtyList {
    frames: Vec<DirtyFrame>,
    capacity: usize,
}

impl DirtyList {
    /// Creates an empty list with room for `capacity` frames. This is its only allocation.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { frames: Vec::with_capacity(capacity), capacity }
    }

    /// Appends `frame`. A full list stays unchanged, and the result is `false`.
    pub fn push(&mut self, frame: DirtyFrame) -> bool {
        let room = !self.is_full();
        if room {
            self.frames.push(frame);
        }
        room
    }

    /// Returns whether the list is full.
    pub fn is_full(&self) -> bool {
        self.frames.len() >= self.capacity
    }

    /// Returns the number of frames in the list.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Returns whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub(crate) fn frames(&self) -> &[DirtyFrame] {
        &self.frames
    }

    pub(crate) fn clear(&mut self) {
        self.frames.clear();
    }
}
