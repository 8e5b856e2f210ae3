//! The messages of the protocol: their tags, their bounds, and their bytes in both directions.
//!
//! A message is the payload of one record (`driftline_checkpoint::format`). PROTOCOL.md draws each of them;
//! the structs here are those drawings. Decoding borrows from the receive buffer and allocates
//! nothing that a length from the peer decides, except the slots of one CONFIG (at most
//! [`MAX_SLOTS`]).

// What can be stored can be sent: the bounds of a guest are the store's.
pub(crate) use driftline_checkpoint::format::{
    MAX_CONFIG, MAX_SECTION, MAX_SECTIONS, MAX_SLOTS, MAX_STATE,
};
use driftline_checkpoint::{Section, SectionTag};
use driftline_dirty_tracker::{FrameRun, Gfn, Layout, PAGE_SIZE, Slot, SlotId};
use uuid::Uuid;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::error::WireError;
use crate::transport::compression::Codec;

mod drives;
mod raw;
mod tag;

pub(crate) use drives::{DriveMessage, MAX_DRIVES, blocks_head};
use raw::*;
pub(crate) use raw::{RawRun, packed_head, runs_head, section_head};
pub use tag::Tag;

/// Most bytes of a text: a reason, a program's version.
pub(crate) const MAX_TEXT: usize = 1024;
/// Most frames in one PAGES or FRAMES: 1 MiB of content.
pub(crate) const MAX_PAGES: u64 = 256;
/// What stands before the content in FRAMES: its run.
const FRAMES_HEAD: u32 = 16;
/// Most runs in one ZERO.
pub(crate) const MAX_ZERO_RUNS: u32 = 4096;
/// Most runs in one EXPECT.
pub(crate) const MAX_EXPECTED_RUNS: u32 = 4096;
/// Most runs in all EXPECTs: what memory has besides gets ready when it comes.
pub(crate) const MAX_EXPECTED: usize = 64 << 10;
/// Most passes, the last one included.
pub(crate) const MAX_PASSES: u32 = 4096;
/// Most passes without a frame.
pub(crate) const MAX_EMPTY_PASSES: u32 = 16;
/// Most connections of one migration.
pub const MAX_CONNECTIONS: u32 = 16;
/// A feature bit of HELLO: a migration may have more than one connection.
pub(crate) const SEVERAL_CONNECTIONS: u64 = 1;
/// A feature bit of HELLO: contents may be PACKED.
pub(crate) const PACKED_CONTENTS: u64 = 2;
/// A feature bit of HELLO: VERIFY is answered.
pub(crate) const MEMORY_DIGEST: u64 = 4;
/// A feature bit of HELLO: long runs may come as FRAMES.
pub(crate) const DIRECT_FRAMES: u64 = 8;
/// A feature bit of HELLO: a destination that makes copies of drives, by DRIVES and what follows from it.
pub(crate) const COPIES_DRIVES: u64 = 16;
/// A feature bit of HELLO: the state may come before the last pass.
pub(crate) const EARLY_STATE: u64 = 32;
/// A feature bit of HELLO: STATE_WHOLE is understood.
pub(crate) const WHOLE_STATE: u64 = 64;
/// Feature bits of HELLO that this program offers.
pub(crate) const FEATURES: u64 = SEVERAL_CONNECTIONS
    | PACKED_CONTENTS
    | MEMORY_DIGEST
    | DIRECT_FRAMES
    | COPIES_DRIVES
    | EARLY_STATE
    | WHOLE_STATE;

/// Why a connection was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// The destination's answer.
    Serve,
    /// To move a guest.
    Move,
    /// To ask what became of one.
    Query,
    /// To carry a share of a migration that another connection has begun.
    Join,
}

/// Names one migration: made by the source, unguessable, in every message that decides something.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Token(pub Uuid);

impl Token {
    /// A new one.
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// What a destination says about a token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Not settled yet: ask again.
    Undecided,
    /// The decision to run is durable, and nothing says that the guest runs yet, or still.
    Committed,
    /// The guest was taken over and has run (or stays paused, as it came) there.
    Running,
    /// The guest was thrown away, durably: it can never run there.
    Discarded,
    /// Another place, or another set of records: nothing is known here.
    Unknown,
}

