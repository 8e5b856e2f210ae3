//! Owns the memory map: which guest addresses are memory, as a set of frames with the hole cut out,
//! and the slots that follow from it.
//!
//! ```text
//! slot 0   0 .. 3 GiB            all memory of a guest that has no more than this
//!          3 GiB .. 4 GiB        no memory: devices, interrupt controllers, KVM's own pages
//! slot 1   4 GiB ..              the rest
//! ```

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, Layout, PAGE_SIZE, Slot, SlotId};

use super::error::MemoryError;
use crate::limits::{MAX_MEM_BYTES, MIN_MEM_BYTES};

/// First byte of the hole below 4 GiB.
pub const HOLE_START: u64 = 0xc000_0000;
/// First byte after the hole.
pub const HOLE_END: u64 = 0x1_0000_0000;

/// The hole as frames.
const HOLE: FrameRun =
    FrameRun { start: Gfn(HOLE_START / PAGE_SIZE), count: (HOLE_END - HOLE_START) / PAGE_SIZE };

/// Returns the frames of a guest with `bytes` bytes of memory. Memory that the hole displaces
/// continues after the hole.
fn frames(bytes: u64) -> Result<FrameSet, MemoryError> {
    if !bytes.is_multiple_of(PAGE_SIZE) || !(MIN_MEM_BYTES..=MAX_MEM_BYTES).contains(&bytes) {
        return Err(MemoryError::Size(bytes));
    }
    let mut memory = FrameSet::with_capacity(2);
    memory.insert(FrameRun { start: Gfn(0), count: bytes / PAGE_SIZE });
    let displaced = memory.remove(HOLE);
    // Memory beyond the hole stays where it is; the displaced part is appended after it.
    let end = memory.as_slice().last().map_or(HOLE.end(), |run| run.end().max(HOLE.end()));
    if displaced > 0 {
        memory.insert(FrameRun { start: end, count: displaced });
    }
    Ok(memory)
}

/// Returns the layout of a guest with `bytes` bytes of memory: one slot for each run of its map.
///
/// # Errors
///
/// The size is not a whole number of pages or is outside the supported range.
pub fn layout(bytes: u64) -> Result<Layout, MemoryError> {
    let memory = frames(bytes)?;
    let slots = memory.iter().zip(0..);
    let slots = slots.map(|(run, id)| Slot { id: SlotId(id), base: run.start, frames: run.count });
    Ok(Layout::new(slots)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn memory_past_three_gibibytes_goes_above_the_hole() {
        let slots: Vec<Slot> = layout(5 << 30).unwrap().slots().copied().collect();
        assert_eq!(slots[0], Slot { id: SlotId(0), base: Gfn(0), frames: 0xc0000 });
        assert_eq!(slots[1], Slot { id: SlotId(1), base: Gfn(0x100000), frames: 0x80000 });
        assert_eq!(layout(3 << 30).unwrap().slots().len(), 1);
        assert_eq!(layout((3 << 30) + 4096).unwrap().slots().len(), 2);
        assert!(layout((64 << 20) | 1).is_err());
        assert!(layout(!0xfff).is_err());
    }

    proptest! {
        #[test]
        fn memory_map_skips_the_hole_without_loss(frames_asked in 4096u64..(8 << 18)) {
            let memory = frames(frames_asked * PAGE_SIZE).unwrap();
            prop_assert_eq!(memory.frames(), frames_asked);
            prop_assert!(!memory.intersects(HOLE));
            prop_assert!(memory.len() <= 2);
            prop_assert_eq!(memory.first().map(|r| r.start), Some(Gfn(0)));
        }
    }
}
