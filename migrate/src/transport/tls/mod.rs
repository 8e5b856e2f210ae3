//! Mutual TLS 1.3 of a connection.
//!
//! A [`TlsSession`] reads and writes the socket that it is given. The thread that owns the
//! connection owns it, too. Both sides present a certificate, and each verifies the other's against
//! the CA of its own directory. Files are read for each connection.

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
