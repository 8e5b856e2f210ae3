//! A guest, as seen by the engines that checkpoint, migrate and restore it.
//!
//! The engines know a guest only through the traits here, and each asks for the parts that it
//! needs. The VMM implements them over KVM; the feature `testing` has an implementation over host
//! threads, for hosts without KVM and for tests.
//!
//! ```text
//! GuestIdentity   which guest it is, and the shape of its machine
//! GuestContents   its memory and drives, to be copied
//! Populate        putting contents into its memory
//! DirtyLog        which frames it writes
//! WriteThrottle   how much each vCPU writes, and the limit on that
//! Lifecycle       pause, resume, end
//! Stateful        its state besides memory, saved and restored
//! HandOver        what only one host may hold
//! Guest           all of these; GuestFactory builds one
//! Delegate        a view of a guest that changes one part and passes the others through
//!
//! Section         a piece of its state besides memory
//! Line, Origin    which checkpoints may follow which
//! WriteProtection frames that are not written until they are copied
//! PageSource      the pages of a lazily restored guest that have not arrived yet
//! MemoryLoader    first contents of untouched memory
//! SharedGuest     what another process of this host continues it with: its open files
//! MemoryRight     which of these processes may run the guest
//! GuestDrive      a drive of a guest, to be copied; DriveCopy is a copy that is being filled
//! CopyBeforeWrite saves a block's old content before the guest overwrites it
//! LogLimit        limits log lines that a guest or a peer can cause
//! ```
#![forbid(unsafe_code)]

mod blocks;
mod collection_report;
mod contents;
mod copy_before_write;
mod delegate;
mod dirty_log;
mod drive;
mod error;
mod factory;
mod guest;
mod hand_over;
mod identity;
mod lifecycle;
mod lineage;
mod log_limit;
mod memory_claim;
mod page_source;
mod populate;
mod section;
mod shared_guest;
mod stateful;
#[cfg(feature = "testing")]
pub mod testing;
mod vm_id;
mod write_protect;
mod write_throttle;

pub use blocks::{PAGE_BYTES, StoragePermit, block_layout, data_runs, data_within, read_blocks};
pub use collection_report::CollectionReport;
pub use contents::{GuestContents, GuestRam};
pub use copy_before_write::{
    CopyBeforeWrite, CopyBeforeWriteError, FrozenBlocks, SAVED_BLOCKS_MAX, WRITE_WAIT_LIMIT,
    WriteWaits,
};
pub use delegate::Delegate;
pub use dirty_log::DirtyLog;
pub use drive::{DriveCopy, DriveHead, GuestDrive};
pub use error::{ClaimError, GuestError, RunState};
pub use factory::{GuestFactory, GuestWithCopies};
pub use guest::Guest;
pub use hand_over::{HandOver, MAX_QUEUED_PACKET_BYTES, NextHost};
pub use identity::GuestIdentity;
pub use lifecycle::{Lifecycle, Paused, SavedPause, VcpuPauses};
pub use lineage::{Line, LineId, Origin};
pub use log_limit::LogLimit;
pub use memory_claim::{ClaimState, MemoryRight, OfferedClaim};
pub use page_source::{LazyRestoreProgress, PageSource, PageSourceError};
pub use populate::{MemoryLoader, Populate};
pub use section::{MAX_SECTION_NAME, Section, SectionHead, SectionTag};
pub use shared_guest::{
    DeviceFile, MAX_DEVICE_FILES, MAX_FILE_NAME, SharedGuest, SharedMemoryError,
};
pub use stateful::{Clock, SavedState, Stateful};
pub use vm_id::{VmId, VmIdError};
pub use write_protect::WriteProtection;
pub use write_throttle::{VcpuWrites, WriteThrottle};
