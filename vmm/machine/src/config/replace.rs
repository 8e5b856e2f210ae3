//! The error for host-specific parts that do not fit an arriving guest.

use std::fmt;

use driftline_guest::GuestError;

/// The parts that are given on this host do not fit the guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplaceError(pub(super) String);

impl fmt::Display for ReplaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ReplaceError {}

impl From<ReplaceError> for GuestError {
    fn from(e: ReplaceError) -> Self {
        Self::System { what: "giving the guest these devices", cause: Box::new(e) }
    }
}
