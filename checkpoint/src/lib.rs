//! Taking checkpoints of a running guest, and restoring them.
//!
//! ```text
//! Checkpointer    takes epochs of one: a short pause, then copied and written behind the running guest
//! restore         a guest of any epoch, every byte checked before it may run
//! ```
//!
//! A failed epoch loses nothing: its frames go back to the tracker and are in the next one (I4).
#![forbid(unsafe_code)]

mod cadence;
mod chain;
mod checkpointer;
mod copied;
mod cost;
mod crew;
mod followed;
mod forecast;
mod instant;
mod live;
mod pause;
mod pieces;
mod report;
mod restore;
mod saver;
mod shield;
mod shielding;
mod spread;
mod staging;

pub use cadence::{Achieved, Cadence, Taken, Tally};
pub use checkpointer::Checkpointer;
pub use forecast::{BEARABLE, CadenceForecast, cadence_forecast};
pub use report::{Cause, CheckpointError, EpochReport, Phase};
pub use restore::{RestoreError, RestoreReport, restore, restore_archive, restore_lazily};
pub use spread::Spread;
pub use staging::StagingLimits;
