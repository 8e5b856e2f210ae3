//! The guest as the engines that checkpoint, migrate and restore it see it.
//!
//! The engines know a guest only through [`Guest`]. The VMM implements it over KVM; the feature
//! `testing` has an implementation over host threads, for hosts without KVM and for tests.
//!
//! ```text
//! Guest           a guest that can be tracked, paused, saved and restored; GuestFactory builds one
//! Section         a piece of its state besides memory
//! Line, Origin    which checkpoints may follow which
//! Shield          write protection: frames that are not written until they are copied
//! Backlog         the pages of a lazily restored guest that have not arrived yet
//! Fill            first contents of untouched memory
//! GuestDrive      a drive of a guest, to be copied; DriveCopy is the copy in the making
//! Keeper          copy-before-write: saves a block's old content before the guest overwrites it
//! ```
#![forbid(unsafe_code)]

mod blocks;
mod copy_before_write;
mod drive;
mod error;
mod guest;
mod lineage;
mod page_source;
mod populate;
mod section;
#[cfg(feature = "testing")]
pub mod testing;
mod vm_id;
mod write_protect;

pub use blocks::{block_layout, data_runs, data_within, read_blocks};
pub use copy_before_write::{
    KeepError, Keeper, Keeping, SAVED_BLOCKS_MAX, WRITE_WAIT_LIMIT, WriteWaits,
};
pub use drive::{DriveCopy, DriveHead, GuestDrive};
pub use error::{GuestError, RunState};
pub use guest::{
    Clock, Guest, GuestFactory, GuestRam, MAX_LATE, Paused, SavedState, VcpuPauses, VcpuWrites,
    WithCopies,
};
pub use lineage::{Line, LineId, Origin};
pub use page_source::{Backlog, Fetching, PageSourceError};
pub use populate::Fill;
pub use section::{Section, SectionTag, section_tags};
pub use vm_id::VmId;
pub use write_protect::Shield;
