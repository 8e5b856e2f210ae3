//! The connections of a migration, at its source.

use std::io;

use crate::transport::link::Link;
use crate::transport::wire::Wire;

/// The first connection, and those that have joined it and carry only shares of passes.
///
/// All stay open until the migration ends. If a joined connection closed before the first one has
/// carried the reason of a failure, the destination would only see a lost connection.
pub(super) struct Channels {
    pub(super) first: Wire<Link>,
    /// In the order in which they joined.
    pub(super) joined: Vec<Wire<Link>>,
}

impl Channels {
    /// Number of channels, including the first.
    pub(super) fn count(&self) -> u32 {
        1 + self.joined.len() as u32
    }

    /// Makes new keys for TLS on channels that have sent many records. Keys last for 2^24 records,
    /// so none change in a pause that follows, unless more than a quarter of that is sent in it.
    pub(super) fn refresh_keys(&mut self) -> io::Result<()> {
        std::iter::once(&mut self.first)
            .chain(&mut self.joined)
            .try_for_each(|wire| wire.stream_mut().refresh_keys())
    }

    /// Bytes sent over the channels that have joined.
    pub(super) fn joined_bytes(&self) -> u64 {
        self.joined.iter().map(Wire::sent_bytes).sum()
    }

    /// Bytes sent over all channels.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.first.sent_bytes() + self.joined_bytes()
    }
}
