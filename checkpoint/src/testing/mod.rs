//! A guest without a hypervisor, for tests: host threads that write pages which say what they are.
//!
//! [`MemoryGuest`] is a [`Guest`](crate::Guest) in every respect that checkpoints and migration can
//! see: its writes mark the trees, it pauses between two writes, its state is a few sections. Every
//! page of its working set carries its frame number, a generation and a checksum, and
//! [`MemoryGuest::verify`] knows what each page of memory must hold after the writes made so far,
//! without having remembered it: a frame that was lost, torn or doubled on the way shows.
//!
//! [`Faults`] make its operations fail on request, [`Drive`] notices two hosts running one guest,
//! [`MemoryDisk`] is a disk for a store that forgets what was not synced.
//!
//! ```
//! use driftline_checkpoint::Guest;
//! use driftline_checkpoint::testing::{MemoryConfig, MemoryGuest};
//! let guest = MemoryGuest::start(MemoryConfig::small())?;
//! std::thread::sleep(std::time::Duration::from_millis(5));
//! guest.pause()?;
//! guest.verify().expect("every page is as it was written last");
//! # Ok::<(), driftline_checkpoint::GuestError>(())
//! ```

mod config;
mod disk;
mod drives;
mod faults;
mod filling;
mod guest;
mod inode;
mod pages;
mod shield;
mod writers;

pub use config::MemoryConfig;
pub use disk::{DiskOp, MemoryDisk, Survives};
pub use drives::TestDisk;
pub use faults::{Drive, Faults, Op};
pub use guest::{MemoryGuest, MemoryGuestFactory};
pub use pages::{WrongFrame, WrongMemory};

pub use crate::store::{reseal_archive, reseal_log, reseal_manifest, reseal_pages};
