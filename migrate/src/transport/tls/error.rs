//! Why a connection has no TLS session, as sentences about both sides.

use std::io;

use rustls::{AlertDescription, CertificateError, PeerIncompatible};

use super::files::TlsFileError;

/// A failure of TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file of this side cannot be used.
    #[error("{0}")]
    Files(#[from] TlsFileError),
    /// The session cannot be set up on this side.
    #[error("TLS cannot begin here: {0}")]
    Setup(#[source] rustls::Error),
    /// The name of the peer's certificate is not known.
    #[error("an address without a host has no name to verify: give the receiver's with --peer")]
    NoName,
    /// The peer speaks the migration protocol without TLS.
    #[error("the peer does not use TLS, and this side does: give --tls-dir on both hosts")]
    PlainPeer,
    /// The peer uses TLS, and this side does not.
    #[error("the peer uses TLS, and this side does not: give --tls-dir on both hosts")]
    TlsPeer,
    /// The peer sends anything else.
    #[error("the peer sent bytes that are not TLS")]
    NotTls,
    /// The peer has closed the connection before the session began.
    #[error("the peer closed the connection during the TLS handshake")]
    Vanished,
    /// The peer has closed the connection without the end of its TLS session.
    #[error("the peer's connection ended without the end of its TLS session")]
    Truncated,
    /// The peer's certificate does not have the expected name.
    #[error("the peer's certificate does not have the name {expected}; --peer gives its name")]
    WrongName {
        /// The name that it should have.
        expected: String,
    },
    /// The peer's certificate has no name that may send guests here.
    #[error(
        "the sender's certificate is for {found}; name one of its names with --allow-peer to \
         accept it"
    )]
    NotAllowed {
        /// Names in its certificate.
        found: String,
    },
    /// The kernel refuses the session's keys, although it offers TLS.
    #[error(
        "the kernel offers TLS and refuses the keys of the session ({step}): {cause}; try again, \
         without kernel TLS from now on"
    )]
    Kernel {
        /// The option of the socket that failed.
        step: &'static str,
        /// The system's answer.
        #[source]
        cause: io::Error,
    },
    /// The keys of a session must change, and the kernel has them.
    #[error(
        "the connection needs new TLS keys, which it does not get with kernel TLS: use more \
         --connections, or start the programs of both hosts with DRIFTLINE_KERNEL_TLS=0"
    )]
    KeysUsedUp,
    /// The peer, or its certificate, is not acceptable.
    #[error("{}", describe(.0))]
    Session(#[source] rustls::Error),
}

impl From<TlsError> for io::Error {
    fn from(e: TlsError) -> Self {
        let kind = match &e {
            TlsError::Vanished => io::ErrorKind::UnexpectedEof,
            TlsError::Truncated => io::ErrorKind::ConnectionAborted,
            TlsError::Kernel { .. } | TlsError::KeysUsedUp => io::ErrorKind::Other,
            _ => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, e)
    }
}

/// Returns a sentence for a failure of a session.
fn describe(e: &rustls::Error) -> String {
    use rustls::Error;
    match e {
        Error::InvalidCertificate(why) => format!("the peer's certificate {}", refusal(why)),
        Error::NoCertificatesPresented => "the peer presented no certificate".to_owned(),
        Error::PeerIncompatible(
            PeerIncompatible::Tls12NotOffered
            | PeerIncompatible::Tls12NotOfferedOrEnabled
            | PeerIncompatible::Tls13RequiredForQuic
            | PeerIncompatible::SupportedVersionsExtensionRequired
            | PeerIncompatible::ServerDoesNotSupportTls12Or13
            | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig,
        ) => "the peer does not offer TLS 1.3".to_owned(),
        Error::AlertReceived(alert) => complaint(*alert),
        e => format!("TLS failed: {e}"),
    }
}

/// Returns what is wrong with a peer's certificate.
fn refusal(why: &CertificateError) -> String {
    use CertificateError as E;
    match why {
        E::UnknownIssuer | E::BadSignature => {
            "is not signed by the CA in ca-cert.pem of this host".to_owned()
        }
        E::Expired | E::ExpiredContext { .. } => {
            "has expired, by the clock of this host".to_owned()
        }
        E::NotValidYet | E::NotValidYetContext { .. } => {
            "is not valid yet, by the clock of this host".to_owned()
        }
        E::InvalidPurpose | E::InvalidPurposeContext { .. } => {
            "is not for this side of a connection (extended key usage)".to_owned()
        }
        why => format!("is not acceptable: {why}"),
    }
}

/// Returns what a peer's alert says about this host.
fn complaint(alert: AlertDescription) -> String {
    use AlertDescription as A;
    match alert {
        A::UnknownCA => {
            "the peer does not trust the CA that signed this host's certificate".to_owned()
        }
        A::DecryptError => {
            "the peer cannot verify this host's certificate: it trusts another CA of that name"
                .to_owned()
        }
        A::CertificateExpired => {
            "the peer says that this host's certificate has expired or is not valid yet".to_owned()
        }
        A::BadCertificate => {
            "the peer says that this host's certificate has another name than it expects".to_owned()
        }
        A::CertificateRequired => "the peer requires a certificate of this host".to_owned(),
        A::UnsupportedCertificate => {
            "the peer says that this host's certificate is not for this side of a connection \
             (extended key usage)"
                .to_owned()
        }
        A::ProtocolVersion => "the peer does not offer TLS 1.3".to_owned(),
        A::InternalError => {
            "the peer cannot use TLS: its log says why, for example an unreadable file".to_owned()
        }
        alert => format!("the peer ended the TLS session: {alert:?}"),
    }
}
