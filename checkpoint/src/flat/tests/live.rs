//! Snapshots of guests that run.

use std::fs;

use driftline_dirty_tracker::FrameRun;
use driftline_guest::testing::{MemoryConfig, MemoryGuest, Op, TestDisk, image};
use driftline_guest::{
    DirtyLog, GuestContents, GuestIdentity, Lifecycle, PAGE_BYTES, RunState, SharedGuest, VmId,
};
use driftline_store::testing::MemoryDisk;
use driftline_store::{Backend, MemoryFileLayout};

use super::{fill, loaded, nth, request, still};
use crate::copy_planner::CopyPlanner;
use crate::epoch_output::EpochOutput;
use crate::flat::live::{FlatOutput, live_snapshot};
use crate::flat::{SnapshotError, SnapshotKind, create_live_snapshot, create_snapshot};

#[test]
fn live_snapshot_is_a_moment_of_the_guest() {
    // Copied in the pause, and after it.
    for (tracked, background) in [(true, false), (false, false), (true, true)] {
        let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
        let mut changes = tracked.then(|| guest.subscribe("snapshots").unwrap());
        let dir = tempfile::tempdir().unwrap();
        for (n, kind) in [SnapshotKind::Full, SnapshotKind::Diff].repeat(4).into_iter().enumerate()
        {
            guest.wait_for_writes(300);
            let before = guest.writes();
            let mut planner = CopyPlanner::default();
            if background {
                planner.background_from(1);
            }
            let request = request(dir.path(), kind);
            let report = live_snapshot(&*guest, changes.as_mut(), &request, planner).unwrap();
            assert_eq!(report.merged, tracked && kind == SnapshotKind::Diff, "{n}");
            assert!(report.pause_us > 0, "{report:?}");
            assert_eq!(guest.run_state(), RunState::Running, "{n}");
            let copy = loaded(dir.path(), "memory");
            copy.verify().unwrap();
            assert!((before..=guest.writes()).contains(&copy.writes()), "{n}");
        }
        guest.verify().unwrap();
    }
}

