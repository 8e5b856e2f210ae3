//! Test support: a disk that loses what was not synced, and functions that make a store's files
//! consistent again.

mod disk;
mod inode;

pub use disk::{DiskOp, MemoryDisk, Survives};

pub use crate::alloc::Slots;
pub use crate::archive::reseal::reseal_archive;
pub use crate::reseal::{reseal_log, reseal_manifest, reseal_pages};
