//! Names in certificates.

use std::fmt;
use std::str::FromStr;

use rustls::pki_types::{CertificateDer, ServerName};
use serde::{Deserialize, Serialize};
use webpki::EndEntityCert;

use super::error::TlsError;

/// Scheme of a SPIFFE id.
const SPIFFE: &str = "spiffe://";

/// Upper bound on the bytes of a SPIFFE id.
const MAX_SPIFFE: usize = 2048;

/// A name that a peer's certificate must have among its alternative names.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PeerName(Kind);

#[derive(Clone, PartialEq, Eq, Debug)]
enum Kind {
    /// A DNS name or an IP address.
    Host(ServerName<'static>),
    /// A `spiffe://` URI.
    Spiffe(String),
}

/// A text that names no peer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" names no peer: use a DNS name, an IP address or spiffe://DOMAIN/PATH")]
pub struct InvalidPeerName(String);

impl PeerName {
    /// Whether `certificate` has this name.
    pub(super) fn is_in(&self, certificate: &CertificateDer<'_>) -> bool {
        let Ok(certificate) = EndEntityCert::try_from(certificate) else { return false };
        match &self.0 {
            Kind::Host(name) => certificate.verify_is_valid_for_subject_name(name).is_ok(),
            Kind::Spiffe(uri) => certificate.valid_uri_names().any(|name| name == uri),
        }
    }

    /// Returns the name for the server's choice of a certificate, if it is a host's.
    pub(super) fn server_name(&self) -> Option<ServerName<'static>> {
        match &self.0 {
            Kind::Host(name) => Some(name.clone()),
            Kind::Spiffe(_) => None,
        }
    }
}

/// Fails unless the peer's certificate has one of these names.
pub(super) fn check_certificate(
    certificate: Option<&CertificateDer<'_>>,
    allowed: &[PeerName],
) -> Result<(), TlsError> {
    match certificate {
        Some(certificate) if allowed.iter().any(|name| name.is_in(certificate)) => Ok(()),
        Some(certificate) => Err(TlsError::NotAllowed { found: names_in(certificate) }),
        None => Err(TlsError::NotAllowed { found: "no name".to_owned() }),
    }
}

/// Returns the names in a certificate, for messages. Their number and length are bounded.
fn names_in(certificate: &CertificateDer<'_>) -> String {
    let Ok(certificate) = EndEntityCert::try_from(certificate) else {
        return "no name".to_owned();
    };
    let names = certificate.valid_dns_names().chain(certificate.valid_uri_names());
    let short = |name: &str| name.chars().take(100).filter(|c| !c.is_control()).collect();
    let names: Vec<String> = names.take(4).map(short).collect();
    if names.is_empty() { "no DNS name or URI".to_owned() } else { names.join(", ") }
}

impl TryFrom<String> for PeerName {
    type Error = InvalidPeerName;

    fn try_from(text: String) -> Result<Self, InvalidPeerName> {
        text.parse()
    }
}

impl From<PeerName> for String {
    fn from(name: PeerName) -> Self {
        name.to_string()
    }
}

impl FromStr for PeerName {
    type Err = InvalidPeerName;

    fn from_str(text: &str) -> Result<Self, InvalidPeerName> {
        let invalid = || InvalidPeerName(text.to_owned());
        if let Some(id) = text.strip_prefix(SPIFFE) {
            let is_id = !id.is_empty()
                && !id.starts_with('/')
                && text.len() <= MAX_SPIFFE
                && id.bytes().all(|b| b.is_ascii_graphic());
            let name = is_id.then(|| Self(Kind::Spiffe(text.to_owned())));
            return name.ok_or_else(invalid);
        }
        let name = ServerName::try_from(text.to_owned()).map_err(|_| invalid())?;
        Ok(Self(Kind::Host(name)))
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Host(name) => f.write_str(&name.to_str()),
            Kind::Spiffe(uri) => f.write_str(uri),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        for name in ["host.example", "10.0.0.2", "::1", "spiffe://example.org/driftline"] {
            assert_eq!(name.parse::<PeerName>().unwrap().to_string(), name);
        }
        for name in ["", "a b", "https://example.org", "spiffe://", "spiffe:///a", "spiffe://a b"] {
            assert!(name.parse::<PeerName>().is_err(), "{name}");
        }
    }
}
