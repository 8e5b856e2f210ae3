//! What an epoch says of itself.

use driftline_guest::{LineId, Origin, VmId};
use serde::Serialize;

/// One stored epoch, as it describes itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct EpochInfo {
    /// Its number, from 1 on, ascending in time.
    pub epoch: u64,
    /// Whose epoch it is.
    pub vm_id: VmId,
    /// The epoch that it was built on; that may have been dropped since.
    pub parent: Option<u64>,
    /// Whether it was taken of all memory.
    pub full: bool,
    /// Frames that it brought, of memory and drives, those of zeros included.
    pub frames: u64,
    /// Frames of zeros, stored without contents.
    pub zero_frames: u64,
    /// Bytes that it took: slots of its own in the page file, and its records.
    pub bytes: u64,
    /// Drives that it has, whose blocks are among the frames.
    pub drives: u32,
    /// When it was begun: milliseconds since 1970, by the host's clock.
    pub created_unix_ms: u64,
    /// The line of the guest that took it.
    pub line: LineId,
}

impl EpochInfo {
    /// What tells it from all others.
    pub fn origin(&self) -> Origin {
        let Self { vm_id, epoch, created_unix_ms, line, .. } = *self;
        Origin { vm_id, epoch, created_unix_ms, line }
    }
}
