//! The connections of a migration, at its source.

use crate::transport::link::Link;
use crate::transport::wire::Wire;

/// The first connection, which everything else goes over, and those that only share in the passes.
///
/// All are kept to the migration's end: to close one before saying why on the first tells the
/// destination no more than that the connection is lost.
pub(super) struct Channels {
    pub(super) first: Wire<Link>,
    /// In the order in which they have joined.
    pub(super) joined: Vec<Wire<Link>>,
}

impl Channels {
    /// How many there are, the first one included.
    pub(super) fn count(&self) -> u32 {
        1 + self.joined.len() as u32
    }

    /// Bytes sent over those that have joined.
    pub(super) fn joined_bytes(&self) -> u64 {
        self.joined.iter().map(Wire::sent_bytes).sum()
    }

    /// Bytes sent over all.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.first.sent_bytes() + self.joined_bytes()
    }
}
