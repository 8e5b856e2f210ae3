//! A kernel in guest memory.

use linux_loader::loader::bootparam::setup_header;

use super::platform::GuestRange;

/// A kernel in guest memory.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) start: Start,
    /// The memory that it needs.
    pub(super) segments: Vec<GuestRange>,
}

/// The entry of a kernel.
#[derive(Debug)]
pub(super) enum Start {
    /// By the PVH note, in 32-bit mode.
    Pvh { rip: u64 },
    /// By the 64-bit Linux boot protocol, in long mode with a zero page.
    Linux64 { rip: u64, header: Box<setup_header> },
}

impl Start {
    /// Returns the highest address that the last byte of a RAM disk may have.
    pub(super) fn initrd_addr_max(&self) -> u64 {
        match self {
            Self::Pvh { .. } => u32::MAX.into(),
            Self::Linux64 { header, .. } => header.initrd_addr_max.into(),
        }
    }
}
