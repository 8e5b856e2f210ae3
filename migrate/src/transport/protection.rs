//! How the two sides of a migration protect their connections.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::address::Address;
use super::tls::{self, PeerName, TlsError, TlsSession};

/// TLS of a source.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendTls {
    /// Directory of `ca-cert.pem`, `client-cert.pem` and `client-key.pem`.
    pub dir: PathBuf,
    /// The name that the receiver's certificate must have; by default the host of its address.
    #[serde(default)]
    pub peer: Option<PeerName>,
}

/// TLS of a receiver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReceiveTls {
    /// Directory of `ca-cert.pem`, `server-cert.pem` and `server-key.pem`.
    pub dir: PathBuf,
    /// The names of which a source's certificate must have one. Empty: all certificates that the CA
    /// has signed are accepted.
    pub allow: Vec<PeerName>,
}

impl SendTls {
    /// Returns the session of a new connection to `address`, for a source that has `bytes` of
    /// memory and disks to send.
    pub(crate) fn session(&self, address: &Address, bytes: u64) -> Result<TlsSession, TlsError> {
        let dialled = || address.host().and_then(|host| host.parse().ok());
        let peer = self.peer.clone().or_else(dialled).ok_or(TlsError::NoName)?;
        tls::client(&self.dir, &peer, bytes)
    }
}

impl ReceiveTls {
    /// Checks that the files can be used now.
    ///
    /// # Errors
    ///
    /// [`TlsError`] names the file.
    pub fn check(&self) -> Result<(), TlsError> {
        self.session().map(drop)
    }

    /// Returns the session of a new connection.
    pub(crate) fn session(&self) -> Result<TlsSession, TlsError> {
        tls::server(&self.dir)
    }
}
