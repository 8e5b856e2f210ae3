//! Tags of messages: numbers, names, and upper bounds on lengths.

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::{MAX_DEVICE_FILES, MAX_FILE_NAME, MAX_SECTION_NAME};

use super::ids::SECRET_BYTES;
use super::limits::{
    DESCRIPTOR_BYTE, FRAMES_HEAD, MAX_CONFIG, MAX_DRIVE_ID, MAX_DRIVES, MAX_EXPECTED_RUNS,
    MAX_PAGES, MAX_QUEUED_PACKET_BYTES, MAX_SECTION, MAX_SECTIONS, MAX_SLOTS, MAX_TEXT,
    MAX_ZERO_RUNS,
};

/// The number that names a message on the wire. Numbers are never reused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Tag {
    /// Both: introduction.
    Hello = 1,
    /// Destination: refusal; nothing was begun.
    Refused = 2,
    /// Either: the migration ends, with the reason.
    Abort = 3,
    /// Source: description of the machine.
    Config = 4,
    /// Destination: the machine is built, paused and zeroed.
    Ready = 5,
    /// Source: a pass begins.
    PassBegin = 6,
    /// Source: frames with content.
    Pages = 7,
    /// Source: frames of zeros.
    Zero = 8,
    /// Source: a pass ends.
    PassEnd = 9,
    /// Destination: everything of the pass is in place.
    PassAck = 10,
    /// Source: one state section.
    State = 11,
    /// Source: end of the state.
    StateEnd = 12,
    /// Destination: the guest is restored and paused.
    Prepared = 13,
    /// Source: the destination may run the guest.
    Commit = 14,
    /// Destination: the guest was taken over.
    Running = 15,
    /// Source, on a connection of its own: question about a migration.
    Query = 16,
    /// Destination: answer to a question.
    Answer = 17,
    /// Source: the outcome is known here, and the destination may remove its records.
    Ended = 18,
    /// Source: frames that pass 0 will send, to be preallocated.
    Expect = 19,
    /// Source: the guest is detached here; packets that arrived since its state was saved.
    Late = 20,
    /// Source: a run of frames straight from guest memory, without a checksum of the content.
    Frames = 21,
    /// Source: frames with compressed content.
    Packed = 22,
    /// Source, on an additional connection: the migration that it joins.
    Join = 23,
    /// Source, before CONFIG: the disks that are copied.
    Drives = 24,
    /// Source: blocks of a disk, with content.
    Blocks = 25,
    /// Source: blocks of a disk, of zeros.
    BlockZeros = 26,
    /// Source: end of the disks' part of a pass.
    BlocksEnd = 27,
    /// Source: number of connections that have joined.
    Connections = 28,
    /// Source: request for a digest of memory.
    Verify = 29,
    /// Destination: digest of memory.
    Digest = 30,
    /// Source: end of a state that precedes the last pass.
    StateWhole = 31,
    /// Source, before CONFIG: the guest's memory itself, by descriptors.
    Memory = 32,
    /// Source, after MEMORY: the open files of the guest's devices, by descriptors.
    Files = 33,
    /// Source, before pass 0: the sections that the state will have.
    StateHeads = 34,
}

impl Tag {
    const ALL: [Tag; 34] = [
        Tag::Hello,
        Tag::Refused,
        Tag::Abort,
        Tag::Config,
        Tag::Ready,
        Tag::PassBegin,
        Tag::Pages,
        Tag::Zero,
        Tag::PassEnd,
        Tag::PassAck,
        Tag::State,
        Tag::StateEnd,
        Tag::Prepared,
        Tag::Commit,
        Tag::Running,
        Tag::Query,
        Tag::Answer,
        Tag::Ended,
        Tag::Expect,
        Tag::Late,
        Tag::Frames,
        Tag::Join,
        Tag::Connections,
        Tag::Packed,
        Tag::Verify,
        Tag::Digest,
        Tag::Drives,
        Tag::Blocks,
        Tag::BlockZeros,
        Tag::BlocksEnd,
        Tag::StateWhole,
        Tag::Memory,
        Tag::Files,
        Tag::StateHeads,
    ];

