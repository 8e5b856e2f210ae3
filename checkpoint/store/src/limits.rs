//! The size of a log's sectors, and the highest numbers.

/// Bytes of a sector in the file.
pub(crate) const SECTOR: usize = 512;
/// The highest number that an epoch can have: locks on bytes of files end there.
pub const MAX_EPOCH: u64 = i64::MAX as u64 - 1;
/// The highest generation of a file: there is always another.
pub(crate) const MAX_GENERATION: u64 = 1 << 62;
/// A slot number that means that a frame is zeros: slot 0 is the page file's header.
pub(crate) const NO_SLOT: u32 = 0;
