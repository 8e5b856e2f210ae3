//! Which addresses a migration uses in clear text.

use std::io;
use std::net::SocketAddr;

/// An address outside loopback, over which a migration without TLS is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{0} is not on this host's loopback, and without TLS every host on the way can read and change \
     the guest: give --tls-dir, or accept that with --insecure"
)]
pub struct UnprotectedAddress(SocketAddr);

impl From<UnprotectedAddress> for io::Error {
    fn from(e: UnprotectedAddress) -> Self {
        Self::new(io::ErrorKind::PermissionDenied, e)
    }
}

/// Fails unless `address` is on loopback.
pub(super) fn stays_here(address: SocketAddr) -> Result<(), UnprotectedAddress> {
    match address.ip().to_canonical().is_loopback() {
        true => Ok(()),
        false => Err(UnprotectedAddress(address)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_stays_here() {
        let stays = |address: &str| stays_here(address.parse().unwrap()).is_ok();
        for here in ["127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert!(stays(here), "{here}");
        }
        for away in ["0.0.0.0:1", "[::]:1", "10.0.0.2:1", "[fe80::1]:1", "[::ffff:10.0.0.2]:1"] {
            assert!(!stays(away), "{away}");
        }
    }
}
