//! Snapshots: a guest in two files, in the layout that Firecracker's tools know. The memory file
//! has the memory slots one after another; the state file has everything else and is ours.
//!
//! ```text
//! memory file   | slot at 0          | slot at 4 GiB   |    holes: pages that were never written
//! state file    header, layout, configuration, state sections, totals
//! ```
//!
//! A snapshot exists when its state file does: that is renamed to its name last, when all of memory
//! is durable. `FORMAT.md` specifies both files.

mod create;
mod error;
mod live;
mod load;
mod memory_output;
mod new_file;
mod request;
#[cfg(test)]
mod tests;
mod writeback;

pub use create::create_snapshot;
pub use error::SnapshotError;
pub use live::create_live_snapshot;
pub use load::{OpenSnapshot, open_snapshot};
pub use new_file::SnapshotFile;
pub use request::{SnapshotKind, SnapshotReport, SnapshotRequest};
