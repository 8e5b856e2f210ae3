//! Bounds on messages of a peer, checked before memory is allocated for them.

// The bounds of a guest are those of the store, so that every stored guest can be sent.
pub(crate) use driftline_format::{MAX_CONFIG, MAX_SECTION, MAX_SECTIONS, MAX_SLOTS, MAX_STATE};
pub(crate) use driftline_guest::MAX_QUEUED_PACKET_BYTES;

/// Upper bound on the bytes of a text: a reason, a program's version.
pub(crate) const MAX_TEXT: usize = 1024;
/// Upper bound on frames in one PAGES or FRAMES: 1 MiB of content.
pub(crate) const MAX_PAGES: u64 = 256;
/// Bytes before the content in FRAMES: its run.
pub(crate) const FRAMES_HEAD: u32 = 16;
/// Bytes at the end of MEMORY and FILES that carry their descriptors. A receiver reads them with a
/// call of their own, because the kernel closes descriptors that come with any other read.
pub(crate) const DESCRIPTOR_BYTE: u32 = 1;
/// Upper bound on the descriptors of MEMORY.
pub(crate) const MAX_DESCRIPTORS: u32 = 16;
/// Upper bound on runs in one ZERO.
pub(crate) const MAX_ZERO_RUNS: u32 = 4096;
/// Upper bound on runs in one EXPECT.
pub(crate) const MAX_EXPECTED_RUNS: u32 = 4096;
/// Upper bound on runs in all EXPECTs. Other frames are allocated when they arrive.
pub(crate) const MAX_EXPECTED: usize = 64 << 10;
/// Upper bound on passes, including the last one.
pub(crate) const MAX_PASSES: u32 = 4096;
/// Upper bound on passes without a frame.
pub(crate) const MAX_EMPTY_PASSES: u32 = 16;
/// Upper bound on the connections of one migration.
pub const MAX_CONNECTIONS: u32 = 16;
/// Upper bound on copied disks.
pub(crate) const MAX_DRIVES: u32 = 64;
/// Upper bound on the bytes of a disk's name.
pub(crate) const MAX_DRIVE_ID: usize = 64;
