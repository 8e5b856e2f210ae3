//! Errors of sending and receiving messages.

use std::io;

use crate::protocol::error::WireError;

/// A failure to send or receive a message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransportError {
    /// The connection failed, or the peer violated the protocol.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// An operation on this host failed.
    #[error("{what} failed: {cause}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's answer.
        #[source]
        cause: io::Error,
    },
}
