//! A disk for a store that forgets what was not synced, and stores' files made to agree with themselves again.

mod disk;
mod inode;

pub use disk::{DiskOp, MemoryDisk, Survives};

pub use crate::store::{reseal_archive, reseal_log, reseal_manifest, reseal_pages};