impl Verdict {
    const ALL: [Verdict; 5] =
        [Self::Undecided, Self::Committed, Self::Running, Self::Discarded, Self::Unknown];
}

/// Frames with and without content.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) normal: u64,
    pub(crate) zero: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.normal += other.normal;
        self.zero += other.zero;
    }
}

/// What PREPARED says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PreparedSays {
    pub(crate) token: Token,
    pub(crate) site: Uuid,
    pub(crate) digest: u32,
    pub(crate) counts: Counts,
}

/// One message, borrowing its bulk from the receive buffer.
#[derive(Debug)]
pub(crate) enum Message<'a> {
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
    },
    PassBegin {
        pass: u32,
        frames: u64,
    },
    Pages {
        runs: Runs<'a>,
        contents: &'a [u8],
    },
    Zero {
        runs: Runs<'a>,
    },
    Packed {
        codec: Codec,
        runs: Runs<'a>,
        packed: &'a [u8],
    },
    Verify,
    Digest(u128),
    /// Its content is still in the stream.
    Frames {
        run: FrameRun,
    },
    Expect {
        runs: Runs<'a>,
    },
    PassEnd {
        pass: u32,
        counts: Counts,
    },
    PassAck {
        pass: u32,
        counts: Counts,
    },
    State(Section),
    StateWhole {
        sections: u32,
        /// That the last pass may have: a guess.
        frames: u64,
    },
    StateEnd {
        sections: u32,
        was_running: bool,
        counts: Counts,
    },
    Prepared(PreparedSays),
    Late(&'a [u8]),
    Drive(DriveMessage<'a>),
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
    },
    Join {
        token: Token,
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

/// A table of runs, as received: each is non-empty, nothing else is known of them.
#[derive(Clone, Copy)]
pub(crate) struct Runs<'a>(&'a [RawRun]);

impl std::fmt::Debug for Runs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'a> Runs<'a> {
    pub(crate) fn iter(self) -> impl Iterator<Item = FrameRun> + Clone + 'a {
        self.0.iter().map(FrameRun::from)
    }

    pub(crate) fn len(self) -> usize {
        self.0.len()
    }

    /// All frames of all runs; `None` if they overflow.
    pub(crate) fn frames(self) -> Option<u64> {
        self.iter().try_fold(0u64, |n, r| n.checked_add(r.count))
    }

    fn parse(tag: Tag, bytes: &'a [u8]) -> Result<(Self, &'a [u8]), WireError> {
        let (head, rest) = fixed::<RawRuns>(tag, bytes)?;
        let count = head.runs.get() as usize;
        let (runs, rest) = <[RawRun]>::ref_from_prefix_with_elems(rest, count)
            .map_err(|_| malformed(tag, "its table of runs is longer than the message"))?;
        let runs = Self(runs);
        if count == 0 || runs.iter().any(|r| r.count == 0) {
            return Err(malformed(tag, "it has an empty run, or none at all"));
        }
        Ok((runs, rest))
    }
}

fn malformed(message: Tag, why: &'static str) -> WireError {
    WireError::Malformed { message, why }
}

fn fixed<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    tag: Tag,
    bytes: &[u8],
) -> Result<(&T, &[u8]), WireError> {
    T::ref_from_prefix(bytes).map_err(|_| malformed(tag, "it is too short"))
}

fn exactly<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    tag: Tag,
    bytes: &[u8],
) -> Result<&T, WireError> {
    T::ref_from_bytes(bytes).map_err(|_| malformed(tag, "its length is not that of its kind"))
}

fn text(tag: Tag, bytes: &[u8]) -> Result<&str, WireError> {
    std::str::from_utf8(bytes).map_err(|_| malformed(tag, "its text is not UTF-8"))
}

fn token(bytes: [u8; 16]) -> Token {
    Token(Uuid::from_bytes(bytes))
}