#[test]
fn snapshot_of_taken_memory_is_refused() {
    let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let request = request(dir.path(), SnapshotKind::Full);
    let claim = guest.memory_right().offer().unwrap();
    SharedGuest::new(Vec::new(), claim).right().unwrap().take().unwrap();
    let running = create_live_snapshot(&*guest, None, &request);
    guest.pause().unwrap();
    let paused = create_snapshot(&*guest, None, &request);
    for refused in [running, paused] {
        let why = refused.unwrap_err().to_string();
        assert!(why.contains("another process has taken"), "{why}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
}

#[test]
fn failed_background_copy_is_made_in_the_pause() {
    for op in [Op::WriteProtection, Op::Protect, Op::Unprotect, Op::Awaited] {
        let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
        let mut changes = guest.subscribe("snapshots").unwrap();
        let dir = tempfile::tempdir().unwrap();
        for kind in [SnapshotKind::Full, SnapshotKind::Diff] {
            guest.wait_for_writes(300);
            let mut planner = CopyPlanner::default();
            planner.background_from(1);
            guest.faults().fail_next(op, 1);
            let request = request(dir.path(), kind);
            live_snapshot(&*guest, Some(&mut changes), &request, planner).unwrap();
            guest.faults().fail_next(op, 0);
            assert_eq!(guest.run_state(), RunState::Running, "{op:?}");
            loaded(dir.path(), "memory").verify().unwrap();
        }
        guest.verify().unwrap();
    }
}

#[test]
fn guest_runs_after_a_failed_live_snapshot() {
    for op in [Op::Collect, Op::Populated, Op::Pause, Op::Save] {
        let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
        let mut changes = guest.subscribe("snapshots").unwrap();
        let dir = tempfile::tempdir().unwrap();
        for kind in [SnapshotKind::Full, SnapshotKind::Diff] {
            let request = request(dir.path(), kind);
            let mut live = || create_live_snapshot(&*guest, Some(&mut changes), &request);
            if op == Op::Populated && kind == SnapshotKind::Diff {
                continue;
            }
            guest.wait_for_writes(300);
            guest.faults().fail_next(op, 1);
            live().unwrap_err();
            assert_eq!(guest.run_state(), RunState::Running, "{op:?}");
            assert!(!dir.path().join("state").exists(), "{op:?}");
            live().unwrap();
            loaded(dir.path(), "memory").verify().unwrap();
            fs::remove_file(dir.path().join("state")).unwrap();
        }
        guest.verify().unwrap();
    }
}

#[test]
fn copy_of_an_ended_guest_stops() {
    let guest = still([8, 8]);
    let mut changes = guest.subscribe("snapshots").unwrap();
    fill(&guest, 1, 1);
    guest.stop("done");
    let dir = tempfile::tempdir().unwrap();
    let request = request(dir.path(), SnapshotKind::Full);
    let e = create_live_snapshot(&*guest, Some(&mut changes), &request).unwrap_err();
    assert!(e.to_string().contains("cannot copy memory of a guest that is stopped"), "{e}");
    assert_eq!((changes.count(), fs::read_dir(dir.path()).unwrap().count()), (1, 0));
}

#[test]
fn live_snapshot_needs_drives_that_do_not_change() {
    let disk = TestDisk::new("root", 1 << 20).unwrap();
    let guest = MemoryGuest::with_disks(VmId::random(), MemoryConfig::still(), vec![disk]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let request = request(dir.path(), SnapshotKind::Full);
    let e = create_live_snapshot(&*guest, None, &request).unwrap_err();
    assert!(matches!(&e, SnapshotError::LiveDrive(id) if id == "root"), "{e}");
    assert!(e.to_string().contains("drive \"root\""), "{e}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn drive_with_another_file_is_snapshotted_live() {
    let disk = TestDisk::read_only("root", 1 << 20).unwrap();
    let disks = vec![disk.clone()];
    let guest = MemoryGuest::with_disks(VmId::random(), MemoryConfig::still(), disks).unwrap();
    let mut changes = guest.subscribe("snapshots").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut live =
        |kind| create_live_snapshot(&*guest, Some(&mut changes), &request(dir.path(), kind));
    live(SnapshotKind::Full).unwrap();
    disk.exchange();
    // Its content is not in the snapshot, so it is not read.
    live(SnapshotKind::Diff).unwrap();
    loaded(dir.path(), "memory").verify().unwrap();
}

#[test]
fn zeros_are_skipped_only_in_new_files() {
    // Zeros and data in turn, across the border of two slots.
    let guest = still([4, 4]);
    for n in [1, 3, 4, 6] {
        fill(&guest, n, n as u8);
    }
    let contents = image(&guest);
    let runs = || [(0, 4), (4, 4)].map(|(n, count)| FrameRun { start: nth(&guest, n), count });
    let layout = MemoryFileLayout::new(guest.layout());
    let dir = tempfile::tempdir().unwrap();
    let request = request(dir.path(), SnapshotKind::Full);
    for (forget_zeros, frames) in [(true, 4), (false, 8)] {
        let disk = MemoryDisk::default();
        let file = disk.create_new("memory").unwrap();
        file.write_all_at(&vec![0xff; contents.len()], 0).unwrap();
        let mut to = FlatOutput::new(&*file, &request, &layout);
        EpochOutput::write(&mut to, &mut runs().into_iter(), &contents, forget_zeros).unwrap();
        assert_eq!(to.frames, frames);
        let expected = contents.chunks(PAGE_BYTES).flat_map(|page| {
            let skipped = forget_zeros && page[0] == 0;
            if skipped { vec![0xff; PAGE_BYTES] } else { page.to_vec() }
        });
        assert!(disk.contents("memory").unwrap() == expected.collect::<Vec<u8>>());
    }
}
