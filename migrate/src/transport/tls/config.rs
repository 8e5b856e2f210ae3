//! Sessions of both sides, from the files of a TLS directory.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, CipherSuite, ClientConfig, DigitallySignedStruct, Error, PeerIncompatible,
    RootCertStore, ServerConfig, SignatureScheme,
};
use rustls::{client::Resumption, client::UnbufferedClientConnection};
use rustls::{server::UnbufferedServerConnection, sign::SingleCertAndKey};

use super::error::TlsError;
use super::files::{self, CA, TlsFileError};
use super::kernel::NEW_KEYS_EXPECTED;
use super::names::PeerName;
use super::records::keys_are_short_lived;
use super::session::TlsSession;

/// Bytes of memory and disks above which a source offers [`NEW_KEYS_EXPECTED`]. A kernel session
/// can carry this four times, even in runs of 8 pages, which take three records each.
const NEW_KEYS_FROM: u64 = 32 << 30;

/// Returns the cryptography of both sides. AES-128 comes first: it takes less time than AES-256,
/// and no practical attack on either is known.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    provider.cipher_suites.sort_by_key(|s| s.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

/// Returns the session of a connection to a peer that must have the name `peer`. The source
/// has `bytes` of memory and disks to send.
pub(in super::super) fn client(
    dir: &Path,
    peer: &PeerName,
    bytes: u64,
) -> Result<TlsSession, TlsError> {
    let provider = provider();
    let roots = roots(dir)?;
    let identity = identity(dir, "client-cert.pem", "client-key.pem", &provider)?;
    let verifier = PeerVerifier { roots, peer: peer.clone(), provider: provider.clone() };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsError::Setup)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(identity)));
    config.resumption = Resumption::disabled();
    config.enable_secret_extraction = true;
    let new_keys = bytes > NEW_KEYS_FROM || keys_are_short_lived();
    if new_keys {
        config.alpn_protocols = vec![NEW_KEYS_EXPECTED.to_vec()];
    }
    // rustls requires a name here, and sends no SNI if it is an IP address.
    let none = ServerName::from(IpAddr::from(Ipv4Addr::UNSPECIFIED));
    let name = peer.server_name().unwrap_or(none);
    let connection = UnbufferedClientConnection::new(Arc::new(config), name);
    Ok(TlsSession::client(connection.map_err(TlsError::Setup)?, peer, new_keys))
}

/// Returns the session of a connection from a peer.
pub(in super::super) fn server(dir: &Path) -> Result<TlsSession, TlsError> {
    let provider = provider();
    let roots = roots(dir)?;
    let identity = identity(dir, "server-cert.pem", "server-key.pem", &provider)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
        .build()
        .map_err(|e| TlsError::Setup(Error::General(e.to_string())))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsError::Setup)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(identity)));
    // Without tickets the first bytes that the client reads after the handshake are a header.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.enable_secret_extraction = true;
    config.alpn_protocols = vec![NEW_KEYS_EXPECTED.to_vec()];
    let connection = UnbufferedServerConnection::new(Arc::new(config));
    Ok(TlsSession::server(connection.map_err(TlsError::Setup)?))
}

fn roots(dir: &Path) -> Result<Arc<RootCertStore>, TlsFileError> {
    let path = dir.join(CA);
    let mut roots = RootCertStore::empty();
    for certificate in files::certificates(&path)? {
        roots
            .add(certificate)
            .map_err(|cause| TlsFileError::Authority { path: path.clone(), cause })?;
    }
    Ok(Arc::new(roots))
}

/// Reads this host's certificate and key.
fn identity(
    dir: &Path,
    certificate: &str,
    key: &str,
    provider: &CryptoProvider,
) -> Result<CertifiedKey, TlsFileError> {
    let (certificate, key) = (dir.join(certificate), dir.join(key));
    let (chain, secret) = (files::certificates(&certificate)?, files::key(&key)?);
    CertifiedKey::from_der(chain, secret, provider).map_err(|cause| match cause {
        Error::InconsistentKeys(_) => TlsFileError::WrongKey { certificate, key },
        cause => TlsFileError::Identity { certificate, key, cause },
    })
}

/// Verifies the certificate of a server by its CA and by the name that it must have. Unlike the
/// verifier of rustls, it knows SPIFFE ids.
#[derive(Debug)]
struct PeerVerifier {
    roots: Arc<RootCertStore>,
    peer: PeerName,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PeerVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &self.roots,
            intermediates,
            now,
            algorithms,
        )?;
        match self.peer.is_in(certificate) {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(CertificateError::NotValidForName.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls13RequiredForQuic.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
