//! Why a migration did not happen, and where the guest is now.

use std::fmt;
use std::io;
use std::time::Duration;

use driftline_checkpoint::GuestError;
use driftline_checkpoint::format::FormatError;
use driftline_dirty_tracker::{FrameRun, Layout, LayoutError, Slot};

use crate::control::Phase;
use crate::journal::RecordsError;
use crate::protocol::message::{Tag, Token};

/// What is wrong with what a peer sent, or with the connection to it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Bytes that are no header or record, a wrong checksum, a connection that broke.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// A record that is no message.
    #[error("a {} message is malformed: {why}", message.name())]
    Malformed {
        /// Its tag.
        message: Tag,
        /// How.
        why: &'static str,
    },
    /// A CONFIG whose slots are no layout.
    #[error("a CONFIG message is malformed: {0}")]
    Layout(#[from] LayoutError),
    /// A tag that must be understood and is not.
    #[error("a record of the unknown tag {tag} must be understood")]
    UnknownTag {
        /// The tag.
        tag: u16,
    },
    /// A message that does not belong there.
    #[error("{} came where {expected} was expected", found.name())]
    Unexpected {
        /// What came.
        found: Tag,
        /// What could have.
        expected: &'static str,
    },
    /// Frames that the guest does not have.
    #[error("a {} message names {run}, which is not inside one memory slot of the guest", message.name())]
    Outside {
        /// PAGES or ZERO.
        message: Tag,
        /// The run.
        run: FrameRun,
    },
    /// Blocks of a drive that does not go along.
    #[error("a {} message names drive {drive}, and {drives} go along", message.name())]
    NoDrive {
        /// BLOCKS or BLOCK_ZEROS.
        message: Tag,
        /// Its place in the list, from 0.
        drive: u32,
        /// How many there are.
        drives: usize,
    },
    /// Blocks that the drive does not have.
    #[error("a {} message names blocks {}..{} of disk \"{id}\", which has {blocks}", message.name(), run.start.0, run.end().0)]
    OutsideDrive {
        /// BLOCKS or BLOCK_ZEROS.
        message: Tag,
        /// The blocks.
        run: FrameRun,
        /// The drive's name.
        id: String,
        /// Blocks that it has.
        blocks: u64,
    },
    /// The two sides counted differently.
    #[error("{what} is {found} by the peer's count and {expected} by this side's")]
    Count {
        /// What was counted.
        what: &'static str,
        /// By the peer.
        found: u64,
        /// By this side.
        expected: u64,
    },
    /// More than a peer may send.
    #[error("{found} {what}, more than the {limit} allowed")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How much came.
        found: u64,
        /// The bound.
        limit: u64,
    },
    /// The source keeps the receiver and moves next to nothing.
    #[error(
        "the source moved {found} bytes of memory and state in {:.1} s, less than the {least} that it has to",
        window.as_secs_f64()
    )]
    TooSlow {
        /// What it moved.
        found: u64,
        /// In which time.
        window: Duration,
        /// What it has to move in that time.
        least: u64,
    },
    /// A decision about another migration.
    #[error("a {} message names migration {found}, and this is {expected}", message.name())]
    Token {
        /// COMMIT, PREPARED, RUNNING or ANSWER.
        message: Tag,
        /// As received.
        found: Token,
        /// This one.
        expected: Token,
    },
    /// The peer refused before anything was begun.
    #[error("the peer refused: {reason}")]
    Refused {
        /// In its words.
        reason: String,
    },
    /// The peer gave up.
    #[error("the peer aborted: {reason}")]
    Aborted {
        /// In its words.
        reason: String,
    },
}

impl WireError {
    /// The peer made no progress for as long as it was allowed to.
    pub(crate) fn is_silence(&self) -> bool {
        matches!(self, Self::Format(FormatError::Io(e)) if e.kind() == io::ErrorKind::TimedOut)
    }
}

impl WireError {
    /// The connection ended or broke: not silence, and not what came over it.
    pub(crate) fn is_loss(&self) -> bool {
        match self {
            // What the link itself makes up (its limits, a stop) has no number of the system's.
            Self::Format(FormatError::Io(e)) => {
                e.kind() == io::ErrorKind::UnexpectedEof || e.raw_os_error().is_some()
            }
            _ => false,
        }
    }
}

impl From<io::Error> for WireError {
    fn from(e: io::Error) -> Self {
        Self::Format(FormatError::Io(e))
    }
}

/// What each side has by its own account.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryDigests {
    /// The source's.
    pub ours: u128,
    /// The destination's.
    pub theirs: u128,
}

impl fmt::Display for MemoryDigests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its digest is {:032x} there and {:032x} here", self.theirs, self.ours)
    }
}

/// The first thing in which the memory layout of a guest built here is not its source's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutDifference {
    /// The number of slots.
    #[error("{theirs} memory slots there and {ours} here")]
    Slots {
        /// Here.
        ours: u64,
        /// At the source.
        theirs: u64,
    },
    /// A field of a slot.
    #[error("{field} of its memory slot {nth} is {theirs:#x} there and {ours:#x} here")]
    Slot {
        /// The slot's place, by guest address from 0.
        nth: usize,
        /// What differs.
        field: &'static str,
        /// Here.
        ours: u64,
        /// At the source.
        theirs: u64,
    },
}

