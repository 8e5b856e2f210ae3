//! Why a message could not be sent or received.

use std::io;

use crate::protocol::error::WireError;

/// A failure of the connection, of what came over it, or of what this host's side needs for it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransportError {
    /// The connection, or what came over it.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// An operation on this host.
    #[error("{what} failed: {cause}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's answer.
        cause: io::Error,
    },
}
