//! Statistics that a guest gives about its memory.
//!
//! ```text
//! driver   buffer of {u16 tag, u64 value} .. ------------------>  device keeps the values,
//!                                                                 and the buffer
//! driver   <-- buffer is given back: new values are wanted -----  the interval is over
//! ```
//!
//! The device leaves the buffer in its queue, so that the position in the queue says whether the
//! driver has to send new values, also after a restore. The values are the guest's: nothing in the
//! host depends on them.

use serde::{Deserialize, Serialize};

/// Bytes of an entry: a little-endian `u16` tag and a little-endian `u64` value.
const ENTRY_BYTES: usize = 10;
/// Most bytes of a buffer. A longer buffer is not read at all. The limit bounds the time that a
/// buffer takes. Linux sends 16 entries, so there is room for tags of later kernels.
pub(super) const MAX_BYTES: u32 = 256 * ENTRY_BYTES as u32;

/// Names of the values, by their tags.
const NAMES: [&str; 16] = [
    "swap_in",
    "swap_out",
    "major_faults",
    "minor_faults",
    "free_memory",
    "total_memory",
    "available_memory",
    "disk_caches",
    "hugetlb_allocations",
    "hugetlb_failures",
    "oom_kill",
    "alloc_stall",
    "async_scan",
    "direct_scan",
    "async_reclaim",
    "direct_reclaim",
];

/// What the guest's driver last said about its memory. It may lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct MemoryStatistics([Option<u64>; NAMES.len()]);

impl MemoryStatistics {
    /// Returns the values that the driver has given, with their names. `free_memory`,
    /// `total_memory`, `available_memory`, `disk_caches` and the two of swapping are bytes; the
    /// others are numbers of events or of pages.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        NAMES.iter().zip(&self.0).filter_map(|(name, value)| Some((*name, (*value)?)))
    }

    /// Takes the entries of a buffer. A value without an entry stays. Returns the number of entries
    /// whose tag is unknown, or that are incomplete.
    pub(super) fn update(&mut self, bytes: &[u8]) -> u64 {
        let mut unknown = 0;
        for entry in bytes.chunks(ENTRY_BYTES) {
            let parts = entry.split_first_chunk::<2>();
            let parsed = parts.and_then(|(tag, value)| {
                let place = self.0.get_mut(usize::from(u16::from_le_bytes(*tag)))?;
                *place = Some(u64::from_le_bytes(value.try_into().ok()?));
                Some(())
            });
            unknown += u64::from(parsed.is_none());
        }
        unknown
    }
}

#[cfg(test)]
impl MemoryStatistics {
    /// Returns the bytes of an entry.
    pub(super) fn entry(tag: u16, value: u64) -> Vec<u8> {
        [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(statistics: &MemoryStatistics) -> Vec<(&'static str, u64)> {
        statistics.values().collect()
    }

    #[test]
    fn values_without_an_entry_stay() {
        let mut statistics = MemoryStatistics::default();
        let entry = MemoryStatistics::entry;
        assert_eq!(statistics.update(&[entry(4, 7), entry(0, u64::MAX), entry(15, 0)].concat()), 0);
        assert_eq!(statistics.update(&entry(4, 8)), 0);
        assert_eq!(
            values(&statistics),
            [("swap_in", u64::MAX), ("free_memory", 8), ("direct_reclaim", 0)]
        );
    }

    #[test]
    fn unknown_and_incomplete_entries_change_nothing() {
        let mut statistics = MemoryStatistics::default();
        let entry = MemoryStatistics::entry;
        assert_eq!(statistics.update(&[entry(16, 1), entry(5, 2), entry(u16::MAX, 3)].concat()), 2);
        for len in 1..ENTRY_BYTES {
            assert_eq!(statistics.update(&entry(5, 9)[..len]), 1, "{len} bytes");
        }
        assert_eq!(statistics.update(&[]), 0);
        assert_eq!(values(&statistics), [("total_memory", 2)]);
    }
}
