//! Errors of the journal.

use std::io;
use std::path::{Path, PathBuf};

use crate::protocol::ids::Token;

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

/// Why the content of a file is not the record that it should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum RecordDefect {
    #[error("it is longer than {limit} bytes")]
    TooLong { limit: u64 },
    #[error("its version is {found}, and this program reads {reads}")]
    Version { found: u32, reads: u32 },
    #[error("its token is {found}, not that in its name")]
    Token { found: Token },
    #[error("its name does not begin with a token")]
    Name,
}

pub(super) fn invalid(path: &Path, defect: RecordDefect) -> RecordsError {
    failed("read", path)(io::Error::new(io::ErrorKind::InvalidData, defect))
}
