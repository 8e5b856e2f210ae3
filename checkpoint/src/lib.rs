//! Taking checkpoints of a running guest, and restoring them.
//!
//! ```text
//! Checkpointer    takes epochs of one: a short pause, then copied and written behind the running guest
//! restore         a guest of any epoch, every byte checked before it may run
//! ```
//!
//! A failed epoch loses nothing: its frames go back to the tracker and are in the next one (I4).
#![forbid(unsafe_code)]

mod background_copy;
mod cadence;
mod chain;
mod checkpointer;
mod chunks;
mod commit_thread;
mod copy_policy;
mod cost;
mod disk_copy;
mod forecast;
mod histogram;
mod live_copy;
mod pause;
mod precopy_buffer;
mod protection;
mod report;
mod restore;
mod snapshot;
mod staging;

pub use cadence::{Achieved, Cadence, Taken, Tally};
pub use checkpointer::Checkpointer;
pub use forecast::{BEARABLE, CadenceForecast, cadence_forecast};
pub use histogram::Spread;
pub use report::{Cause, CheckpointError, EpochReport, Phase};
pub use restore::{RestoreError, RestoreReport, restore, restore_archive, restore_lazily};
pub use staging::StagingLimits;
