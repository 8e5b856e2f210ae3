//! Why a migration failed, and where the guest is now.

use std::fmt;
use std::io;
use std::time::Duration;

use driftline_dirty_tracker::{LayoutError, NoMemory, OutOfSlot};
use driftline_format::FormatError;
use driftline_guest::{GuestError, VmId};
use vm_memory::GuestMemoryError;

use crate::control::Phase;
use crate::journal::RecordsError;
use crate::policy::convergence::LimitReached;
use crate::protocol::digest::MemoryDigests;
use crate::protocol::error::WireError;
use crate::protocol::layout::LayoutDifference;
use crate::transport::error::TransportError;
use crate::transport::policy::UnprotectedAddress;
use crate::transport::tls::TlsError;

/// What made a migration fail.
#[derive(Debug, thiserror::Error)]
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
    /// The options of a hand-over on this host do not fit together.
    #[error("{0}")]
    NotLocal(#[from] LocalConflict),
    /// The peer could not be reached.
    #[error("cannot connect to {peer}: {cause}")]
    Connect {
        /// The address as given.
        peer: String,
        /// The error of the last address.
        #[source]
        cause: io::Error,
    },
    /// This side has no TLS session to offer.
    #[error("{0}")]
    Tls(#[source] Box<TlsError>),
    /// The peer did not begin a TLS session.
    #[error("no TLS session with {peer}: {cause}")]
    Handshake {
        /// The address as given.
        peer: String,
        /// Why.
        #[source]
        cause: io::Error,
    },
    /// Other hosts could read and change the guest.
    #[error("{0}")]
    Unprotected(#[from] UnprotectedAddress),
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
    /// The only connection of a receiver brought no source.
    #[error("no guest came over the connection that this receiver was started with: {reason}")]
    ConnectionRefused {
        /// Why it was refused, with the peer.
        reason: String,
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
        /// The reason.
        #[source]
        cause: DriveFailure,
    },
    /// Copies of disks cannot be written: their storage is slower than the source sends them, or
    /// fails.
    #[error("writing copies of disks failed: {cause}")]
    Copies {
        /// The reason.
        #[source]
        cause: DriveFailure,
    },
    /// The guest could not be built within the receiver's limits.
    #[error("building the guest failed: {0}")]
    NotBuilt(#[from] BuildFailure),
    /// A hand-over record could not be read or made durable.
    #[error("{0}")]
    Records(#[from] RecordsError),
    /// The migration was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The guest changes its memory faster than the link carries it.
    #[error("{limit}{}", throttle.as_ref().map(|effect| format!("; {effect}")).unwrap_or_default())]
    NotConverging {
        /// The limit that pre-copy reached.
        limit: PrecopyLimit,
        /// Effect of the throttle, if it is known.
        throttle: Option<ThrottleEffect>,
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
    /// The two sides computed different values of what was sent.
    #[error("{what} is {theirs:#x} at the peer and {ours:#x} here")]
    Differs {
        /// What was compared.
        what: &'static str,
        /// This side's value.
        ours: u64,
        /// The peer's value.
        theirs: u64,
    },
    /// The guest built here has another memory layout than the source's guest.
    #[error("the guest built here has another memory layout than its source: {0}")]
    LayoutDiffers(LayoutDifference),
    /// A part of the guest is too large for the protocol.
    #[error("{what} has {found} {unit}; a migration carries at most {limit}")]
    TooLarge {
        /// The part.
        what: &'static str,
        /// Its size.
        found: u64,
        /// The protocol's limit.
        limit: u64,
        /// The unit of both, in the plural.
        unit: &'static str,
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
        unanswered.as_ref().map(|e| format!("; COMMIT had no answer: {e}")).unwrap_or_default()
    )]
    Discarded {
        /// Why COMMIT had no answer before the destination was asked.
        #[source]
        unanswered: Option<Box<WireError>>,
    },
    /// The operator resolved that the guest runs here.
    #[error("the operator resolved that the guest runs here")]
    ResolvedRun,
    /// Guest memory could not be accessed.
    #[error("{what} failed: {cause}")]
    Memory {
        /// The operation.
        what: &'static str,
        /// The memory's answer.
        #[source]
        cause: GuestMemoryError,
    },
    /// The host lacks address space to record frames.
    #[error("{what} failed: {cause}")]
    NoMemory {
        /// The operation.
        what: &'static str,
        /// The tracker's answer.
        #[source]
        cause: NoMemory,
    },
    /// A frame is outside guest memory.
    #[error("{what} failed: {cause}")]
    OutOfSlot {
        /// The operation.
        what: &'static str,
        /// The tracker's answer.
        #[source]
        cause: OutOfSlot,
    },
    /// A thread of this side has ended without an answer.
    #[error("{what} failed: its thread has ended")]
    ThreadEnded {
        /// The thread's operation.
        what: &'static str,
    },
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

/// Why a guest is not handed over on this host.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LocalConflict {
    /// Descriptors do not travel to this address.
    #[error(
        "--local hands the guest over to another process of this host, which {to} does not name: \
         give the unix:PATH of a receiver here, or remove --local"
    )]
    Address {
        /// The address as given.
        to: String,
    },
    /// The receiver's process belongs to another user, who would get access to the guest's memory.
    #[error(
        "the receiver is a process of user {theirs}, and a process of user {ours} hands memory \
         over only to its own user: run both as one user, or this process as root"
    )]
    Receiver {
        /// The receiver's user id.
        theirs: u32,
        /// This process's user id.
        ours: u32,
    },
    /// An option that is about copying or about other hosts.
    #[error(
        "--local hands memory and disks over as they are, on this host, so {option} has no use: \
         remove one of the two options"
    )]
    Option {
        /// The option.
        option: &'static str,
    },
}

