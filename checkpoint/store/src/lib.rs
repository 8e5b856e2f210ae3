//! The epoch store: a page file with frames' contents, a log that says which epoch has which, and a
//! manifest that names both.
//!
//! Bytes, names and the order of syncs are in `FORMAT.md`. A [`Store`] is either open for reading,
//! by anyone at any time, or open for one writer, which holds the directory's lock.
//!
//! ```text
//! backend, names            files, and what they are called
//! sectors, records          the bytes of a log
//! log                       which epochs a log has; epoch_reader reads one, epoch_encoder writes one
//! address, object           memory and drives, as frames of an epoch
//! page_file                 contents of frames; alloc knows its free slots
//! frame_map                 where an epoch's frames are
//! epoch_writer, extents     one epoch while it is written
//! commit, recovery          epochs made durable in order, old ones dropped; opening a store for that
//! retention, block_map      which epochs need which slots
//! rotate                    another log, compaction
//! pin, read                 an epoch that is read, and kept for that
//! lazy, working_set         pages of an epoch as a guest asks for them
//! verify, export, archive   all of an epoch read; one epoch in a file of its own
//! salvage, repair, aside    what is sound of a damaged store, and a store made of that
//! unreadable                parts of a file that its disk cannot read
//! pause_gate                store work yields while a guest is paused
//! ```
#![forbid(unsafe_code)]

mod address;
mod alloc;
mod archive;
mod aside;
mod backend;
mod block_map;
mod commit;
mod epoch_encoder;
mod epoch_info;
mod epoch_reader;
mod epoch_writer;
mod error;
mod export;
mod extents;
mod frame_map;
mod lazy;
mod limits;
mod listing;
mod log;
mod manifest;
mod names;
mod object;
mod open;
mod page_file;
mod pause_gate;
mod pin;
mod read;
mod records;
mod recovery;
mod repair;
#[cfg(feature = "testing")]
mod reseal;
mod retention;
mod rotate;
mod salvage;
mod sectors;
mod store;
#[cfg(all(test, feature = "testing"))]
mod taken;
#[cfg(feature = "testing")]
pub mod testing;
mod unreadable;
mod verify;
mod working_set;

pub use address::{of_object, place};
pub use alloc::{SlotError, SlotRun};
pub use archive::Archive;
pub use backend::{Backend, DirBackend, LOCK_FILE, LockError, RangeLock, StoreFile};
pub use commit::{Bounds, Committer, Published};
pub use epoch_info::EpochInfo;
pub use epoch_writer::{EpochWriter, Written};
pub use error::{Damage, StoreError};
pub use export::{ExportReport, Place};
pub use frame_map::Cell;
pub use lazy::LateFrames;
pub use limits::MAX_EPOCH;
pub use listing::Listing;
pub use page_file::Pages;
pub use pause_gate::{Calm, Held};
pub use pin::{Cells, Machine, Mapped, Pinned};
pub use read::Sink;
pub use repair::RepairReport;
pub use rotate::CompactReport;
pub use salvage::{CheckpointState, Survey};
pub use store::Store;
pub use verify::VerifyReport;
