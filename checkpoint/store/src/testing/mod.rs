//! Test support: a disk that loses what was not synced, and functions that make a store's files
//! consistent again.

mod disk;
mod disk_state;
mod inode;
mod memory_file;

pub use disk::{MemoryDisk, Survives};
pub use disk_state::DiskOp;

pub use crate::alloc::Slots;
pub use crate::correct::{correct_log, correct_manifest, correct_pages};
pub use crate::record_file::correct::correct_record_file;
