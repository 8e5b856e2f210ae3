//! The metadata of a guest: what its operator lets it read, and the sessions in which it reads. All
//! network interfaces of the guest share one store. A checkpoint, a snapshot and a migration have
//! nothing of it.

mod counters;
mod store;
mod token;

pub use counters::MetadataCounts;
pub(crate) use counters::count;
pub use store::{MetadataError, MetadataStore};
