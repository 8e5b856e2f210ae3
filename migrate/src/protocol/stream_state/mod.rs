//! The order and the bounds of messages at a receiver, without I/O.
//!
//! ```text
//!            PASS_BEGIN                         STATE
//! Between ----------------> InPass   Between ----------> State --STATE_END--> Complete
//!    ^                      |  ^ |                        ^ |
//!    +------ PASS_END ------+  +-+ content, ZERO          +-+ STATE
//! ```
//!
//! A guest without state sections goes from Between to Complete. EXPECT, CONNECTIONS and, once,
//! STATE_HEADS are allowed in Between before pass 0, and VERIFY once in Between after a pass.
//! Content is PAGES, PACKED, FRAMES, and the blocks of copied disks.
//!
//! The state may precede the last pass: STATE_WHOLE leads from State to Whole, and PASS_BEGIN from
//! either to InPass. PASS_END then leads to Last, where only STATE_END is allowed.
//!
//! A joined channel is always in Between or InPass, because it carries only shares of passes.
//!
//! Every run is checked against the guest's layout, and every count against the peer's, before it
//! is used. The receiver, the tools and the fuzzer share this code.

mod drives;

use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, Layout, PAGE_SIZE};
use driftline_guest::{DriveHead, Section};

use crate::protocol::codec::Codec;
use crate::protocol::error::{WireError, at_most, same};
use crate::protocol::limits::{
    MAX_CONNECTIONS, MAX_EMPTY_PASSES, MAX_EXPECTED, MAX_PASSES, MAX_SECTIONS, MAX_STATE,
};
use crate::protocol::message::{Counts, RunTable, StateHeads, WireMessage};
use crate::protocol::tag::Tag;
pub(crate) use drives::DriveStep;
use drives::DriveStreamState;

/// A receiver's state in one stream.
#[derive(Debug)]
pub(crate) struct StreamState {
    layout: Layout,
    drives: DriveStreamState,
    /// Whether this is a joined channel, which carries only a share of each pass.
    is_joined: bool,
    /// Whether this side has the source's memory itself, so that no frame may arrive.
    is_shared: bool,
    /// Whether the heads of the state have arrived.
    has_heads: bool,
    /// Whether a digest was requested. That is allowed once, because a digest takes time.
    verified: bool,
    position: StreamPosition,
    /// Number of complete passes.
    passes: u32,
    /// Frames that EXPECT has announced.
    expected: u64,
    /// Runs that EXPECT has announced.
    expected_runs: usize,
    /// Number of passes with neither a frame nor a block.
    empty_passes: u32,
    totals: Counts,
    sections: Vec<Section>,
    /// The state, if it preceded the last pass.
    early: Option<Arc<[Section]>>,
    state_bytes: u64,
}

#[derive(Debug)]
enum StreamPosition {
    Between,
    /// `others` counts frames that arrived over other channels.
    InPass {
        frames: u64,
        counts: Counts,
        others: Counts,
    },
    State,
    /// The state has arrived, and the last pass has not begun.
    Whole,
    Last,
    Complete,
}

