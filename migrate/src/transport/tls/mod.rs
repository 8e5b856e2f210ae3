//! Mutual TLS 1.3 of a connection.
//!
//! A [`TlsSession`] is a state machine without I/O of its own, owned by the
//! thread that owns the connection. Both sides present a certificate, and each verifies the other's
//! against the CA of its own directory. Files are read for each connection.

mod config;
mod error;
mod files;
mod names;
mod outgoing;
mod session;

pub(super) use config::{client, server};
pub use error::TlsError;
pub use files::TlsFileError;
pub use names::{InvalidPeerName, PeerName};
pub(crate) use session::TlsSession;
