//! A disk for a store that forgets what was not synced, and stores' files made to agree with
//! themselves again.

mod disk;
mod inode;

pub use disk::{DiskOp, MemoryDisk, Survives};

pub use crate::alloc::Slots;
pub use crate::archive::reseal::reseal_archive;
pub use crate::reseal::{reseal_log, reseal_manifest, reseal_pages};