/// A limit of pre-copy.
#[derive(Debug)]
pub enum PrecopyLimit {
    /// The limit of passes or of time, found between two passes.
    Reached(Box<LimitReached>),
    /// The time limit, reached within a pass.
    Timeout(Duration),
}

impl From<LimitReached> for PrecopyLimit {
    fn from(limit: LimitReached) -> Self {
        Self::Reached(Box::new(limit))
    }
}

impl fmt::Display for PrecopyLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reached(limit) => limit.fmt(f),
            Self::Timeout(limit) => {
                write!(f, "pre-copy took longer than its {} s", limit.as_secs_f64())
            }
        }
    }
}

/// What the throttle did in a pre-copy that did not converge.
#[derive(Debug)]
pub enum ThrottleEffect {
    /// The operator had forbidden it.
    Forbidden,
    /// The guest does not tell which vCPUs write, so none was throttled.
    NotMeasured,
    /// No vCPU was throttled.
    Off,
    /// vCPUs were limited.
    On {
        /// Limit of each vCPU, bytes of whole frames a second.
        most_bytes_per_s: u64,
        /// The vCPUs that the limit slowed down.
        vcpus: Vec<ThrottledVcpu>,
    },
}

/// A vCPU that a throttle slowed down.
#[derive(Clone, Copy, Debug)]
pub struct ThrottledVcpu {
    /// Its number.
    pub vcpu: u32,
    /// Share of the time for which it was paused, percent.
    pub percent: f64,
}

impl fmt::Display for ThrottleEffect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (most, vcpus) = match self {
            Self::Forbidden => {
                return f.write_str("its vCPUs were not throttled (--no-throttle)");
            }
            Self::NotMeasured => {
                return f.write_str(
                    "none of its vCPUs was throttled: which of them write is not known",
                );
            }
            Self::Off => return f.write_str("its vCPUs were not throttled"),
            Self::On { most_bytes_per_s, vcpus } => (*most_bytes_per_s as f64 / 1e6, vcpus),
        };
        if vcpus.is_empty() {
            return write!(f, "none of its vCPUs writes more than {most:.1} MB/s");
        }
        let each = |ThrottledVcpu { vcpu, percent }: &ThrottledVcpu| {
            format!("vCPU {vcpu} for {percent:.0} % of the time")
        };
        let vcpus: Vec<String> = vcpus.iter().map(each).collect();
        write!(f, "throttled to {most:.1} MB/s each: {}", vcpus.join(", "))
    }
}