/// The action for a message.
#[derive(Debug)]
pub(crate) enum StreamStep<'a> {
    /// None; the message has changed the state.
    Noted,
    /// Write the contents to these frames, in order.
    Place { runs: RunTable<'a>, contents: &'a [u8] },
    /// Decompress the contents, and write them to these frames.
    Unpack { codec: Codec, runs: RunTable<'a>, packed: &'a [u8] },
    /// Send the digest of memory.
    Digest,
    /// Read the content of these frames straight into memory.
    Fetch { run: FrameRun },
    /// Make these frames zero.
    Zero { runs: RunTable<'a> },
    /// Prefault these frames.
    Prefault { runs: RunTable<'a> },
    /// Collect this number of channels.
    Join { joined: u32 },
    /// Refuse the source if the guest cannot have a state of these sections.
    CheckState { heads: StateHeads },
    /// Handle a message about copied disks.
    Drive(DriveStep<'a>),
    /// Acknowledge the pass.
    Ack { pass: u32, counts: Counts },
    /// Restore this state. The last pass follows, with about this number of frames.
    Restore { sections: Arc<[Section]>, frames: u64 },
    /// The guest is complete.
    Complete { sections: Arc<[Section]>, was_running: bool },
}

impl StreamState {
    /// Returns the state of a first channel, with `drives` copied.
    pub(crate) fn new(layout: Layout, drives: Vec<DriveHead>) -> Self {
        let (position, totals, sections) = (StreamPosition::Between, Counts::default(), Vec::new());
        Self {
            layout,
            drives: DriveStreamState::new(drives),
            is_joined: false,
            is_shared: false,
            has_heads: false,
            verified: false,
            position,
            passes: 0,
            expected: 0,
            expected_runs: 0,
            empty_passes: 0,
            totals,
            sections,
            early: None,
            state_bytes: 0,
        }
    }

    /// Returns the state of a joined channel.
    pub(crate) fn joined(layout: Layout) -> Self {
        Self { is_joined: true, ..Self::new(layout, Vec::new()) }
    }

    /// Makes this the state of a stream whose memory came by descriptors. The guest may be running
    /// in that memory, so none of it may be written or made.
    pub(crate) fn with_shared_memory(self) -> Self {
        Self { is_shared: true, ..self }
    }

    /// Returns the most frames that one pass may have.
    fn most_frames(&self) -> u64 {
        if self.is_shared { 0 } else { self.layout.frames() }
    }

    /// Whether a pass is in progress.
    pub(crate) fn is_in_pass(&self) -> bool {
        matches!(self.position, StreamPosition::InPass { .. })
    }

    /// Returns the number of the current or next pass, and the frames that it still has here.
    pub(crate) fn progress(&self) -> (u32, u64) {
        let left = match self.position {
            StreamPosition::InPass { frames, counts, .. } => left(frames, &counts),
            _ => 0,
        };
        (self.passes, left)
    }

    /// Adds the frames that other channels have received in the current pass.
    pub(crate) fn count_others(&mut self, counts: Counts) {
        if let StreamPosition::InPass { others, .. } = &mut self.position {
            *others += counts;
        }
    }

    /// Returns the number of complete passes.
    pub(crate) fn passes(&self) -> u32 {
        self.passes
    }

    /// Returns the frames of all complete passes.
    pub(crate) fn totals(&self) -> Counts {
        self.totals
    }

    /// Returns the blocks of disks of all complete passes.
    pub(crate) fn drive_totals(&self) -> Counts {
        self.drives.totals()
    }

    /// Returns the bytes of memory, disks and state received so far, including zeros.
    pub(crate) fn moved_bytes(&self) -> u64 {
        let pass = match self.position {
            StreamPosition::InPass { counts, .. } => counts,
            _ => Counts::default(),
        };
        // No overflow: passes are bounded, and so are the frames of each.
        let frames = [self.totals, pass].iter().map(|c| c.normal + c.zero).sum::<u64>();
        let rest = self.state_bytes.saturating_add(self.drives.moved_bytes());
        frames.saturating_mul(PAGE_SIZE).saturating_add(rest)
    }

    /// Processes the next message.
    pub(crate) fn on<'a>(&mut self, message: WireMessage<'a>) -> Result<StreamStep<'a>, WireError> {
        use StreamPosition as P;
        use WireMessage as M;
        let is_joined = self.is_joined;
        match (&mut self.position, message) {
            (P::Between | P::State | P::Whole, M::PassBegin { pass, frames }) => {
                self.begin_pass(pass, frames)
            }
            (P::State, M::StateWhole { sections: announced, frames }) => {
                same("state sections", announced.into(), self.sections.len() as u64)?;
                self.position = P::Whole;
                Ok(self.restore(frames))
            }
            (P::Between, M::Connections { joined })
                if self.passes == 0 && !is_joined && !self.is_shared =>
            {
                at_most("connections", u64::from(joined) + 1, MAX_CONNECTIONS.into())?;
                Ok(StreamStep::Join { joined })
            }
            (P::Between, M::Expect { runs }) if self.passes == 0 && !is_joined => self.expect(runs),
            (P::Between, M::StateHeads(heads))
                if self.passes == 0 && !is_joined && !self.has_heads =>
            {
                self.has_heads = true;
                Ok(StreamStep::CheckState { heads })
            }
            (P::Between, M::Verify) if self.passes > 0 && !is_joined && !self.verified => {
                self.verified = true;
                Ok(StreamStep::Digest)
            }
            (P::InPass { frames, counts, others }, M::PassEnd { pass, counts: theirs }) => {
                let (frames, mut counts) = (*frames, *counts);
                counts += *others;
                self.end_pass(frames, counts, pass, theirs)
            }
            (P::InPass { .. }, M::Drive(message)) => {
                Ok(StreamStep::Drive(self.drives.on(self.passes, message)?))
            }
            (P::InPass { frames, counts, .. }, content) => {
                content_of_pass(&self.layout, *frames, counts, content)
            }
            (P::Between | P::State, M::State(section)) if !is_joined => self.add_section(section),
            (P::Between | P::State | P::Last, M::StateEnd { sections, was_running, counts })
                if !is_joined =>
            {
                self.complete(sections, was_running, counts)
            }
            (position, other) => Err(other.unexpected(position.expects())),
        }
    }

    /// Counts frames that pass 0 will send.
    fn expect<'a>(&mut self, runs: RunTable<'a>) -> Result<StreamStep<'a>, WireError> {
        let left = self.most_frames() - self.expected;
        self.expected += checked(&self.layout, Tag::Expect, runs.iter(), left)?;
        self.expected_runs += runs.len();
        at_most("expected runs", self.expected_runs as u64, MAX_EXPECTED as u64)?;
        Ok(StreamStep::Prefault { runs })
    }

    /// Begins a pass. If STATE has arrived it is the last pass, and if STATE_WHOLE has not, this
    /// message also marks the end of the state.
    fn begin_pass<'a>(&mut self, pass: u32, frames: u64) -> Result<StreamStep<'a>, WireError> {
        let early = matches!(self.position, StreamPosition::State);
        same("the number of the pass", pass.into(), self.passes.into())?;
        at_most("passes", u64::from(pass) + 1, MAX_PASSES.into())?;
        if self.drives.are_none() {
            self.note_pass(frames)?;
        }
        at_most("frames in a pass", frames, self.most_frames())?;
        let (counts, others) = (Counts::default(), Counts::default());
        self.position = StreamPosition::InPass { frames, counts, others };
        Ok(if early { self.restore(frames) } else { StreamStep::Noted })
    }

    /// Ends a pass that has announced `frames` frames and in which `counts` have arrived.
    fn end_pass<'a>(
        &mut self,
        frames: u64,
        counts: Counts,
        pass: u32,
        theirs: Counts,
    ) -> Result<StreamStep<'a>, WireError> {
        let blocks = self.drives.end_pass()?;
        if !self.drives.are_none() {
            self.note_pass(frames.saturating_add(blocks))?;
        }
        same("the number of the pass", pass.into(), self.passes.into())?;
        same("the pass's frames with content", theirs.normal, counts.normal)?;
        same("the pass's zero frames", theirs.zero, counts.zero)?;
        if !self.is_joined {
            same("the pass's frames", frames, counts.normal + counts.zero)?;
        }
        self.totals += counts;
        self.passes += 1;
        self.position =
            if self.early.is_some() { StreamPosition::Last } else { StreamPosition::Between };
        Ok(StreamStep::Ack { pass, counts })
    }

    /// Adds a section of the state.
    fn add_section<'a>(&mut self, section: Section) -> Result<StreamStep<'a>, WireError> {
        self.position = StreamPosition::State;
        self.state_bytes += section.bytes.len() as u64;
        at_most("state sections", self.sections.len() as u64 + 1, MAX_SECTIONS.into())?;
        at_most("bytes of state", self.state_bytes, MAX_STATE)?;
        self.sections.push(section);
        Ok(StreamStep::Noted)
    }

    /// Ends a state that precedes the last pass.
    fn restore(&mut self, frames: u64) -> StreamStep<'static> {
        let sections: Arc<[Section]> = std::mem::take(&mut self.sections).into();
        self.early = Some(sections.clone());
        StreamStep::Restore { sections, frames }
    }

    /// Ends the stream. The source has sent `announced` sections, and `counts` frames in total.
    fn complete<'a>(
        &mut self,
        announced: u32,
        was_running: bool,
        counts: Counts,
    ) -> Result<StreamStep<'a>, WireError> {
        let late = || std::mem::take(&mut self.sections).into();
        let sections = self.early.take().unwrap_or_else(late);
        same("state sections", announced.into(), sections.len() as u64)?;
        same("all frames with content", counts.normal, self.totals.normal)?;
        same("all zero frames", counts.zero, self.totals.zero)?;
        self.position = StreamPosition::Complete;
        Ok(StreamStep::Complete { sections, was_running })
    }

    /// Bounds the number of empty passes.
    fn note_pass(&mut self, pieces: u64) -> Result<(), WireError> {
        self.empty_passes += u32::from(pieces == 0);
        at_most("empty passes", self.empty_passes.into(), MAX_EMPTY_PASSES.into())
    }
}

