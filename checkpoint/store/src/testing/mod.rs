//! Test support: a disk that loses what was not synced, and functions that make a store's files
//! consistent again.

mod disk;
mod disk_state;
mod inode;
mod memory_file;

pub use disk::{MemoryDisk, Survives};
pub use disk_state::DiskOp;

pub use crate::alloc::Slots;
pub use crate::archive::reseal::reseal_archive;
pub use crate::reseal::{reseal_log, reseal_manifest, reseal_pages};
