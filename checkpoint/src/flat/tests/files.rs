//! Which files a snapshot accepts, and which guests.

use std::env;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use driftline_guest::testing::{MemoryConfig, MemoryGuest, Op, image};
use driftline_guest::{
    DirtyLog, GuestContents, GuestError, GuestIdentity, Lifecycle, PAGE_BYTES, RunState,
    SavedPause, Stateful, VcpuPauses,
};
use driftline_store::{Damage, StoreError};

use super::{fill, loaded, request, snapshot_of, still};
use crate::flat::{
    SnapshotError, SnapshotFile, SnapshotKind, SnapshotRequest, create_snapshot, open_snapshot,
};

#[test]
fn loaded_snapshot_is_the_guest() {
    let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
    guest.wait_for_writes(500);
    guest.pause().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let report = create_snapshot(&*guest, None, &request(dir.path(), SnapshotKind::Full)).unwrap();
    assert_eq!(guest.run_state(), RunState::Paused);
    assert_eq!(report.memory_bytes, fs::metadata(dir.path().join("memory")).unwrap().len());
    let copy = loaded(dir.path(), "memory");
    copy.verify().unwrap();
    assert_eq!((copy.vm_id(), copy.writes()), (guest.vm_id(), guest.writes()));
}

#[test]
fn guest_that_is_not_paused_is_refused() {
    let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
    let mut changes = guest.subscribe("snapshots").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let request = request(dir.path(), SnapshotKind::Full);
    let e = create_snapshot(&*guest, Some(&mut changes), &request).unwrap_err();
    assert!(matches!(e, SnapshotError::NotPaused(RunState::Running)), "{e}");
    assert_eq!(guest.run_state(), RunState::Running);
    guest.stop("done");
    let e = create_snapshot(&*guest, Some(&mut changes), &request).unwrap_err();
    assert!(matches!(e, SnapshotError::NotPaused(RunState::Stopped)), "{e}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// A guest whose vCPUs say after some calls that they were resumed and paused again.
struct Resumed {
    guest: Arc<MemoryGuest>,
    after: u64,
    calls: AtomicU64,
}

driftline_guest::delegate!(
    Resumed as this => *this.guest; GuestIdentity, GuestContents, DirtyLog, Stateful
);

impl Lifecycle for Resumed {
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }

    fn pause(&self) -> Result<RunState, GuestError> {
        self.guest.pause()
    }

    fn pause_and_save(&self) -> Result<SavedPause, GuestError> {
        self.guest.pause_and_save()
    }

    fn resume(&self) -> Result<(), GuestError> {
        self.guest.resume()
    }

    fn stop(&self, why: &str) {
        self.guest.stop(why);
    }

    fn vcpu_pauses(&self) -> Vec<VcpuPauses> {
        let ended = u64::from(self.calls.fetch_add(1, Relaxed) >= self.after);
        vec![VcpuPauses { pauses: ended, ..VcpuPauses::default() }]
    }
}

#[test]
fn guest_resumed_meanwhile_has_no_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let guest = still([8, 8]);
    let mut changes = guest.subscribe("snapshots").unwrap();
    fill(&guest, 3, 1);
    for (after, refused) in [(1, true), (2, true), (3, false)] {
        let view = Resumed { guest: guest.clone(), after, calls: AtomicU64::new(0) };
        let request = request(dir.path(), SnapshotKind::Full);
        match create_snapshot(&view, Some(&mut changes), &request) {
            Ok(_) => assert!(!refused),
            Err(e) => {
                assert!(matches!(e, SnapshotError::Resumed), "{e}");
                assert_eq!((refused, changes.count()), (true, 1));
                assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
            }
        }
    }
}

#[test]
fn failed_guest_operation_gives_frames_back() {
    let guest = still([8, 8]);
    let mut changes = guest.subscribe("snapshots").unwrap();
    fill(&guest, 3, 1);
    let dir = tempfile::tempdir().unwrap();
    for (op, kind) in [
        (Op::Pause, SnapshotKind::Full),
        (Op::Save, SnapshotKind::Diff),
        (Op::Collect, SnapshotKind::Diff),
        (Op::Populated, SnapshotKind::Full),
    ] {
        for live in [false, true] {
            guest.faults().fail_next(op, 1);
            let request = request(dir.path(), kind);
            let e = snapshot_of(&guest, live, Some(&mut changes), &request).unwrap_err();
            assert!(matches!(e, SnapshotError::Guest(_)), "{op:?}: {e}");
            assert_eq!(changes.count(), 1, "{op:?}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{op:?}");
        }
    }
    // More than a state file holds.
    guest.set_extra_state(4 << 20 | 1);
    let e = create_snapshot(&*guest, Some(&mut changes), &request(dir.path(), SnapshotKind::Diff));
    let e = e.unwrap_err();
    assert!(matches!(e, SnapshotError::File(StoreError::SnapshotState(_))), "{e}");
    assert_eq!(changes.count(), 1);
}

