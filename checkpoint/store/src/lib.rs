//! The epoch store: a page file with the contents of frames, a log that records which epoch has
//! which frames, and a manifest that names both files.
//!
//! `FORMAT.md` specifies the bytes, the names and the order of syncs. A [`Store`] is open either
//! for reading, by any number of processes at any time, or for its one writer, which holds the
//! directory's lock.
//!
//! ```text
//! backend, dir_backend      files, and those of a directory; names: what they are called
//! sectors, records          the bytes of a log
//! log                       the epochs of a log; epoch_reader reads one, epoch_encoder writes one
//! address, object           guest memory and drives, as frames of an epoch
//! page_file                 the contents of frames; alloc knows the file's free slots
//! frame_map                 where each frame of an epoch is stored
//! epoch_writer, extents     one epoch while it is being written
//! commit, recovery          commits epochs in order and drops old ones; opens a store for writing
//! retention, block_map      which epochs need which slots
//! rotate                    log rotation, compaction
//! pin, read                 reads an epoch, and pins it meanwhile
//! lazy, working_set         reads pages of an epoch as a guest asks for them
//! verify, export, archive   reads a whole epoch; stores one epoch in a file of its own
//! record_file               files of records: archives, and states of snapshots
//! salvage, repair           finds the sound epochs of a damaged store, and makes a store of them
//! quarantine                keeps the files that a repair has replaced, under other names
//! snapshot_state            a guest without its memory, in one file; memory_layout is beside it
//! unreadable                parts of a file that the disk cannot read
//! pause_gate                store work yields while a guest is paused
//! ```
#![forbid(unsafe_code)]

mod address;
mod alloc;
mod archive;
mod backend;
mod block_map;
mod commit;
mod committer;
#[cfg(feature = "testing")]
mod correct;
mod damage;
mod dir_backend;
mod epoch_encoder;
mod epoch_info;
mod epoch_reader;
#[cfg(all(test, feature = "testing"))]
mod epoch_taker;
mod epoch_writer;
mod error;
mod export;
mod extents;
mod frame_map;
mod lazy;
mod limits;
mod listing;
mod log;
mod logged_epoch;
mod manifest;
mod memory_layout;
mod names;
mod object;
mod open;
mod page_file;
mod pause_gate;
mod pin;
mod quarantine;
mod read;
mod record_file;
mod records;
mod recovery;
mod regular_file;
mod repair;
mod retention;
mod rotate;
mod salvage;
mod sectors;
mod snapshot_state;
mod store;
#[cfg(feature = "testing")]
pub mod testing;
mod unreadable;
mod verify;
mod working_set;

pub use address::{of_object, place};
pub use alloc::{SlotError, SlotRun};
pub use archive::Archive;
pub use backend::{Backend, LOCK_FILE, LockError, RangeLock, StoreFile};
pub use commit::CommittedEpoch;
pub use committer::{Bounds, Committer};
pub use damage::{Damage, DriveDefect};
pub use dir_backend::DirBackend;
pub use epoch_info::EpochInfo;
pub use epoch_writer::{EpochWriter, WrittenEpoch, unix_ms};
pub use error::StoreError;
pub use export::{ExportReport, OffsetOfFrame};
pub use frame_map::FrameLocation;
pub use lazy::LazyFrames;
pub use limits::MAX_EPOCH;
pub use listing::Listing;
pub use memory_layout::{MemoryFileLayout, SlotPlace};
pub use page_file::PageFile;
pub use pause_gate::{ClosedGate, PauseGate};
pub use pin::{FrameLocations, Machine, MachineState, Pinned};
pub use read::Sink;
pub use regular_file::{open_kind, open_regular};
pub use repair::RepairReport;
pub use rotate::CompactReport;
pub use salvage::{CheckpointState, Survey};
pub use snapshot_state::SnapshotState;
pub use store::Store;
pub use verify::VerifyReport;
