//! Takes checkpoints of a running guest, and restores them.
//!
//! ```text
//! Checkpointer    takes epochs: a short pause; copies and writes continue while the guest runs
//! restore         builds a guest from any epoch; every byte is checked before the guest runs
//! create_snapshot writes a paused guest to two flat files, create_live_snapshot one that runs;
//!                 open_snapshot opens them
//! ```
//!
//! A failed epoch loses nothing: its frames return to the tracker and are in the next epoch (I4).
#![forbid(unsafe_code)]

mod attempt;
mod availability;
mod background_copy;
mod cadence;
mod chain;
mod checkpointer;
mod chunks;
mod commit_thread;
mod copy_planner;
mod copy_policy;
mod copy_time;
mod cost;
mod disk_copy;
mod epoch_copy;
mod epoch_drives;
mod epoch_output;
mod flat;
mod forecast;
mod guest;
mod histogram;
mod live_copy;
mod moved_chain;
mod pause;
mod precopy_buffer;
mod protect_ahead;
mod protection;
mod report;
mod restore;
mod staging;

pub use cadence::{Cadence, CadenceTotals, TakenEpoch, Tally};
pub use checkpointer::Checkpointer;
pub use flat::{
    OpenSnapshot, SnapshotError, SnapshotFile, SnapshotKind, SnapshotReport, SnapshotRequest,
    create_live_snapshot, create_snapshot, open_snapshot,
};
pub use forecast::{CadenceForecast, cadence_forecast};
pub use guest::Checkpointable;
pub use histogram::Percentiles;
pub use moved_chain::{FollowedWrites, MovedChain};
pub use report::{CheckpointError, DriveRefusal, EpochFailure, EpochReport, EpochStep};
pub use restore::{
    DriveRestoreError, RestoreError, RestoreReport, restore, restore_archive, restore_lazily,
};
pub use staging::StagingLimits;