#[test]
fn backing_file_is_replaced_and_never_changed() {
    let guest = still([8, 8]);
    let mut changes = guest.subscribe("snapshots").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memory");
    fill(&guest, 1, 1);
    create_snapshot(&*guest, Some(&mut changes), &request(dir.path(), SnapshotKind::Full)).unwrap();
    let (mapped, before) = (fs::File::open(&path).unwrap(), image(&guest));
    let found = mapped.metadata().unwrap();
    fill(&guest, 2, 2);
    let backing = Some((found.dev(), found.ino()));
    let request = SnapshotRequest { backing, ..request(dir.path(), SnapshotKind::Diff) };
    let report = create_snapshot(&*guest, Some(&mut changes), &request).unwrap();
    assert!(!report.merged);
    assert!(fs::read(&path).unwrap() == image(&guest));
    let mut old = vec![0; before.len()];
    std::os::unix::fs::FileExt::read_exact_at(&mapped, &mut old, 0).unwrap();
    assert!(old == before, "guests that are mapped from it see no change");
}

#[test]
fn file_of_another_length_is_replaced() {
    let guest = still([8, 8]);
    let dir = tempfile::tempdir().unwrap();
    fill(&guest, 9, 5);
    for length in [0, 1, 16 * PAGE_BYTES - 1, 16 * PAGE_BYTES + 1] {
        fs::write(dir.path().join("memory"), vec![7; length]).unwrap();
        let request = request(dir.path(), SnapshotKind::Diff);
        let report = create_snapshot(&*guest, None, &request).unwrap();
        assert_eq!((report.merged, report.frames), (false, 1));
        assert!(fs::read(dir.path().join("memory")).unwrap() == image(&guest));
    }
}

#[test]
fn names_of_no_regular_file_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |path: &Path, why: &str| {
        let e = SnapshotFile::at(path).unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
    };
    refused(
        Path::new("/dev/null"),
        "/dev/null cannot be a file of a snapshot: it is not a regular",
    );
    refused(dir.path(), "it is not a regular file");
    refused(&dir.path().join(".."), "it has no file name");
    refused(&dir.path().join("none/memory"), "opening");
    symlink("/dev/null", dir.path().join("link")).unwrap();
    refused(&dir.path().join("link"), "/dev/null");
    let at = |name: &str| SnapshotFile::at(&dir.path().join(name)).unwrap();
    let same = SnapshotRequest {
        kind: SnapshotKind::Full,
        memory: at("one"),
        state: at("one"),
        backing: None,
        since_boot: false,
        extra: Vec::new(),
    };
    let e = create_snapshot(&*still([8, 8]), None, &same).unwrap_err();
    assert!(matches!(e, SnapshotError::SameFile(_)), "{e}");
}

#[test]
fn directory_that_cannot_be_written_is_named() {
    let (guest, dir) = (still([8, 8]), tempfile::tempdir().unwrap());
    let request = request(dir.path(), SnapshotKind::Full);
    // A directory in which no user can create a file.
    let memory = SnapshotFile::at(Path::new("/sys/memory")).unwrap();
    let refused = SnapshotRequest { memory, ..request };
    let e = create_snapshot(&*guest, None, &refused).unwrap_err().to_string();
    assert!(e.starts_with("creating /sys/memory failed: "), "{e}");
    assert!(e.contains("the file is created in /sys under another name"), "{e}");
    assert!(e.ends_with("make that directory writable, or name a file in another one"), "{e}");
}

#[test]
fn two_spellings_of_one_file_are_refused() {
    let (guest, dir) = (still([8, 8]), tempfile::tempdir().unwrap());
    let (at, memory) = (|name: &str| dir.path().join(name), dir.path().join("memory"));
    fs::create_dir(at("sub")).unwrap();
    symlink(".", at("here")).unwrap();
    let up: PathBuf = env::current_dir().unwrap().components().skip(1).map(|_| "..").collect();
    let relative = up.join(memory.strip_prefix("/").unwrap());
    let refused = |spelled: &Path| {
        for (memory, state) in [(&*memory, spelled), (spelled, &*memory)] {
            let file = |path: &Path| SnapshotFile::at(path).unwrap();
            let request = request(dir.path(), SnapshotKind::Full);
            let same = SnapshotRequest { memory: file(memory), state: file(state), ..request };
            for live in [false, true] {
                let e = snapshot_of(&guest, live, None, &same).unwrap_err();
                assert!(matches!(e, SnapshotError::SameFile(_)), "{}: {e}", spelled.display());
            }
        }
    };
    let spellings = [relative, at("sub/../memory"), at("here/memory")];
    spellings.iter().for_each(|path| refused(path));
    fs::write(&memory, "earlier").unwrap();
    symlink("memory", at("state")).unwrap();
    spellings.iter().chain([&at("state")]).for_each(|path| refused(path));
    assert_eq!(fs::read(&memory).unwrap(), b"earlier");
}

