//! The durable records of hand-overs: what each end must know after its process has died.
//!
//! One directory a host, shared by its processes. Words:
//! - *site*: the directory's own name, a UUID in the file `site`; PREPARED tells it to the source,
//!   and only the same site may later decide about an unknown token.
//! - *source record* `TOKEN.source.json`: written before COMMIT; while it exists, the guest may be
//!   running on `peer`. Removed when the migration is settled.
//! - *decision* `TOKEN.destination.json`: `committed` or `discarded`, made once: the file appears
//!   whole, and only if no other process has made one (a link that does not replace). So two
//!   processes that share the site can never decide differently.
//! - *prepared record* `TOKEN.prepared.json`: the destination's vote in the sense of two-phase
//!   commit, durable before it says READY, and so before PREPARED: the guest may run here from now
//!   on. A source asks only after PREPARED, so a token without a prepared record and without a
//!   decision is no guest's, and answering a question about it stores nothing. The record names the
//!   host's boot and the mount. Where it is of others, the decision may have been lost with them,
//!   and nobody may say any more that the guest did not run. A host that cannot tell its boots
//!   apart names none, and makes its decision durable before the guest runs.
//!
//! Everything is written to a temporary file, synced and linked into place, and then the directory
//! is synced. For a decision whose prepared record names a boot, the directory is synced after the
//! guest has resumed. What is written in a pause is *staged* before.

mod destination;
mod directory;
mod error;
mod file;
mod life;
mod source;
mod sweep;

pub(crate) use destination::{PreparedMark, StagedDecision};
pub use directory::Records;
pub use error::RecordsError;
pub use source::{Pending, SourceRecord};
pub(crate) use source::{SourceMark, StagedSource};

#[cfg(test)]
mod tests;
