//! The messages as Rust values.

use driftline_dirty_tracker::{FrameRun, Layout};
use driftline_guest::Section;
use uuid::Uuid;

use super::counts::Counts;
use super::device_files::DeviceFileNames;
use super::drives::DriveMessage;
use super::memory::MemoryPlaces;
use super::runs::RunTable;
use super::state_heads::StateHeads;
use crate::protocol::codec::Codec;
use crate::protocol::decision::Verdict;
use crate::protocol::error::WireError;
use crate::protocol::ids::{Secret, Token};
use crate::protocol::tag::Tag;

/// The purpose of a connection, from HELLO.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// The destination's own HELLO.
    Serve,
    /// Moves a guest.
    Move,
    /// Asks about a migration.
    Query,
    /// Joins a migration as an additional channel.
    Join,
}

/// The contents of PREPARED.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PreparedPayload {
    pub(crate) token: Token,
    pub(crate) site: Uuid,
    pub(crate) digest: u32,
    pub(crate) counts: Counts,
}

/// A message. Tables and contents borrow from the receive buffer.
#[derive(Debug)]
pub(crate) enum WireMessage<'a> {
    Hello {
        purpose: Purpose,
        features: u64,
        version: &'a str,
    },
    Refused {
        reason: &'a str,
    },
    Abort {
        reason: &'a str,
    },
    Config {
        token: Token,
        layout: Layout,
        config: &'a [u8],
    },
    Ready {
        site: Uuid,
        secret: Secret,
    },
    PassBegin {
        pass: u32,
        frames: u64,
    },
    Pages {
        runs: RunTable<'a>,
        contents: &'a [u8],
    },
    Zero {
        runs: RunTable<'a>,
    },
    Packed {
        codec: Codec,
        runs: RunTable<'a>,
        packed: &'a [u8],
    },
    Verify,
    Digest(u128),
    /// The content is still in the stream.
    Frames {
        run: FrameRun,
    },
    Expect {
        runs: RunTable<'a>,
    },
    PassEnd {
        pass: u32,
        counts: Counts,
    },
    PassAck {
        pass: u32,
        counts: Counts,
    },
    StateHeads(StateHeads),
    State(Section),
    StateWhole {
        sections: u32,
        /// Estimate of the last pass's frames.
        frames: u64,
    },
    StateEnd {
        sections: u32,
        was_running: bool,
        counts: Counts,
    },
    Prepared(PreparedPayload),
    Late(&'a [u8]),
    Drive(DriveMessage<'a>),
    /// The byte with the descriptors is still in the stream.
    Memory(MemoryPlaces),
    /// The byte with the descriptors is still in the stream.
    Files(DeviceFileNames),
    Commit {
        token: Token,
    },
    Running {
        token: Token,
        took_us: u64,
    },
    Query {
        token: Token,
        site: Uuid,
        secret: Secret,
    },
    Join {
        token: Token,
        secret: Secret,
    },
    Connections {
        joined: u32,
    },
    Answer {
        token: Token,
        verdict: Verdict,
    },
    Ended {
        token: Token,
    },
}

impl WireMessage<'_> {
    /// Returns the message's tag.
    pub(crate) fn tag(&self) -> Tag {
        match self {
            Self::Hello { .. } => Tag::Hello,
            Self::Refused { .. } => Tag::Refused,
            Self::Abort { .. } => Tag::Abort,
            Self::Config { .. } => Tag::Config,
            Self::Ready { .. } => Tag::Ready,
            Self::PassBegin { .. } => Tag::PassBegin,
            Self::Pages { .. } => Tag::Pages,
            Self::Zero { .. } => Tag::Zero,
            Self::Frames { .. } => Tag::Frames,
            Self::Expect { .. } => Tag::Expect,
            Self::PassEnd { .. } => Tag::PassEnd,
            Self::PassAck { .. } => Tag::PassAck,
            Self::StateHeads(_) => Tag::StateHeads,
            Self::State(_) => Tag::State,
            Self::StateWhole { .. } => Tag::StateWhole,
            Self::StateEnd { .. } => Tag::StateEnd,
            Self::Prepared(_) => Tag::Prepared,
            Self::Late(_) => Tag::Late,
            Self::Drive(message) => message.tag(),
            Self::Memory(_) => Tag::Memory,
            Self::Files(_) => Tag::Files,
            Self::Commit { .. } => Tag::Commit,
            Self::Running { .. } => Tag::Running,
            Self::Query { .. } => Tag::Query,
            Self::Join { .. } => Tag::Join,
            Self::Connections { .. } => Tag::Connections,
            Self::Packed { .. } => Tag::Packed,
            Self::Verify => Tag::Verify,
            Self::Digest(_) => Tag::Digest,
            Self::Answer { .. } => Tag::Answer,
            Self::Ended { .. } => Tag::Ended,
        }
    }

    /// Returns the error of this message out of order.
    pub(crate) fn unexpected(&self, expected: &'static str) -> WireError {
        WireError::unexpected(self.tag(), expected)
    }
}
