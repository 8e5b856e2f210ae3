//! The epoch store: a page file with frames' contents, a log that says which epoch has which, and a manifest that names both.
//!
//! Bytes, names and the order of syncs are in `FORMAT.md`. A [`Store`] is either open for reading,
//! by anyone at any time, or open for one writer, which holds the directory's lock.
//!
//! ```text
//! sectors, records   the log's bytes                         log, group, build  epochs in it: read, written
//! address, object    memory and drives, as frames
//! frame_map          where an epoch's frames are             pages              the page file and its free slots
//! writer, entries    one epoch being written                 opening, commit    made durable, in order; old ones dropped
//! space, block_map   which slots which epochs need           rotate             another log, compaction
//! pin                epochs that are being read              verify, export     all of it read
//! salvage            what is left of a damaged store    repair, aside      a sound one of that
//! unreadable         parts of a file that its disk cannot read
//! archive            one epoch in a file of its own             late, touched      frames as a guest asks for them
//! ```
#![forbid(unsafe_code)]

mod address;
mod alloc;
mod archive;
mod aside;
mod backend;
mod block_map;
mod build;
mod calm;
mod commit;
mod entries;
mod epoch_info;
mod error;
mod export;
mod fetch;
mod frame_map;
mod group;
mod late;
mod limits;
mod listing;
mod log;
mod manifest;
mod names;
mod object;
mod open;
mod opening;
mod pages;
mod pin;
mod records;
mod repair;
#[cfg(feature = "testing")]
mod reseal;
mod rotate;
mod salvage;
mod sectors;
mod space;
mod store;
#[cfg(all(test, feature = "testing"))]
mod taken;
#[cfg(feature = "testing")]
pub mod testing;
mod touched;
mod unreadable;
mod verify;
mod writer;

pub use address::{of_object, place};
pub use alloc::{SlotError, SlotRun};
pub use archive::Archive;
pub use backend::{Backend, DirBackend, LOCK_FILE, LockError, RangeLock, StoreFile};
pub use calm::{Calm, Held};
pub use commit::{Bounds, Committer, Published};
pub use epoch_info::EpochInfo;
pub use error::{Damage, StoreError};
pub use export::{ExportReport, Place};
pub use fetch::Sink;
pub use frame_map::Cell;
pub use late::LateFrames;
pub use limits::MAX_EPOCH;
pub use listing::Listing;
pub use pages::Pages;
pub use pin::{Cells, Machine, Mapped, Pinned};
pub use repair::RepairReport;
pub use rotate::CompactReport;
pub use salvage::{CheckpointState, Survey};
pub use store::Store;
pub use verify::VerifyReport;
pub use writer::{EpochWriter, Written};
