//! Bounds of what a peer may send: nothing is allocated for more.

// What can be stored can be sent: the bounds of a guest are the store's.
pub(crate) use driftline_format::{MAX_CONFIG, MAX_SECTION, MAX_SECTIONS, MAX_SLOTS, MAX_STATE};
pub(crate) use driftline_guest::MAX_LATE;

/// Most bytes of a text: a reason, a program's version.
pub(crate) const MAX_TEXT: usize = 1024;
/// Most frames in one PAGES or FRAMES: 1 MiB of content.
pub(crate) const MAX_PAGES: u64 = 256;
/// What stands before the content in FRAMES: its run.
pub(crate) const FRAMES_HEAD: u32 = 16;
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
/// Most drives that go along.
pub(crate) const MAX_DRIVES: u32 = 64;
/// Most bytes of a drive's name.
pub(crate) const MAX_DRIVE_ID: usize = 64;
