//! Mutual TLS 1.3 of a connection.
//!
//! A [`TlsSession`] reads and writes the socket that it is given. The thread that owns the
//! connection owns it, too. Both sides present a certificate, and each verifies the other's against
//! the CA of its own directory. Files are read for each connection.
//!
//! After the handshake of a TCP connection, the session is offloaded to the kernel if that is
//! possible. It is a [`KernelSession`] then.

mod config;
mod error;
mod files;
mod kernel;
mod names;
mod outgoing;
mod records;
mod session;
mod status;

pub(super) use config::{client, server};
pub use error::TlsError;
pub use files::TlsFileError;
pub(super) use kernel::KernelSession;
pub use names::{InvalidPeerName, PeerName};
pub(crate) use session::TlsSession;
pub(super) use session::offload::Offload;
