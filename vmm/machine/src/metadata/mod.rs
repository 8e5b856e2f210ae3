//! The metadata of a guest: what its operator lets it read, and the sessions in which it reads. All
//! network interfaces of the guest share one store. Checkpoints, snapshots and migrations do not
//! include it.

mod counters;
mod store;
mod token;

pub use counters::MetadataCounts;
pub(crate) use counters::count;
pub(crate) use store::TokenError;
pub use store::{MetadataError, MetadataStore};