impl<'a> Message<'a> {
    /// Decodes a payload whose length was bounded and whose checksum was compared.
    pub(crate) fn parse(tag: Tag, bytes: &'a [u8]) -> Result<Self, WireError> {
        Ok(match tag {
            Tag::Hello => {
                let (raw, rest) = fixed::<RawHello>(tag, bytes)?;
                let purpose = match raw.purpose {
                    0 => Purpose::Serve,
                    1 => Purpose::Move,
                    2 => Purpose::Query,
                    3 => Purpose::Join,
                    _ => return Err(malformed(tag, "its purpose is unknown")),
                };
                Self::Hello { purpose, features: raw.features.get(), version: text(tag, rest)? }
            }
            Tag::Refused => Self::Refused { reason: text(tag, bytes)? },
            Tag::Abort => Self::Abort { reason: text(tag, bytes)? },
            Tag::Config => Self::parse_config(bytes)?,
            Tag::Ready => Self::Ready { site: Uuid::from_bytes(*exactly::<[u8; 16]>(tag, bytes)?) },
            Tag::PassBegin => {
                let raw = exactly::<RawPass>(tag, bytes)?;
                Self::PassBegin { pass: raw.number.get(), frames: raw.frames.get() }
            }
            Tag::Pages => {
                let (runs, contents) = Runs::parse(tag, bytes)?;
                let frames = runs.frames().filter(|n| *n <= MAX_PAGES);
                if frames.is_none_or(|n| n * PAGE_SIZE != contents.len() as u64) {
                    return Err(malformed(tag, "its content is not as long as its runs say"));
                }
                Self::Pages { runs, contents }
            }
            Tag::Packed => {
                let codec = bytes.get(4).copied().and_then(Codec::from_number);
                let codec = codec.ok_or(malformed(tag, "its codec is unknown"))?;
                let (runs, packed) = Runs::parse(tag, bytes)?;
                if runs.frames().is_none_or(|n| n > MAX_PAGES) {
                    return Err(malformed(tag, "its runs have more frames than may be"));
                }
                Self::Packed { codec, runs, packed }
            }
            Tag::Verify => {
                exactly::<[u8; 0]>(tag, bytes)?;
                Self::Verify
            }
            Tag::Digest => Self::Digest(u128::from_le_bytes(*exactly::<[u8; 16]>(tag, bytes)?)),
            Tag::Frames => {
                let run = FrameRun::from(exactly::<RawRun>(tag, bytes)?);
                if run.count == 0 || run.count > MAX_PAGES {
                    return Err(malformed(tag, "its run is empty, or longer than may be"));
                }
                Self::Frames { run }
            }
            Tag::Zero | Tag::Expect => {
                let (runs, rest) = Runs::parse(tag, bytes)?;
                if !rest.is_empty() {
                    return Err(malformed(tag, "bytes follow its table of runs"));
                }
                match tag {
                    Tag::Zero => Self::Zero { runs },
                    _ => Self::Expect { runs },
                }
            }
            Tag::PassEnd | Tag::PassAck => {
                let raw = exactly::<RawCounts>(tag, bytes)?;
                let (pass, counts) = (raw.number.get(), raw.counts());
                match tag {
                    Tag::PassEnd => Self::PassEnd { pass, counts },
                    _ => Self::PassAck { pass, counts },
                }
            }
            Tag::State => {
                let (raw, rest) = fixed::<RawSection>(tag, bytes)?;
                Self::State(Section {
                    tag: SectionTag(raw.tag.get()),
                    instance: raw.instance.get(),
                    must_understand: raw.flags.get() & 1 != 0,
                    bytes: rest.to_vec(),
                })
            }
            Tag::StateWhole => {
                let raw = exactly::<RawPass>(tag, bytes)?;
                Self::StateWhole { sections: raw.number.get(), frames: raw.frames.get() }
            }
            Tag::StateEnd => {
                let raw = exactly::<RawCounts>(tag, bytes)?;
                Self::StateEnd {
                    sections: raw.number.get(),
                    was_running: raw.flag.get() != 0,
                    counts: raw.counts(),
                }
            }
            Tag::Prepared => {
                let raw = exactly::<RawPrepared>(tag, bytes)?;
                Self::Prepared(PreparedSays {
                    token: token(raw.token),
                    site: Uuid::from_bytes(raw.site),
                    digest: raw.digest.get(),
                    counts: Counts { normal: raw.normal.get(), zero: raw.zeros.get() },
                })
            }
            Tag::Late => Self::Late(bytes),
            Tag::Drives | Tag::Blocks | Tag::BlockZeros | Tag::BlocksEnd => {
                Self::Drive(DriveMessage::parse(tag, bytes)?)
            }
            Tag::Commit => Self::Commit { token: token(*exactly::<[u8; 16]>(tag, bytes)?) },
            Tag::Join => Self::Join { token: token(*exactly::<[u8; 16]>(tag, bytes)?) },
            Tag::Connections => {
                let raw = exactly::<RawRuns>(tag, bytes)?;
                Self::Connections { joined: raw.runs.get() }
            }
            Tag::Ended => Self::Ended { token: token(*exactly::<[u8; 16]>(tag, bytes)?) },
            Tag::Running => {
                let raw = exactly::<RawTokenAnd>(tag, bytes)?;
                Self::Running { token: token(raw.token), took_us: raw.value.get() }
            }
            Tag::Query => {
                let raw = exactly::<RawQuery>(tag, bytes)?;
                Self::Query { token: token(raw.token), site: Uuid::from_bytes(raw.site) }
            }
            Tag::Answer => {
                let raw = exactly::<RawTokenAnd>(tag, bytes)?;
                let verdict = Verdict::ALL.into_iter().find(|v| *v as u64 == raw.value.get());
                let verdict = verdict.ok_or(malformed(tag, "its verdict is unknown"))?;
                Self::Answer { token: token(raw.token), verdict }
            }
        })
    }

