//! The size of a log's sectors, and the highest numbers.

/// Bytes of a sector in the file.
pub(crate) const SECTOR: usize = 512;
/// Highest number that an epoch can have: the highest byte of a file that can be locked.
pub const MAX_EPOCH: u64 = i64::MAX as u64 - 1;
/// Highest generation of a file: there is always a higher one.
pub(crate) const MAX_GENERATION: u64 = 1 << 62;
/// Slot number of a frame of zeros, which is not stored: slot 0 is the page file's header.
pub(crate) const NO_SLOT: u32 = 0;
