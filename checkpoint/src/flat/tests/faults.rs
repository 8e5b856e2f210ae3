//! A disk that fails or loses power at any operation: no snapshot is ever incomplete.

use std::path::Path;
use std::sync::Arc;

use driftline_dirty_tracker::Subscription;
use driftline_guest::DirtyLog;
use driftline_guest::testing::{MemoryGuest, image};
use driftline_store::testing::{DiskOp, MemoryDisk, Survives};
use driftline_store::{Backend, SnapshotState};

use super::{fill, snapshot_of, still};
use crate::flat::{SnapshotError, SnapshotFile, SnapshotKind, SnapshotReport, SnapshotRequest};

fn take(
    guest: &MemoryGuest,
    changes: &mut Subscription,
    disk: &MemoryDisk,
    (kind, live): (SnapshotKind, bool),
) -> Result<SnapshotReport, SnapshotError> {
    let file = |name: &str| SnapshotFile::with_backend(Box::new(disk.clone()), name);
    let request = SnapshotRequest {
        kind,
        memory: file("memory"),
        state: file("state"),
        backing: None,
        since_boot: false,
        extra: Vec::new(),
    };
    snapshot_of(guest, live, Some(changes), &request)
}

/// A guest with two generations of memory and state; the disk has a snapshot of the first.
struct Generations {
    guest: Arc<MemoryGuest>,
    changes: Subscription,
    disk: MemoryDisk,
    memory: [Vec<u8>; 2],
}

impl Generations {
    fn new(with_first: bool) -> Self {
        let guest = still([5, 4]);
        let mut changes = guest.subscribe("snapshots").unwrap();
        let disk = MemoryDisk::default();
        let memory = [1, 2].map(|generation: u8| {
            guest.set_extra_state(generation.into());
            fill(&guest, 0, generation);
            fill(&guest, u64::from(generation) * 3, generation);
            if with_first && generation == 1 {
                take(&guest, &mut changes, &disk, (SnapshotKind::Full, false)).unwrap();
            }
            image(&guest)
        });
        Self { guest, changes, disk: disk.copy(), memory }
    }

    /// Returns the generation of the snapshot on `disk`, after a check that both files are of it.
    fn on(&self, disk: &MemoryDisk) -> Option<usize> {
        let file = disk.open("state").ok()?;
        let state = SnapshotState::with_file(&*file, Path::new("state")).unwrap();
        let generation = state.sections[0].bytes.len();
        assert!(disk.contents("memory").unwrap() == self.memory[generation - 1]);
        Some(generation)
    }
}

/// The kinds, of a guest that its operator has paused and as of one that runs.
const KINDS: [(SnapshotKind, bool); 4] = [
    (SnapshotKind::Full, false),
    (SnapshotKind::Diff, false),
    (SnapshotKind::Full, true),
    (SnapshotKind::Diff, true),
];

/// Returns whether the disk has files of an unfinished snapshot.
fn has_leftovers(disk: &MemoryDisk) -> bool {
    disk.names().iter().any(|name| name.contains("tmp"))
}

#[test]
fn failed_operation_leaves_no_half_snapshot() {
    use DiskOp::{Create, Rename, Renamed, Sync, SyncDir, Truncate, Write};
    for kind in KINDS {
        for op in [Create, Truncate, Write, Sync, Rename, Renamed, SyncDir] {
            for with_first in [true, false] {
                (0..).take_while(|after| fails_at(kind, op, *after, with_first)).for_each(drop);
            }
        }
    }
}

/// Takes a snapshot on a disk that fails at the operation `op` that comes after `after` of them.
/// Returns whether it failed.
fn fails_at(kind: (SnapshotKind, bool), op: DiskOp, after: u32, with_first: bool) -> bool {
    use DiskOp::{Rename, Renamed, Sync, SyncDir, Truncate, Write};
    let mut all = Generations::new(with_first);
    let disk = all.disk.clone();
    disk.fail(op, libc::EIO, after);
    let taken = take(&all.guest, &mut all.changes, &disk, kind);
    disk.heal();
    let (merges, live) = (kind.0 == SnapshotKind::Diff && with_first, kind.1);
    if taken.is_ok() {
        assert!(after > 0 || merges && op == Truncate, "{op:?}");
        assert_eq!(all.on(&disk), Some(2));
        return false;
    }
    let found = all.on(&disk);
    // What a merge changes in place, and what a rename has replaced, is gone.
    let late = matches!(op, Rename | Renamed | SyncDir) && after > 0;
    let first = live && matches!(op, Sync | Write);
    let merged = merges && (after > 0 || first);
    let kept = found == with_first.then_some(1) || late || merged;
    assert!(kept, "{kind:?} {op:?} {after} {with_first}: {found:?}");
    if !with_first && op == Sync {
        assert!(disk.open("memory").is_err(), "{kind:?} {op:?} {after}: a file without a state");
    }
    assert!(!has_leftovers(&disk) || op == Rename, "{kind:?} {op:?} {after} {with_first}");
    assert_eq!(all.changes.count(), if with_first { 2 } else { 3 }, "frames are given back");
    take(&all.guest, &mut all.changes, &disk, kind).unwrap();
    assert_eq!((all.on(&disk), all.changes.count()), (Some(2), 0));
    true
}

#[test]
fn lost_power_leaves_no_half_snapshot() {
    for kind in KINDS {
        for with_first in [true, false] {
            let before = Generations::new(with_first).disk.syncs();
            for sync in before.. {
                let mut all = Generations::new(with_first);
                all.disk.stop_at_sync(sync);
                let taken = take(&all.guest, &mut all.changes, &all.disk, kind);
                let torn = (0..30).map(Survives::Torn);
                for survives in torn.chain([Survives::Nothing, Survives::Everything]) {
                    let found = all.on(&all.disk.crash(survives));
                    // Until then, either snapshot may be there, or none.
                    if taken.is_ok() {
                        assert_eq!(found, Some(2), "{kind:?} {survives:?}");
                    }
                }
                if taken.is_ok() {
                    assert!(sync > before + 3, "both files and their names are synced");
                    break;
                }
            }
        }
    }
}