#[test]
fn loaded_guests_memory_is_not_changed_in_place() {
    let guest = still([8, 8]);
    let mut changes = guest.subscribe("snapshots").unwrap();
    let dir = tempfile::tempdir().unwrap();
    fill(&guest, 1, 1);
    let diff = request(dir.path(), SnapshotKind::Diff);
    create_snapshot(&*guest, Some(&mut changes), &diff).unwrap();
    let before = fs::read(dir.path().join("memory")).unwrap();
    let open = || open_snapshot(&dir.path().join("state"), &dir.path().join("memory")).unwrap();
    let loaded = [open(), open()];
    fill(&guest, 2, 2);
    let e = create_snapshot(&*guest, Some(&mut changes), &diff).unwrap_err();
    assert!(matches!(e, SnapshotError::InUse(_)), "{e}");
    assert!(fs::read(dir.path().join("memory")).unwrap() == before);
    assert_eq!(
        (changes.count(), open().state.created_unix_ms),
        (1, loaded[0].state.created_unix_ms)
    );
    // A new file takes the name, and loaded guests keep theirs.
    create_snapshot(&*guest, Some(&mut changes), &request(dir.path(), SnapshotKind::Full)).unwrap();
    drop(loaded);
    fill(&guest, 3, 3);
    assert!(create_snapshot(&*guest, Some(&mut changes), &diff).unwrap().merged);
    assert!(fs::read(dir.path().join("memory")).unwrap() == image(&guest));
}

#[test]
fn symbolic_link_leads_to_the_file() {
    let guest = still([8, 8]);
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("there")).unwrap();
    fs::write(dir.path().join("there/file"), "").unwrap();
    symlink("there/file", dir.path().join("memory")).unwrap();
    create_snapshot(&*guest, None, &request(dir.path(), SnapshotKind::Full)).unwrap();
    assert_eq!(fs::metadata(dir.path().join("there/file")).unwrap().len(), 16 * PAGE_BYTES as u64);
    assert!(fs::symlink_metadata(dir.path().join("memory")).unwrap().is_symlink());
}

#[test]
fn snapshot_whose_files_do_not_fit_is_refused() {
    let guest = still([8, 8]);
    let dir = tempfile::tempdir().unwrap();
    create_snapshot(&*guest, None, &request(dir.path(), SnapshotKind::Full)).unwrap();
    let (state, memory) = (dir.path().join("state"), dir.path().join("memory"));
    let e = open_snapshot(&state, &dir.path().join("none")).unwrap_err().to_string();
    assert!(e.starts_with("opening ") && e.contains("none"), "{e}");
    let e = open_snapshot(&state, Path::new("/dev/zero")).unwrap_err().to_string();
    assert!(e.contains("it is not a regular file"), "{e}");
    let e = open_snapshot(&memory, &memory).unwrap_err().to_string();
    assert!(e.contains("not a Driftline snapshot"), "{e}");
    let mut file = fs::File::options().append(true).open(&memory).unwrap();
    file.write_all(b"x").unwrap();
    let e = open_snapshot(&state, &memory).unwrap_err().to_string();
    assert!(e.contains("has 65537 bytes") && e.contains("has 65536: it is not the memory"), "{e}");
    let bytes = fs::read(&state).unwrap();
    fs::write(&state, &bytes[..bytes.len() - 1]).unwrap();
    let e = open_snapshot(&state, &memory).unwrap_err();
    let SnapshotError::File(StoreError::Damaged { damage, .. }) = e else { panic!("{e}") };
    assert!(matches!(damage, Damage::EndsEarly { .. }), "{damage}");
}

#[test]
fn first_diff_since_boot_replaces_another_guests_memory() {
    let dir = tempfile::tempdir().unwrap();
    let other = still([8, 8]);
    fill(&other, 7, 7);
    create_snapshot(&*other, None, &request(dir.path(), SnapshotKind::Full)).unwrap();
    for live in [false, true] {
        let guest = still([8, 8]);
        let mut changes = guest.subscribe("snapshots").unwrap();
        fill(&guest, 2, 2);
        let diff = request(dir.path(), SnapshotKind::Diff);
        let first = SnapshotRequest { since_boot: true, ..diff };
        assert!(!snapshot_of(&guest, live, Some(&mut changes), &first).unwrap().merged);
        assert!(fs::read(dir.path().join("memory")).unwrap() == image(&guest));
    }
}
