//! The checksum of a memory layout in every header.

use driftline_dirty_tracker::Layout;

/// Returns a checksum that tells most layouts apart. It is the CRC32C of the slot count, then of
/// the id, base and frame count of each slot, ascending by frame, little-endian. Equal checksums do
/// not prove that two layouts are equal: compare the layouts. Every stored and sent header contains
/// it. O(slots).
///
/// ```
/// use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId};
/// use driftline_format::layout_hash;
/// let slot = |id, base| Slot { id: SlotId(id), base: Gfn(base), frames: 10 };
/// let layout = Layout::new([slot(0, 0), slot(1, 100)])?;
/// assert_eq!(layout_hash(&layout), layout_hash(&Layout::new([slot(1, 100), slot(0, 0)])?));
/// assert_ne!(layout_hash(&layout), layout_hash(&Layout::new([slot(0, 0), slot(1, 101)])?));
/// # Ok::<(), driftline_dirty_tracker::LayoutError>(())
/// ```
pub fn layout_hash(layout: &Layout) -> u32 {
    let slots = layout.slots();
    let mut hash = crc32c::crc32c(&(slots.len() as u64).to_le_bytes());
    for slot in slots {
        hash = crc32c::crc32c_append(hash, &slot.id.0.to_le_bytes());
        hash = crc32c::crc32c_append(hash, &slot.base.0.to_le_bytes());
        hash = crc32c::crc32c_append(hash, &slot.frames.to_le_bytes());
    }
    hash
}