    /// Returns the tag with this number, if this version has it.
    pub fn from_number(n: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|t| *t as u16 == n)
    }

    /// Returns the name in PROTOCOL.md.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hello => "HELLO",
            Self::Refused => "REFUSED",
            Self::Abort => "ABORT",
            Self::Config => "CONFIG",
            Self::Ready => "READY",
            Self::PassBegin => "PASS_BEGIN",
            Self::Pages => "PAGES",
            Self::Zero => "ZERO",
            Self::PassEnd => "PASS_END",
            Self::PassAck => "PASS_ACK",
            Self::State => "STATE",
            Self::StateEnd => "STATE_END",
            Self::Prepared => "PREPARED",
            Self::Commit => "COMMIT",
            Self::Running => "RUNNING",
            Self::Query => "QUERY",
            Self::Answer => "ANSWER",
            Self::Ended => "ENDED",
            Self::Expect => "EXPECT",
            Self::Late => "LATE",
            Self::Frames => "FRAMES",
            Self::Join => "JOIN",
            Self::Connections => "CONNECTIONS",
            Self::Packed => "PACKED",
            Self::Verify => "VERIFY",
            Self::Digest => "DIGEST",
            Self::Drives => "DRIVES",
            Self::Blocks => "BLOCKS",
            Self::BlockZeros => "BLOCK_ZEROS",
            Self::BlocksEnd => "BLOCKS_END",
            Self::StateWhole => "STATE_WHOLE",
            Self::Memory => "MEMORY",
            Self::Files => "FILES",
            Self::StateHeads => "STATE_HEADS",
        }
    }

    /// Returns whether the last byte of the message carries descriptors.
    pub const fn carries_descriptors(self) -> bool {
        matches!(self, Self::Memory | Self::Files)
    }

    /// Returns the upper bound on payload bytes, checked before memory is allocated for them.
    pub(crate) const fn limit(self) -> u32 {
        match self {
            Self::Hello => 16 + MAX_TEXT as u32,
            Self::Refused | Self::Abort => MAX_TEXT as u32,
            Self::Config => 24 + MAX_SLOTS * 24 + MAX_CONFIG,
            Self::Ready | Self::Join => 16 + SECRET_BYTES as u32,
            Self::PassBegin | Self::StateWhole => 16,
            Self::Pages | Self::Packed | Self::Blocks => {
                8 + MAX_PAGES as u32 * (16 + PAGE_SIZE as u32)
            }
            Self::Zero | Self::BlockZeros => 8 + MAX_ZERO_RUNS * 16,
            Self::Expect => 8 + MAX_EXPECTED_RUNS * 16,
            Self::PassEnd | Self::PassAck | Self::BlocksEnd => 24,
            Self::Drives => 8 + MAX_DRIVES * (16 + MAX_DRIVE_ID as u32),
            Self::State => 8 + MAX_SECTION,
            Self::StateEnd => 24,
            Self::StateHeads => 8 + MAX_SECTIONS * (8 + MAX_SECTION_NAME as u32),
            Self::Late => MAX_QUEUED_PACKET_BYTES as u32,
            Self::Frames => FRAMES_HEAD + MAX_PAGES as u32 * PAGE_SIZE as u32,
            Self::Prepared => 56,
            Self::Commit | Self::Ended => 16,
            Self::Connections => 8,
            Self::Verify => 0,
            Self::Digest => 16,
            Self::Running => 24,
            Self::Query => 32 + SECRET_BYTES as u32,
            Self::Answer => 24,
            Self::Memory => 8 + MAX_SLOTS * 16 + DESCRIPTOR_BYTE,
            Self::Files => {
                8 + MAX_DEVICE_FILES as u32 * (4 + MAX_FILE_NAME as u32) + DESCRIPTOR_BYTE
            }
        }
    }

    /// Returns the number of bytes of a payload of `length` bytes that its checksum covers: all,
    /// except for FRAMES, MEMORY and FILES.
    pub(crate) const fn checked(self, length: u32) -> u32 {
        match self {
            Self::Frames if length > FRAMES_HEAD => FRAMES_HEAD,
            _ if self.carries_descriptors() => length.saturating_sub(DESCRIPTOR_BYTE),
            _ => length,
        }
    }
}