impl LayoutDifference {
    /// Compares field by field, slots ascending by address; `None` if the layouts are the same.
    pub(crate) fn between(ours: &Layout, theirs: &Layout) -> Option<Self> {
        let fields = |of: &Slot| {
            [
                ("the number", of.id.0.into()),
                ("the first gfn", of.base.0),
                ("the length", of.frames),
            ]
        };
        for (nth, (here, there)) in ours.slots().zip(theirs.slots()).enumerate() {
            let mut pairs = fields(here).into_iter().zip(fields(there));
            if let Some(((field, ours), (_, theirs))) = pairs.find(|(a, b)| a != b) {
                return Some(Self::Slot { nth, field, ours, theirs });
            }
        }
        let (ours, theirs) = (ours.slots().count() as u64, theirs.slots().count() as u64);
        (ours != theirs).then_some(Self::Slots { ours, theirs })
    }
}

/// What made a migration fail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The connection, or what came over it.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// `--verify` found a difference: the guest must not run there.
    #[error("the destination's memory is not the guest's: {0}")]
    MemoryDiffers(Box<MemoryDigests>),
    /// One of several connections failed.
    #[error("connection {which} of {of}: {cause}")]
    Connection {
        /// Which, from 1: the first is the one that the others have joined.
        which: u32,
        /// How many there are.
        of: u32,
        /// What happened to it.
        cause: Box<Cause>,
    },
    /// One of the connections that had joined failed.
    #[error("a connection that had joined: {cause}")]
    Joined {
        /// What happened to it.
        cause: Box<WireError>,
    },
    /// The destination does not know what was asked for.
    #[error("the destination's version of driftline does not offer {feature}")]
    NotOffered {
        /// What.
        feature: &'static str,
    },
    /// Nobody could be reached.
    #[error("cannot connect to {peer}: {cause}")]
    Connect {
        /// As given.
        peer: String,
        /// The last address's answer.
        cause: io::Error,
    },
    /// A source introduced itself, and its connection ended before anything of its guest was here.
    #[error(
        "the source at {peer} left before {before} ({cause}); its guest is not here: see whether it \
         still runs there, then start this receiver again and send it again"
    )]
    SourceLeft {
        /// Who it was.
        peer: String,
        /// What did not happen any more.
        before: &'static str,
        /// How the connection ended.
        cause: Box<WireError>,
    },
    /// A guest did not do what it was asked: the one here, or the one being built here.
    #[error("{0}")]
    Guest(#[from] GuestError),
    /// A drive that goes along: it could not be read, or its copy not be written.
    #[error("copying disk \"{id}\" failed: {what}: {cause}")]
    Drive {
        /// The drive's name.
        id: String,
        /// The operation.
        what: &'static str,
        /// The system's answer.
        cause: io::Error,
    },
    /// A hand-over record could not be read or made durable.
    #[error("{0}")]
    Records(#[from] RecordsError),
    /// Someone cancelled it.
    #[error("cancelled")]
    Cancelled,
    /// The guest changes its memory faster than the link carries it.
    #[error("{why}")]
    NotConverging {
        /// With the figures.
        why: String,
    },
    /// The pause took too long.
    #[error("the pause reached its limit of {:.1} s before the destination was prepared", limit.as_secs_f64())]
    PauseTooLong {
        /// How long it may take.
        limit: Duration,
    },
    /// The destination restored something else than was sent.
    #[error("{what} is {theirs:#x} on the destination and {ours:#x} here")]
    Differs {
        /// What was compared.
        what: &'static str,
        /// Here.
        ours: u64,
        /// There.
        theirs: u64,
    },
    /// The guest built from the source's configuration has other memory than the source says.
    #[error("the guest built here is not laid out as its source: {0}")]
    LayoutDiffers(LayoutDifference),
    /// The guest does not fit into the protocol.
    #[error("{what} has {found} bytes or pieces; a migration carries at most {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// How large it is.
        found: u64,
        /// The bound.
        limit: u64,
    },
    /// COMMIT did not come in time.
    #[error("the source did not say COMMIT within {after:?} of PREPARED")]
    NoCommit {
        /// The deadline.
        after: Duration,
    },
    /// The destination threw the guest away, and says that this is durable.
    #[error("the destination discarded the guest{}", reason.as_deref().map(|r| format!(": {r}")).unwrap_or_default())]
    Discarded {
        /// In the destination's words, if it gave any.
        reason: Option<String>,
    },
    /// The operator said where the guest runs.
    #[error("the operator resolved that the guest runs here")]
    ResolvedRun,
    /// Something on this host's side that the migration needs failed.
    #[error("{what} failed: {cause}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's answer.
        cause: io::Error,
    },
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
    /// It runs on here (or stays paused here, as it was before).
    Here,
    /// It is here and paused, because letting it go on failed; nothing else has it.
    PausedHere {
        /// What failed.
        why: String,
    },
    /// It ended here by itself, or was stopped, while the migration was under way.
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
                    "the guest is here, paused, and could not be resumed: {why}; resolve that, then resume it"
                )
            }
        }
    }
}

/// A migration that failed at its source. While nobody knows where the guest is, `send` does not
/// return: it asks, and waits for the operator.
#[derive(Debug, thiserror::Error)]
#[error("the migration to {peer} failed ({phase}): {cause}; {guest}")]
pub struct SendError {
    /// Where to.
    pub peer: String,
    /// In which phase.
    pub phase: Phase,
    /// Why.
    #[source]
    pub cause: Cause,
    /// Where the guest is now.
    pub guest: GuestPlace,
}

/// A migration that failed at its destination. The guest does not run here and never will.
#[derive(Debug, thiserror::Error)]
#[error("no guest was received ({phase}): {cause}")]
pub struct ReceiveError {
    /// In which phase.
    pub phase: Phase,
    /// Why.
    #[source]
    pub cause: Cause,
    /// Whether the source may have been told to hand over, and so may have to ask: from PREPARED on.
    pub was_prepared: bool,
}