/// The messages that are allowed in a pass.
const IN_PASS: &str = "PAGES, PACKED, FRAMES, ZERO or PASS_END";

impl StreamPosition {
    const fn expects(&self) -> &'static str {
        match self {
            Self::Between => {
                "STATE_HEADS, EXPECT, CONNECTIONS, PASS_BEGIN, VERIFY, STATE or STATE_END"
            }
            Self::InPass { .. } => IN_PASS,
            Self::State => "STATE, STATE_WHOLE, STATE_END or PASS_BEGIN",
            Self::Whole => "PASS_BEGIN",
            Self::Last => "STATE_END",
            Self::Complete => "COMMIT",
        }
    }
}

/// Processes frames of a pass that has announced `frames` frames.
fn content_of_pass<'a>(
    layout: &Layout,
    frames: u64,
    counts: &mut Counts,
    message: WireMessage<'a>,
) -> Result<StreamStep<'a>, WireError> {
    let left = left(frames, counts);
    match message {
        WireMessage::Pages { runs, contents } => {
            counts.normal += checked(layout, Tag::Pages, runs.iter(), left)?;
            Ok(StreamStep::Place { runs, contents })
        }
        WireMessage::Packed { codec, runs, packed } => {
            counts.normal += checked(layout, Tag::Packed, runs.iter(), left)?;
            Ok(StreamStep::Unpack { codec, runs, packed })
        }
        WireMessage::Frames { run } => {
            counts.normal += checked(layout, Tag::Frames, [run].into_iter(), left)?;
            Ok(StreamStep::Fetch { run })
        }
        WireMessage::Zero { runs } => {
            counts.zero += checked(layout, Tag::Zero, runs.iter(), left)?;
            Ok(StreamStep::Zero { runs })
        }
        other => Err(other.unexpected(IN_PASS)),
    }
}

/// Returns the number of frames that the pass may still have.
fn left(announced: u64, counts: &Counts) -> u64 {
    announced - (counts.normal + counts.zero)
}

/// Checks that all `runs` are inside memory slots, and have at most `left` frames. Returns their
/// number of frames.
fn checked(
    layout: &Layout,
    message: Tag,
    runs: impl Iterator<Item = FrameRun> + Clone,
    left: u64,
) -> Result<u64, WireError> {
    let outside = |run: &FrameRun| !layout.contains(*run);
    if let Some(run) = runs.clone().find(outside) {
        return Err(WireError::Outside { message, run });
    }
    // Each run is inside a slot, but a hostile table may repeat frames.
    let frames = runs.fold(0u64, |n, r| n.saturating_add(r.count));
    let what = match message {
        Tag::Expect => "expected frames in the rest of memory",
        _ => "frames in the rest of the pass",
    };
    at_most(what, frames, left)?;
    Ok(frames)
}

#[cfg(test)]
mod tests;
