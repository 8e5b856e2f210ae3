//! The position of the working set in guest RAM.

use super::page::PAGE_SIZE;
use super::settings::PayloadSpec;

/// Start of the working set, or higher if the generation table needs the room.
pub const WS_BASE: u64 = 16 << 20;
/// Start of the table of expected generations; the guest's own code and stacks lie below.
pub const TABLE_BASE: u64 = 8 << 20;
const ALIGN: u64 = 2 << 20;
const MAX_SEGMENTS: usize = 8;

/// Pages of the working set that are consecutive in RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Segment {
    /// Number of the first page within the working set.
    pub first: u64,
    /// Number of pages.
    pub pages: u64,
    /// The frame of the first page.
    pub gfn: u64,
}

/// The error that RAM is too small for the working set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementError {
    /// Requested pages.
    pub wanted: u64,
    /// Pages of RAM at or above the base address.
    pub available: u64,
}

/// The position of each page of the working set: from a base address upward, skipping holes in RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct WorkingSetPlacement {
    segments: [Segment; MAX_SEGMENTS],
    count: usize,
}

impl WorkingSetPlacement {
    /// Returns the lowest address of the working set: above the table that the pattern may need.
    pub fn base(spec: &PayloadSpec) -> u64 {
        let table = if spec.pattern.needs_table() { spec.ws_pages() * 4 } else { 0 };
        (TABLE_BASE + table).next_multiple_of(ALIGN).max(WS_BASE)
    }

    /// Places the working set into `ram`, ranges of (address, bytes) in ascending order.
    ///
    /// # Errors
    ///
    /// Returns an error if `ram` does not hold the working set.
    ///
    /// ```
    /// use driftline_images::{PayloadSpec, workload::WorkingSetPlacement};
    /// let spec: PayloadSpec = "payload,ws=64M".parse().unwrap();
    /// let ram = [(0, 640 << 10), (1 << 20, 127 << 20)];
    /// let placement = WorkingSetPlacement::new(&spec, ram).unwrap();
    /// assert_eq!(placement.gfn(0), 0x1000);
    /// ```
    pub fn new(
        spec: &PayloadSpec,
        ram: impl IntoIterator<Item = (u64, u64)>,
    ) -> Result<Self, PlacementError> {
        let (base, wanted) = (WorkingSetPlacement::base(spec), spec.ws_pages());
        let mut placement =
            WorkingSetPlacement { segments: [Segment::default(); MAX_SEGMENTS], count: 0 };
        let mut placed = 0;
        for (start, bytes) in ram {
            let first = start.max(base).div_ceil(PAGE_SIZE);
            let end = start.saturating_add(bytes) / PAGE_SIZE;
            let pages = end.saturating_sub(first).min(wanted - placed);
            if pages == 0 {
                continue;
            }
            let Some(segment) = placement.segments.get_mut(placement.count) else {
                break;
            };
            *segment = Segment { first: placed, pages, gfn: first };
            placement.count += 1;
            placed += pages;
        }
        if placed == wanted {
            Ok(placement)
        } else {
            Err(PlacementError { wanted, available: placed })
        }
    }

    /// Returns the segments, in ascending order.
    pub fn segments(&self) -> &[Segment] {
        self.segments.get(..self.count).unwrap_or(&[])
    }

    /// Returns the frame of a page of the working set.
    #[inline(always)]
    pub fn gfn(&self, page: u64) -> u64 {
        let mut gfn = self.segments[0].gfn + page;
        let mut index = 1;
        while index < self.count && index < MAX_SEGMENTS && page >= self.segments[index].first {
            gfn = self.segments[index].gfn + (page - self.segments[index].first);
            index += 1;
        }
        gfn
    }
}