    fn parse_config(bytes: &'a [u8]) -> Result<Self, WireError> {
        let tag = Tag::Config;
        let (raw, rest) = fixed::<RawConfig>(tag, bytes)?;
        if raw.slots.get() > MAX_SLOTS {
            return Err(malformed(tag, "it has more memory slots than a guest may have"));
        }
        let (slots, config) =
            <[RawSlot]>::ref_from_prefix_with_elems(rest, raw.slots.get() as usize)
                .map_err(|_| malformed(tag, "its table of slots is longer than the message"))?;
        if config.len() != raw.config.get() as usize {
            return Err(malformed(tag, "its configuration is not as long as it says"));
        }
        let layout = Layout::new(slots.iter().map(|s| Slot {
            id: SlotId(s.id.get()),
            base: Gfn(s.base.get()),
            frames: s.frames.get(),
        }))?;
        Ok(Self::Config { token: token(raw.token), layout, config })
    }

    /// The message's tag.
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
            Self::State(_) => Tag::State,
            Self::StateWhole { .. } => Tag::StateWhole,
            Self::StateEnd { .. } => Tag::StateEnd,
            Self::Prepared(_) => Tag::Prepared,
            Self::Late(_) => Tag::Late,
            Self::Drive(message) => message.tag(),
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
}

/// Cuts a text to [`MAX_TEXT`] bytes, at a character.
pub(crate) fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT)]
}

/// CRC32C over the sections in order: of each its head as in STATE, its length (u32) and its bytes.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct StateDigest(u32);

impl StateDigest {
    pub(crate) fn of(sections: &[Section]) -> u32 {
        let mut digest = Self::default();
        sections.iter().for_each(|s| digest.add(s));
        digest.0
    }

    fn add(&mut self, s: &Section) {
        self.0 = crc32c::crc32c_append(self.0, &section_head(s));
        self.0 = crc32c::crc32c_append(self.0, &(s.bytes.len() as u32).to_le_bytes());
        self.0 = crc32c::crc32c_append(self.0, &s.bytes);
    }
}
