//! Why a migration failed, and where the guest is now.

use std::fmt;
use std::io;
use std::time::Duration;

use driftline_format::FormatError;
use driftline_guest::GuestError;

use crate::control::Phase;
use crate::journal::RecordsError;
use crate::protocol::digest::MemoryDigests;
use crate::protocol::error::WireError;
use crate::protocol::layout::LayoutDifference;
use crate::transport::error::TransportError;

/// What made a migration fail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The connection failed, or the peer violated the protocol.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// `--verify` found a difference, so the guest must not run at the destination.
    #[error("the destination's memory is not the guest's: {0}")]
    MemoryDiffers(Box<MemoryDigests>),
    /// One of several connections failed.
    #[error("connection {which} of {of}: {cause}")]
    Connection {
        /// Its number, from 1; the others joined the first one.
        which: u32,
        /// How many there are.
        of: u32,
        /// Why it failed.
        #[source]
        cause: Box<Cause>,
    },
    /// A joined connection failed.
    #[error("a joined connection failed: {cause}")]
    Joined {
        /// Why it failed.
        #[source]
        cause: Box<WireError>,
    },
    /// The destination does not offer a requested feature.
    #[error("the destination's version of driftline does not offer {feature}")]
    NotOffered {
        /// The feature, and the option that requests it.
        feature: &'static str,
    },
    /// The peer could not be reached.
    #[error("cannot connect to {peer}: {cause}")]
    Connect {
        /// The address as given.
        peer: String,
        /// The error of the last address.
        #[source]
        cause: io::Error,
    },
    /// A source's connection ended after HELLO, before any part of its guest arrived.
    #[error(
        "the source at {peer} left before {before} ({cause}); its guest is not here: see whether \
         it still runs there, then start this receiver again and send it again"
    )]
    SourceLeft {
        /// Its address.
        peer: String,
        /// The event that had not happened yet.
        before: &'static str,
        /// How the connection ended.
        #[source]
        cause: Box<WireError>,
    },
    /// An operation failed on this side's guest.
    #[error("{0}")]
    Guest(#[from] GuestError),
    /// Reading a disk or writing its copy failed.
    #[error("copying disk \"{id}\" failed: {what}: {cause}")]
    Drive {
        /// The disk's name.
        id: String,
        /// The operation.
        what: &'static str,
        /// The system's answer.
        #[source]
        cause: io::Error,
    },
    /// A hand-over record could not be read or made durable.
    #[error("{0}")]
    Records(#[from] RecordsError),
    /// The migration was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The guest changes its memory faster than the link carries it.
    #[error("{why}")]
    NotConverging {
        /// The reason, with figures.
        why: String,
    },
    /// The pause took too long.
    #[error(
        "the pause reached its limit of {:.1} s before the destination was prepared",
        limit.as_secs_f64()
    )]
    PauseTooLong {
        /// Its limit.
        limit: Duration,
    },
    /// The destination restored something other than what was sent.
    #[error("{what} is {theirs:#x} on the destination and {ours:#x} here")]
    Differs {
        /// What was compared.
        what: &'static str,
        /// Value at the source.
        ours: u64,
        /// Value at the destination.
        theirs: u64,
    },
    /// The guest built here has another memory layout than the source's guest.
    #[error("the guest built here is not laid out as its source: {0}")]
    LayoutDiffers(LayoutDifference),
    /// A part of the guest is too large for the protocol.
    #[error("{what} has {found} bytes or pieces; a migration carries at most {limit}")]
    TooLarge {
        /// The part.
        what: &'static str,
        /// Its size, in bytes or pieces.
        found: u64,
        /// The protocol's limit.
        limit: u64,
    },
    /// COMMIT did not arrive in time.
    #[error("the source did not send COMMIT within {after:?} of PREPARED")]
    NoCommit {
        /// Timeout since PREPARED.
        after: Duration,
    },
    /// The destination has durably discarded the guest.
    #[error(
        "the destination discarded the guest{}",
        unanswered.as_deref().map(|e| format!("; COMMIT had no answer: {e}")).unwrap_or_default()
    )]
    Discarded {
        /// Why COMMIT had no answer before the destination was asked.
        unanswered: Option<String>,
    },
    /// The operator resolved that the guest runs here.
    #[error("the operator resolved that the guest runs here")]
    ResolvedRun,
    /// An operation on this host failed.
    #[error("{what} failed: {cause}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's answer.
        #[source]
        cause: io::Error,
    },
}

/// Fails if a part of the guest exceeds the protocol's limit.
pub(crate) fn fits(what: &'static str, found: u64, limit: u64) -> Result<(), Cause> {
    if found > limit { Err(Cause::TooLarge { what, found, limit }) } else { Ok(()) }
}

impl From<TransportError> for Cause {
    fn from(e: TransportError) -> Self {
        match e {
            TransportError::Wire(e) => Self::Wire(e),
            TransportError::System { what, cause } => Self::System { what, cause },
        }
    }
}

impl From<FormatError> for Cause {
    fn from(e: FormatError) -> Self {
        Self::Wire(e.into())
    }
}

/// Where a guest is after a migration failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum GuestPlace {
    /// It runs here, or is paused here as it was before the migration.
    Here,
    /// It is paused here because resuming it failed; no other host has it.
    PausedHere {
        /// Why resuming failed.
        why: String,
    },
    /// It ended here by itself, or was stopped, during the migration.
    Ended,
}

impl fmt::Display for GuestPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here => f.write_str("the guest continues here"),
            Self::Ended => f.write_str("the guest has ended here"),
            Self::PausedHere { why } => {
                write!(
                    f,
                    "the guest is here, paused, and could not be resumed: {why}; resolve that, \
                     then resume it"
                )
            }
        }
    }
}

/// A migration that failed at its source. `send` does not return while the migration is in doubt.
#[derive(Debug, thiserror::Error)]
#[error("the migration to {peer} failed ({phase}): {cause}; {guest}")]
pub struct SendError {
    /// Address of the destination, as given.
    pub peer: String,
    /// The phase that failed.
    pub phase: Phase,
    /// Why it failed.
    #[source]
    pub cause: Cause,
    /// Where the guest is now.
    pub guest: GuestPlace,
}

/// A migration that failed at its destination. The guest does not run here and never will.
#[derive(Debug, thiserror::Error)]
#[error("no guest was received ({phase}): {cause}")]
pub struct ReceiveError {
    /// The phase that failed.
    pub phase: Phase,
    /// Why it failed.
    #[source]
    pub cause: Cause,
    /// Whether PREPARED may have been sent. The source may then be in doubt.
    pub was_prepared: bool,
}
