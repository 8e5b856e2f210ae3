//! Errors of the journal.

use std::io;
use std::path::{Path, PathBuf};

/// A record could not be read or made durable.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} the hand-over record {}: {cause}", path.display())]
pub struct RecordsError {
    /// The operation: "read", "write" or "remove".
    pub what: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The system's answer.
    #[source]
    pub cause: io::Error,
}

pub(super) fn failed<'p>(
    what: &'static str,
    path: &'p Path,
) -> impl Fn(io::Error) -> RecordsError + 'p {
    move |cause| RecordsError { what, path: path.to_owned(), cause }
}

pub(super) fn invalid(path: &Path, why: String) -> RecordsError {
    failed("read", path)(io::Error::new(io::ErrorKind::InvalidData, why))
}
