//! Opens a snapshot, for a machine that maps its memory file.

use std::fs::File;
use std::path::Path;

use driftline_format::range_lock::{self, RangeLock};
use driftline_store::{MemoryFileLayout, SnapshotState, StoreError, open_regular};

use super::error::SnapshotError;

/// A snapshot whose files are there and fit together.
#[derive(Debug)]
pub struct OpenSnapshot {
    /// All of the guest but its memory. It comes from a file, so the guest checks it, too.
    pub state: SnapshotState,
    /// The memory file, open for reading. For as long as it is open, no snapshot changes it in
    /// place: it has a lock.
    pub memory: File,
    /// Where the memory slots are in that file.
    pub layout: MemoryFileLayout,
}

/// Opens a snapshot. Reads and checks all of the state file at `state`. Does not read the memory
/// file at `memory`, which has no checksums: only its length is checked. Costs as much memory as
/// the state file has bytes, at most 16 MiB.
///
/// A caller that gets memory from elsewhere reads the state with [`SnapshotState::open`], and the
/// places of slots with [`MemoryFileLayout::new`].
///
/// # Errors
///
/// A file cannot be opened or is not a regular file, the state file is damaged, the memory file has
/// another length than the guest's memory, or a snapshot is changing it.
pub fn open_snapshot(state: &Path, memory: &Path) -> Result<OpenSnapshot, SnapshotError> {
    let state = SnapshotState::open(state)?;
    let io = |what| move |cause| StoreError::Io { what, path: memory.to_owned(), cause };
    let file = open_regular(memory).map_err(io("opening"))?;
    let layout = MemoryFileLayout::new(&state.layout);
    let (found, expected) = (file.metadata().map_err(io("reading"))?.len(), layout.bytes());
    if found != expected {
        let file = memory.to_owned();
        return Err(SnapshotError::MemoryLength { file, found, expected });
    }
    match range_lock::set(&file, 0..expected, RangeLock::Shared) {
        Ok(true) => {}
        Ok(false) => return Err(SnapshotError::InUse(memory.to_owned())),
        Err(e) => tracing::warn!("{} is not locked: {e}", memory.display()),
    }
    Ok(OpenSnapshot { state, memory: file, layout })
}
