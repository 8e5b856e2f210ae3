//! The memory map, and the layout of the first MiB.
//!
//! ```text
//! 0 .. 0x9fc00           RAM; boot information from 0x6000 on, where the kernel leaves room
//! 0x9fc00 .. 0xa0000     reserved: MP table
//! 0xa0000 .. 0xe0000     reserved: where PCs have video memory and ROMs
//! 0xe0000 .. 0xff000     reserved: ACPI tables, RSDP first
//! 0xff000 .. 1 MiB       reserved: generation ID
//! 1 MiB .. 3 GiB         RAM, as far as it goes; the RAM disk at its end
//! 0xfec00000 .. 4 GiB    reserved: IOAPIC, local APICs, KVM's own pages
//! 4 GiB ..               RAM, the rest
//! ```

use driftline_dirty_tracker::PAGE_SIZE;

use super::platform::GuestRange;
use crate::memory::{HOLE_END, Memory};

/// First address of low memory that boot information may use: real-mode tables lie below.
const LOW_FLOOR: u64 = 0x6000;
pub(super) const ONE_MIB: u64 = 1 << 20;
const CHIPSET_START: u64 = 0xfec0_0000;

/// Range of the MP table: the last KiB of base memory, one of the three places that guests search.
pub(super) const MP_TABLE: GuestRange = (0x9_fc00, 0xa_0000);
/// Range of the ACPI tables. The RSDP comes first: guests without its address search here.
pub(super) const ACPI_TABLES: GuestRange = (0xe_0000, 0xf_f000);
/// The page of the generation ID, which contains nothing else.
pub(super) const GENERATION_ID: GuestRange = (0xf_f000, ONE_MIB);

/// The kind of a range in the memory map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RangeKind {
    Ram,
    Reserved,
}

/// One range of the memory map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MapRange {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) kind: RangeKind,
}

impl MapRange {
    pub(super) fn bytes(&self) -> u64 {
        self.end - self.start
    }
}

/// Returns the map that every boot protocol passes on: ascending, without overlaps.
pub(super) fn memory_map(memory: &Memory) -> Vec<MapRange> {
    let range = |start, end, kind| MapRange { start, end, kind };
    let mut map =
        vec![range(0, MP_TABLE.0, RangeKind::Ram), range(MP_TABLE.0, ONE_MIB, RangeKind::Reserved)];
    for slot in memory.layout().slots() {
        let (start, end) = (slot.base.gpa(), slot.run().end().gpa());
        if start == 0 {
            map.push(range(ONE_MIB, end, RangeKind::Ram));
            map.push(range(CHIPSET_START, HOLE_END, RangeKind::Reserved));
        } else {
            map.push(range(start, end, RangeKind::Ram));
        }
    }
    map
}

/// Returns the end of the memory that lies below 4 GiB.
pub(super) fn low_end(memory: &Memory) -> u64 {
    memory.layout().slots().next().map_or(0, |s| s.run().end().gpa())
}

pub(super) fn overlap(a: GuestRange, b: GuestRange) -> bool {
    a.0 < b.1 && b.0 < a.1
}

/// Returns the start of the lowest page-aligned range of `bytes` bytes in low memory that no
/// segment touches.
pub(super) fn low_gap(bytes: u64, segments: &[GuestRange]) -> Option<u64> {
    let mut start = LOW_FLOOR;
    loop {
        let end = start.checked_add(bytes)?;
        if end > MP_TABLE.0 {
            return None;
        }
        match segments.iter().find(|s| overlap(**s, (start, end))) {
            Some(s) => start = s.1.checked_next_multiple_of(PAGE_SIZE)?,
            None => return Some(start),
        }
    }
}

/// The range that [`low_gap`] searches, for messages.
pub(super) const LOW: GuestRange = (LOW_FLOOR, MP_TABLE.0);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryOptions;

    #[test]
    fn boot_information_avoids_kernel_segments() {
        assert_eq!(low_gap(600, &[]), Some(0x6000));
        assert_eq!(low_gap(600, &[(0x6100, 0x7001), (0x1000, 0x6001)]), Some(0x8000));
        assert_eq!(low_gap(600, &[(0x5000, 0xa0000)]), None);
        assert_eq!(low_gap(0x99c00, &[]), Some(0x6000), "exactly up to the MP table");
        assert_eq!(low_gap(0x99c01, &[]), None);
    }

    #[test]
    fn the_memory_map_is_the_layout() {
        let memory = Memory::new(5 << 30, &MemoryOptions::default()).unwrap();
        let map = memory_map(&memory);
        let ram: u64 = map.iter().filter(|r| r.kind == RangeKind::Ram).map(MapRange::bytes).sum();
        assert_eq!(ram, (5 << 30) - (ONE_MIB - MP_TABLE.0));
        assert!(map.windows(2).all(|w| w[0].end <= w[1].start), "ascending");
        assert_eq!(low_end(&memory), 3 << 30);
    }
}
