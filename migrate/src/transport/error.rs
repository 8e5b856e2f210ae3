//! Errors of sending and receiving messages.

use std::io;

use vm_memory::GuestMemoryError;

use crate::protocol::error::WireError;

/// A failure to send or receive a message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransportError {
    /// The connection failed, or the peer violated the protocol.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// Guest memory could not be accessed.
    #[error("{what} failed: {cause}")]
    Memory {
        /// The operation.
        what: &'static str,
        /// The memory's answer.
        #[source]
        cause: GuestMemoryError,
    },
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
