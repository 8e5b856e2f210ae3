//! A vCPU's dirty list: frames between harvest and reprotect, in a preallocated buffer.

/// A dirty frame as KVM names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirtyFrame {
    /// Address space (high 16 bits) and slot (low 16 bits).
    pub slot: u32,
    /// The frame's offset in its slot, in frames.
    pub offset: u64,
}

/// Dirty frames in the order in which they were harvested; never grows past its capacity.
/// Everything on it is O(1).
///
/// ```
/// use driftline_dirty_tracker::{DirtyFrame, DirtyList};
/// let mut list = DirtyList::with_capacity(1);
/// assert!(list.is_empty() && list.push(DirtyFrame { slot: 0, offset: 7 }));
/// assert!(list.is_full() && !list.push(DirtyFrame { slot: 0, offset: 8 }), "refused, not dropped silently");
/// assert_eq!(list.len(), 1);
/// ```
#[derive(Debug)]
pub struct DirtyList {
    frames: Vec<DirtyFrame>,
    capacity: usize,
}

impl DirtyList {
    /// An empty list with room for `capacity` frames, allocated now and never again.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { frames: Vec::with_capacity(capacity), capacity }
    }

    /// Appends `frame`; a full list keeps what it has and answers `false`.
    pub fn push(&mut self, frame: DirtyFrame) -> bool {
        let room = !self.is_full();
        if room {
            self.frames.push(frame);
        }
        room
    }

    /// Whether no further frame fits.
    pub fn is_full(&self) -> bool {
        self.frames.len() >= self.capacity
    }

    /// How many frames it holds.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether it holds none.
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
