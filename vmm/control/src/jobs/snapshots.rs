//! Snapshots in two files.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_checkpoint::{
    SnapshotError, SnapshotFile, SnapshotKind, SnapshotReport, SnapshotRequest,
    create_live_snapshot, create_snapshot,
};
use driftline_dirty_tracker::Subscription;
use driftline_guest::{GuestError, Section};
use driftline_machine::sandbox::{self, NotAllowed};
use driftline_machine::vm::{SharedVm, Vm};
use driftline_store::StoreError;
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::pause_control::{JobRole, OperatorError, PauseControl};

/// Limit on making the guest's writes to its drives durable.
const FLUSH_LIMIT: Duration = Duration::from_secs(60);

/// What snapshots of a guest build on.
#[derive(Debug, Default)]
pub struct SnapshotBase {
    /// The frames written since the last snapshot, or since the guest was booted or loaded. `None`
    /// if that is not tracked: then every snapshot has all memory.
    pub changes: Option<Subscription>,
    /// Identity of the file that the guest's memory is mapped from, if any: device and inode.
    pub backing: Option<(u64, u64)>,
    /// Whether the guest was booted and has had no snapshot yet.
    pub since_boot: bool,
}

impl SnapshotBase {
    /// Returns the base of a guest that was booted and has not run yet. If `tracked`, all that was
    /// loaded into its memory counts as written.
    ///
    /// # Errors
    ///
    /// The guest's writes cannot be tracked.
    pub fn booted(vm: &SharedVm, tracked: bool) -> Result<Self, GuestError> {
        let changes = tracked.then(|| track(vm)).transpose()?;
        if tracked {
            mark_resident(&**vm)?;
        }
        Ok(Self { changes, backing: None, since_boot: true })
    }

    /// Returns the base of a guest whose memory is mapped from the file with the identity
    /// `backing`, if from any, before its state is restored.
    ///
    /// # Errors
    ///
    /// The guest's writes cannot be tracked.
    pub fn loaded(
        vm: &SharedVm,
        tracked: bool,
        backing: Option<(u64, u64)>,
    ) -> Result<Self, GuestError> {
        let changes = tracked.then(|| track(vm)).transpose()?;
        Ok(Self { changes, backing, since_boot: false })
    }
}

fn track(vm: &SharedVm) -> Result<Subscription, GuestError> {
    vm.subscribe("snapshots")
}

/// Marks all frames that have memory as written.
fn mark_resident(vm: &dyn Vm) -> Result<(), GuestError> {
    let failed = |cause: io::Error| GuestError::System {
        what: "marking what was loaded into memory",
        cause: cause.into(),
    };
    for run in vm.resident()? {
        let bytes = usize::try_from(run.bytes()).map_err(|e| failed(io::Error::other(e)))?;
        let slice = vm.ram().get_slice(GuestAddress(run.start.gpa()), bytes);
        let slice = slice.map_err(|e| failed(io::Error::other(e)))?;
        slice.bitmap().mark_dirty(0, slice.len());
    }
    Ok(())
}

/// A snapshot that an operator asks for.
#[derive(Debug)]
pub(crate) struct SnapshotOrder<'o> {
    /// How much of memory is written.
    pub(crate) kind: SnapshotKind,
    /// The state file.
    pub(crate) state: &'o Path,
    /// The memory file.
    pub(crate) memory: &'o Path,
    /// Whether a guest that runs is accepted, and is paused only for as long as for a checkpoint.
    pub(crate) live: bool,
    /// The configuration of the API.
    pub(crate) api: Section,
}

/// Why a snapshot was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotFailure {
    /// The guest is not, or does not stay, paused.
    #[error(transparent)]
    Paused(OperatorError),
    /// The sandbox does not allow a file.
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
    /// The guest's writes to its drives cannot be made durable.
    #[error("the guest's drives cannot be made durable: {0}")]
    Flush(String),
    /// An operation on a file failed.
    #[error("{what} {}: {cause}", path.display())]
    File {
        /// The operation.
        what: &'static str,
        /// The file, or its directory.
        path: PathBuf,
        /// Whether the file is the memory file.
        is_memory: bool,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// Anything else.
    #[error(transparent)]
    Other(SnapshotError),
}

/// Takes a snapshot of the guest of `pauses`.
pub(super) fn take(
    vm: &dyn Vm,
    pauses: &Arc<PauseControl>,
    base: &mut SnapshotBase,
    order: SnapshotOrder<'_>,
) -> Result<SnapshotReport, SnapshotFailure> {
    let live = order.live && pauses.runs_for_snapshot().map_err(SnapshotFailure::Paused)?;
    let _kept = match live {
        true => None,
        false => Some(pauses.keep_paused().map_err(SnapshotFailure::Paused)?),
    };
    for path in [order.state, order.memory] {
        sandbox::check_allowed(&std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))?;
    }
    let file = |path: &Path, is_memory: bool| {
        SnapshotFile::at(path).map_err(|e| failure(e, |_| is_memory))
    };
    let request = SnapshotRequest {
        kind: order.kind,
        memory: file(order.memory, true)?,
        state: file(order.state, false)?,
        backing: base.backing,
        since_boot: base.since_boot,
        extra: vec![order.api],
    };
    let memory = request.memory.path();
    let taken = if live {
        let guest = pauses.guest_for(JobRole::Checkpoint);
        create_live_snapshot(&*guest, base.changes.as_mut(), &request)
    } else {
        // Before memory is written, so that every write that it counts as done is on the drive.
        flush(vm)?;
        create_snapshot(vm, base.changes.as_mut(), &request)
    };
    base.since_boot &= taken.is_err();
    taken.map_err(|e| failure(e, |path| path == memory))
}

/// Makes the guest's writes to its drives durable.
fn flush(vm: &dyn Vm) -> Result<(), SnapshotFailure> {
    let since = Instant::now();
    match vm.flush(FLUSH_LIMIT) {
        Ok(true) => Ok(()),
        Ok(false) if since.elapsed() < FLUSH_LIMIT => {
            Err(SnapshotFailure::Flush("the log says why".to_owned()))
        }
        Ok(false) => Err(SnapshotFailure::Flush(format!("not within {FLUSH_LIMIT:?}"))),
        Err(e) => Err(SnapshotFailure::Flush(e.to_string())),
    }
}

/// Returns the failure that `e` is. `is_memory` tells the memory file from the state file.
fn failure(e: SnapshotError, is_memory: impl Fn(&Path) -> bool) -> SnapshotFailure {
    match e {
        SnapshotError::File(StoreError::Io { what, path, cause }) => {
            let is_memory = is_memory(&path);
            SnapshotFailure::File { what, path, is_memory, cause }
        }
        other => SnapshotFailure::Other(other),
    }
}
