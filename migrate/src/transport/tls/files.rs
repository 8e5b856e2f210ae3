//! The files of a TLS directory, which are read for each connection.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The CA by which the peer's certificate must be signed.
pub(super) const CA: &str = "ca-cert.pem";

/// Upper bound on the bytes of one file.
const MAX_FILE: u64 = 256 << 10;
/// Upper bound on the certificates in one file.
const MAX_CERTIFICATES: usize = 64;

/// A file of a TLS directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsFileError {
    /// The file cannot be read.
    #[error("cannot read {}: {cause}", path.display())]
    Read {
        /// Its path.
        path: PathBuf,
        /// The system's answer.
        #[source]
        cause: io::Error,
    },
    /// The file is not PEM, or has nothing of the kind that it should have.
    #[error("{} has no {expected} in PEM: {cause}", path.display())]
    Pem {
        /// Its path.
        path: PathBuf,
        /// What it should have.
        expected: &'static str,
        /// The parser's answer.
        #[source]
        cause: pem::Error,
    },
    /// The file has more certificates than are accepted.
    #[error("{} has more than {MAX_CERTIFICATES} certificates", path.display())]
    TooMany {
        /// Its path.
        path: PathBuf,
    },
    /// The certificate and the key of this host do not fit together, or cannot be used.
    #[error("{} and {} cannot be used: {cause}", certificate.display(), key.display())]
    Identity {
        /// The certificate's path.
        certificate: PathBuf,
        /// The key's path.
        key: PathBuf,
        /// Why.
        #[source]
        cause: rustls::Error,
    },
    /// The key is another one than the certificate's.
    #[error("{} is not the key of {}", key.display(), certificate.display())]
    WrongKey {
        /// The certificate's path.
        certificate: PathBuf,
        /// The key's path.
        key: PathBuf,
    },
    /// A certificate in the CA's file cannot be a trust anchor.
    #[error("{} cannot be used: {cause}", path.display())]
    Authority {
        /// Its path.
        path: PathBuf,
        /// Why.
        #[source]
        cause: rustls::Error,
    },
}

/// Reads the certificates in a file, at least one.
pub(super) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsFileError> {
    let bytes = read(path)?;
    let mut found = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(&bytes) {
        if found.len() == MAX_CERTIFICATES {
            return Err(TlsFileError::TooMany { path: path.to_owned() });
        }
        found.push(certificate.map_err(|e| not_pem(path, "certificate", e))?);
    }
    match found.is_empty() {
        true => Err(not_pem(path, "certificate", pem::Error::NoItemsFound)),
        false => Ok(found),
    }
}

/// Reads the key in a file.
pub(super) fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsFileError> {
    let bytes = read(path)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|e| not_pem(path, "private key", e))
}

fn not_pem(path: &Path, expected: &'static str, cause: pem::Error) -> TlsFileError {
    TlsFileError::Pem { path: path.to_owned(), expected, cause }
}

/// Reads a file of at most [`MAX_FILE`] bytes.
fn read(path: &Path) -> Result<Vec<u8>, TlsFileError> {
    let failed = |cause| TlsFileError::Read { path: path.to_owned(), cause };
    // A FIFO does not block, because it is opened without a wait and refused.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
    let file = std::fs::File::from(file);
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file")));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(failed)?;
    match bytes.len() as u64 > MAX_FILE {
        true => {
            let why = format!("it has more than {} KiB", MAX_FILE >> 10);
            Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, why)))
        }
        false => Ok(bytes),
    }
}