/// Why an operation on a disk or its copy failed.
#[derive(Debug, thiserror::Error)]
pub enum DriveFailure {
    /// The operating system refused it.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// No disk has such a size.
    #[error("{0}")]
    Size(#[source] Box<LayoutError>),
    /// The host lacks address space to track its writes.
    #[error("{0}")]
    NoMemory(#[from] NoMemory),
    /// One operation took longer than its limit.
    #[error("its storage has not answered for {limit:?}")]
    Unanswered {
        /// The limit.
        limit: Duration,
    },
    /// The limit of the phase was reached during an operation that took long.
    #[error("its storage has not answered for {waited:.1?}, and {limit}")]
    PhaseOver {
        /// Duration of the operation so far.
        waited: Duration,
        /// The limit of the phase.
        #[source]
        limit: Box<Cause>,
    },
    /// Several operations, each within its limit, took too long together.
    #[error("its storage has not kept up for {limit:?}")]
    TooSlow {
        /// The limit.
        limit: Duration,
    },
    /// The thread of the operation has ended.
    #[error("its thread has ended")]
    ThreadEnded,
}

/// Why a receiver did not build a guest.
#[derive(Debug, thiserror::Error)]
pub enum BuildFailure {
    /// Earlier guests were abandoned, and their threads still wait for storage.
    #[error(
        "earlier guests are still being built ({}); restart the receiver if their storage is lost",
        guests.iter().map(VmId::to_string).collect::<Vec<_>>().join(", ")
    )]
    EarlierGuests {
        /// Those guests.
        guests: Vec<VmId>,
    },
    /// Copies for an earlier guest have not been removed yet.
    #[error("copies of disks of an earlier guest are still being removed")]
    EarlierCopies,
    /// The guest took too long.
    #[error(
        "guest {vm_id} was not built within {limit:?} (its disks or copies may be on storage that \
         does not answer)"
    )]
    TooSlow {
        /// The guest.
        vm_id: VmId,
        /// The limit.
        limit: Duration,
    },
}

/// Fails if a part of the guest exceeds the protocol's limit, which is in the same unit.
pub(crate) fn fits(
    what: &'static str,
    found: u64,
    limit: u64,
    unit: &'static str,
) -> Result<(), Cause> {
    if found > limit { Err(Cause::TooLarge { what, found, limit, unit }) } else { Ok(()) }
}

impl From<TransportError> for Cause {
    fn from(e: TransportError) -> Self {
        match e {
            TransportError::Wire(e) => Self::Wire(e),
            TransportError::System { what, cause } => Self::System { what, cause },
            TransportError::Memory { what, cause } => Self::Memory { what, cause },
        }
    }
}

impl From<FormatError> for Cause {
    fn from(e: FormatError) -> Self {
        Self::Wire(e.into())
    }
}

/// Where a guest is after a migration failed.
#[derive(Debug)]
pub enum GuestPlace {
    /// It runs here, or is paused here as it was before the migration.
    Here,
    /// It is paused here because resuming it failed. No other host has it, but another process of
    /// this host may have its memory: then the cause says so.
    PausedHere {
        /// Why resuming failed.
        cause: Box<GuestError>,
    },
    /// It ended here by itself, or was stopped, during the migration.
    Ended,
}

impl fmt::Display for GuestPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here => f.write_str("the guest continues here"),
            Self::Ended => f.write_str("the guest has ended here"),
            Self::PausedHere { cause } => {
                write!(
                    f,
                    "the guest is here, paused, and could not be resumed: {cause}; resolve that, \
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversized_part_is_named_with_its_unit() {
        fits("the guest's state", 2, 2, "sections").unwrap();
        let error = fits("the guest's state", 3, 2, "sections").unwrap_err().to_string();
        assert_eq!(error, "the guest's state has 3 sections; a migration carries at most 2");
    }
}
