//! The durable records of hand-overs: what each end must know after its process has died.
//!
//! Each host has one directory, shared by its processes. It contains:
//! - *site*: the directory's name, a UUID in the file `site`. PREPARED carries it to the source,
//!   and only the same site may later decide about an unknown token.
//! - *source record* `TOKEN.source.json`: written before COMMIT. While it exists, the guest may be
//!   running on `peer`. It is removed once it is known which host has the guest.
//! - *decision* `TOKEN.destination.json`: `committed` or `discarded`, made once. The file appears
//!   whole, and only if no other process has made one (a link that does not replace). So two
//!   processes that share the site can never decide differently.
//! - *prepared record* `TOKEN.prepared.json`: the destination's vote in two-phase commit, durable
//!   before READY and so before PREPARED. While it exists, the guest may run here. A source asks
//!   only after PREPARED, so a token without a prepared record and without a decision belongs to no
//!   guest, and a question about it stores nothing. (A hand-over that a claim decides has neither,
//!   and its source does not ask.) The record names the host's boot and the mount.
//!   In another boot or mount the decision may have been lost, so no process may answer that the
//!   guest did not run. A host without a boot id names none, and makes its decision durable before
//!   the guest runs.
//!
//! Each record is written to a temporary file, synced, and linked into place; then the directory is
//! synced. A decision whose prepared record names a boot is synced after the guest has resumed.
//! Records that are needed during the pause are *staged* (written without their name) before it.

mod boot_and_mount;
mod destination;
mod directory;
mod error;
mod file;
mod source;
mod sweep;

pub(crate) use destination::{PreparedMark, StagedDecision};
pub use directory::Records;
pub use error::RecordsError;
pub use source::{Pending, SourceRecord};
pub(crate) use source::{SourceMark, StagedSource};

#[cfg(test)]
mod tests;
