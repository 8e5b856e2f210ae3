//! Guest state, stored: the [`Guest`] trait, its state sections, the epoch store and restore.
//!
//! `checkpoint` and `migrate` know a guest only through [`Guest`]. `vmm` implements it over KVM and,
//! for hosts without KVM and for tests, over host threads.
//!
//! ```text
//! Guest           a guest that can be tracked, paused, saved and restored
//! Checkpointer    takes epochs of one: a short pause, then copied and written behind the running guest
//! Shield          what of a guest nobody writes to until it is copied
//! Backlog         what of a restored guest has not come yet, while it runs already
//! Fill            first contents of memory that nobody has touched
//! Store           a directory of epochs, each stored whole or not at all (FORMAT.md)
//! Archive         one epoch in a file, packed
//! GuestDrive      a drive of a guest, to be copied; Keeper, what of it waits for that; DriveCopy, where its copy is being made
//! restore         a guest of any epoch, every byte checked before it may run
//! ```
//!
//! A failed epoch loses nothing: its frames go back to the tracker and are in the next one (I4).
#![forbid(unsafe_code)]

mod backlog;
mod cadence;
mod calm;
mod chain;
mod checkpointer;
mod copied;
mod cost;
mod crew;
mod drive;
pub mod durable;
mod fill;
mod followed;
mod forecast;
pub mod format;
mod guest;
mod instant;
mod keeper;
mod line;
mod live;
mod pause;
mod pieces;
mod report;
mod restore;
mod saver;
mod section;
mod shield;
mod shielding;
pub mod slots;
mod spread;
mod staging;
mod store;
#[cfg(feature = "testing")]
pub mod testing;
mod zero;

pub use backlog::{Backlog, Fetching};
pub use cadence::{Achieved, Cadence, Taken, Tally};
pub use checkpointer::Checkpointer;
pub use drive::{DriveCopy, DriveHead, GuestDrive, block_layout, data_runs};
pub use fill::Fill;
pub use forecast::{BEARABLE, CadenceForecast, cadence_forecast};
pub use guest::{
    Clock, Guest, GuestError, GuestFactory, GuestRam, MAX_LATE, Paused, RunState, SavedState,
    VcpuPauses, VcpuWrites, VmId, WithCopies,
};
pub use keeper::{KeepError, Keeper, Keeping};
pub use line::{Line, LineId, Origin};
pub use report::{Cause, CheckpointError, EpochReport, Phase};
pub use restore::{RestoreError, RestoreReport, restore, restore_archive, restore_lazily};
pub use section::{Section, SectionTag, section_tags};
pub use shield::Shield;
pub use spread::Spread;
pub use staging::StagingLimits;
pub use store::{
    Archive, Backend, CheckpointState, CompactReport, Damage, DirBackend, EpochInfo, ExportReport,
    LOCK_FILE, Listing, LockError, Place, RangeLock, RepairReport, Store, StoreError, StoreFile,
    Survey, VerifyReport,
};
pub use zero::is_zero;
