//! Snapshots against a plain model of memory, on a file system; and on disks that fail and crash.

mod faults;
mod files;
mod live;
mod model;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use driftline_dirty_tracker::{Gfn, Subscription};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_guest::{
    Clock, GuestContents, GuestFactory, GuestIdentity, PAGE_BYTES, Stateful, VmId,
};
use vm_memory::{Bytes, GuestAddress};

use crate::flat::{
    SnapshotError, SnapshotFile, SnapshotKind, SnapshotReport, SnapshotRequest,
    create_live_snapshot, create_snapshot, open_snapshot,
};

/// Returns a paused guest that only the test writes to: two slots of these numbers of frames, with
/// a hole between them.
fn still(frames: [u64; 2]) -> Arc<MemoryGuest> {
    MemoryGuest::new(VmId::random(), MemoryConfig::still_of(frames)).unwrap()
}

/// Returns the frame at page `n` of the memory file.
fn nth(guest: &MemoryGuest, n: u64) -> Gfn {
    let first = guest.layout().slots().next().unwrap().frames;
    if n < first { Gfn(n) } else { Gfn(0x1000 + n - first) }
}

/// Fills page `n` of the memory file with `byte`.
fn fill(guest: &MemoryGuest, n: u64, byte: u8) {
    guest.write(nth(guest, n), &[byte; PAGE_BYTES]).unwrap();
}

/// Takes a snapshot; if `live`, as of a guest that may run.
fn snapshot_of(
    guest: &MemoryGuest,
    live: bool,
    changes: Option<&mut Subscription>,
    request: &SnapshotRequest,
) -> Result<SnapshotReport, SnapshotError> {
    match live {
        true => create_live_snapshot(guest, changes, request),
        false => create_snapshot(guest, changes, request),
    }
}

/// Returns a request for a snapshot in the files `memory` and `state` of `dir`.
fn request(dir: &Path, kind: SnapshotKind) -> SnapshotRequest {
    let at = |name: &str| SnapshotFile::at(&dir.join(name)).unwrap();
    SnapshotRequest {
        kind,
        memory: at("memory"),
        state: at("state"),
        backing: None,
        since_boot: false,
        extra: Vec::new(),
    }
}

/// Returns the guest of the state file in `dir`, with the memory file `memory`.
fn loaded(dir: &Path, memory: &str) -> Arc<MemoryGuest> {
    let opened = open_snapshot(&dir.join("state"), &dir.join(memory)).unwrap();
    let copy = MemoryGuestFactory::default();
    let copy = copy.create(opened.state.vm_id, &opened.state.config).unwrap();
    assert_eq!(*copy.layout(), opened.state.layout);
    let memory = fs::read(dir.join(memory)).unwrap();
    for place in opened.layout.slots() {
        let run = place.slot.run();
        let from = &memory[place.offset as usize..][..run.bytes() as usize];
        copy.ram().write_slice(from, GuestAddress(run.start.gpa())).unwrap();
    }
    copy.restore_state(&opened.state.sections, Clock::Continue).unwrap();
    copy
}
