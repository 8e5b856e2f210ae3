//! The description of an epoch.

use driftline_guest::{LineId, Origin, VmId};
use serde::Serialize;

/// Description of a stored epoch, from its own records.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct EpochInfo {
    /// Number of the epoch, from 1 on, ascending in time.
    #[serde(rename = "checkpoint")]
    pub epoch: u64,
    /// Guest whose epoch it is.
    pub vm_id: VmId,
    /// Epoch that it was built on, which may have been dropped since.
    pub parent: Option<u64>,
    /// Whether the epoch is full, that is, taken of all memory.
    pub full: bool,
    /// Number of frames that it brought, of memory and drives, including frames of zeros.
    pub frames: u64,
    /// Number of frames of zeros, which are stored without contents.
    pub zero_frames: u64,
    /// Number of bytes that it took: its own slots in the page file, and its records.
    pub bytes: u64,
    /// Number of drives that it has, whose blocks are among the frames.
    pub drives: u32,
    /// Time at which it was begun, in milliseconds since 1970 by the host's clock.
    pub created_unix_ms: u64,
    /// Line of the guest that took it.
    pub line: LineId,
}

impl EpochInfo {
    /// Returns what identifies the epoch among all others.
    pub fn origin(&self) -> Origin {
        let Self { vm_id, epoch, created_unix_ms, line, .. } = *self;
        Origin { vm_id, epoch, created_unix_ms, line }
    }
}
