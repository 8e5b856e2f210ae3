//! Checkpoints of a running guest in a real directory.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use driftline_checkpoint::{
    Cadence, Checkpointer, EpochFailure, EpochStep, RestoreReport, StagingLimits, TakenEpoch,
    Tally, restore,
};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, Op};
use driftline_guest::{Clock, GuestIdentity, HandOver, Lifecycle, RunState};
use driftline_store::{Store, StoreError};

fn busy() -> Arc<MemoryGuest> {
    MemoryGuest::start(MemoryConfig { writes_per_s: 0, ..MemoryConfig::small() }).unwrap()
}

fn restored(dir: &Path, epoch: Option<u64>) -> (Arc<MemoryGuest>, RestoreReport) {
    let store = Store::open(dir).unwrap();
    restore(&store, epoch, &MemoryGuestFactory::default(), Clock::Continue).unwrap()
}

#[test]
fn every_epoch_of_a_busy_guest_restores() {
    let dir = tempfile::tempdir().unwrap();
    let guest = busy();
    let mut checkpointer =
        Checkpointer::new(guest.clone(), Store::create_or_open(dir.path()).unwrap()).unwrap();
    let mut take = || {
        guest.wait_for_writes(10);
        checkpointer.take().unwrap()
    };
    let reports: Vec<_> = (0..6).map(|_| take()).collect();
    assert_eq!(guest.run_state(), RunState::Running);
    guest.verify().unwrap();
    let infos = Store::open(dir.path()).unwrap().epochs().unwrap();
    for (i, (report, info)) in reports.iter().zip(&infos).enumerate() {
        assert_eq!((report.epoch, info.epoch), (i as u64 + 1, i as u64 + 1));
        assert_eq!((report.frames, report.written_bytes), (info.frames, info.bytes));
        assert_eq!((info.full, info.parent), (i == 0, (i > 0).then_some(i as u64)));
        assert!(report.durable && report.frames > 0);
    }
    let mut before = 0;
    for epoch in 1..=6 {
        let (copy, report) = restored(dir.path(), Some(epoch));
        copy.verify().unwrap();
        assert_eq!((report.epoch, report.epochs), (epoch, epoch));
        assert!(copy.writes() > before, "epochs follow each other");
        before = copy.writes();
    }
    let (copy, report) = restored(dir.path(), None);
    assert_eq!(report.epoch, 6);
    copy.acquire().unwrap();
    copy.resume().unwrap();
    copy.wait_for_writes(10);
    copy.verify().unwrap();
    let verified = Store::open(dir.path()).unwrap().verify(|_, r| assert!(r.is_ok())).unwrap();
    assert_eq!(verified.epochs, 6);
}

#[test]
fn fifty_successive_restores_continue_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = busy();
    for _ in 0..50 {
        guest.wait_for_writes(100);
        let store = Store::create_or_open(dir.path()).unwrap();
        let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
        checkpointer.take().unwrap();
        let last = checkpointer.take().unwrap().epoch;
        guest.stop("its host is lost");
        let report;
        (guest, report) = restored(dir.path(), None);
        assert_eq!(report.epoch, last);
        guest.verify().unwrap();
        guest.acquire().unwrap();
        guest.resume().unwrap();
    }
}

#[test]
fn stopped_guest_is_refused_paused_stays_paused() {
    let dir = tempfile::tempdir().unwrap();
    let guest = busy();
    let store = Store::create_or_open(dir.path()).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    guest.pause().unwrap();
    checkpointer.take().unwrap();
    assert_eq!(guest.run_state(), RunState::Paused);
    restored(dir.path(), None).0.verify().unwrap();
    guest.stop("test");
    let e = checkpointer.take().unwrap_err().to_string();
    let expected = "checkpoint 2 is not stored: pausing the guest failed: cannot pause a guest \
                    that is stopped; the guest is stopped";
    assert_eq!(e, expected);
}

#[test]
fn a_small_staging_area_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let guest = busy();
    let store = Store::create_or_open(dir.path()).unwrap();
    let limits = StagingLimits { first_bytes: 5 * 4096, most_bytes: 40 * 4096 };
    let mut checkpointer = Checkpointer::with_staging(guest.clone(), store, limits).unwrap();
    for _ in 0..8 {
        checkpointer.take().unwrap();
    }
    for epoch in 1..=8 {
        restored(dir.path(), Some(epoch)).0.verify().unwrap();
    }
}

#[test]
fn failed_epoch_is_given_back() {
    let faults = [
        (Op::Populated, EpochStep::CopyLive, true),
        (Op::Subscribe, EpochStep::Subscribe, true),
        (Op::Pause, EpochStep::Pause, false),
        (Op::Collect, EpochStep::Drain, false),
        (Op::Save, EpochStep::Save, false),
        (Op::Resume, EpochStep::Resume, false),
    ];
    for (op, step, only_full) in faults {
        for full in [true, false] {
            if only_full && !full {
                continue;
            }
            let dir = tempfile::tempdir().unwrap();
            let guest = busy();
            let store = Store::create_or_open(dir.path()).unwrap();
            let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
            if !full {
                checkpointer.take().unwrap();
            }
            guest.faults().fail_next(op, 1);
            let e = checkpointer.take().unwrap_err();
            // A full epoch collects before the pause already.
            let early = full && op == Op::Collect;
            assert_eq!(e.step, if early { EpochStep::CopyLive } else { step }, "{e}");
            // Resume failed once, in the pause; the second try, on the return path, worked or was
            // not made.
            let expected = if op == Op::Resume { RunState::Paused } else { RunState::Running };
            assert_eq!(e.guest, expected, "{e}");
            assert!(e.to_string().contains(&format!("the guest is {expected}")), "{e}");
            guest.resume().unwrap();
            let report = checkpointer.take().unwrap();
            assert_eq!(report.epoch, e.epoch + 1, "numbers are not used again");
            restored(dir.path(), None).0.verify().unwrap();
            Store::open(dir.path()).unwrap().verify(|_, _| ()).unwrap();
        }
    }
}

#[test]
fn new_checkpointer_begins_a_new_chain() {
    let dir = tempfile::tempdir().unwrap();
    let guest = busy();
    for round in 0..3 {
        let store = Store::create_or_open(dir.path()).unwrap();
        let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
        assert_eq!(checkpointer.take().unwrap().epoch, 2 * round + 1);
        assert_eq!(checkpointer.take().unwrap().epoch, 2 * round + 2);
    }
    let infos = Store::open(dir.path()).unwrap().epochs().unwrap();
    let full: Vec<u64> = infos.iter().filter(|i| i.full).map(|i| i.epoch).collect();
    assert_eq!(full, [1, 3, 5]);
    assert_eq!(restored(dir.path(), Some(4)).1.epochs, 2);
}

#[test]
fn writers_exclude_each_other_and_other_guests() {
    let dir = tempfile::tempdir().unwrap();
    let guest = busy();
    let store = Store::create_or_open(dir.path()).unwrap();
    let e = Store::create_or_open(dir.path()).unwrap_err();
    assert!(
        matches!(e, StoreError::InUse { pid: Some(pid), .. } if pid == std::process::id()),
        "{e}"
    );
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    checkpointer.take().unwrap();
    drop(checkpointer);

    let other = busy();
    let e =
        Checkpointer::new(other.clone(), Store::create_or_open(dir.path()).unwrap()).unwrap_err();
    let message = e.to_string();
    assert!(message.contains(&guest.vm_id().to_string()), "{message}");
    assert!(message.contains(&other.vm_id().to_string()), "{message}");
    let e = Checkpointer::new(guest, Store::open(dir.path()).unwrap()).unwrap_err();
    assert!(matches!(e, StoreError::ReadOnly { .. }), "{e}");
}

#[test]
fn missing_epoch_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create_or_open(dir.path()).unwrap();
    let factory = MemoryGuestFactory::default();
    let e = |epoch| restore(&store, epoch, &factory, Clock::Continue).unwrap_err().to_string();
    assert!(e(None).ends_with("has no checkpoint"), "{}", e(None));
    assert!(e(Some(3)).ends_with("has no checkpoint 3"), "{}", e(Some(3)));
    assert!(Store::open(&dir.path().join("nowhere")).is_err());
    assert_eq!(store.owner().unwrap(), None);
}

#[test]
fn manifest_names_the_owner() {
    let dir = tempfile::tempdir().unwrap();
    let guest = busy();
    let store = Store::create_or_open(dir.path()).unwrap();
    Checkpointer::new(guest.clone(), store).unwrap().take().unwrap();
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(store.owner().unwrap(), Some(guest.vm_id()));
    std::fs::write(dir.path().join("manifest"), "no manifest").unwrap();
    let e = store.owner().unwrap_err();
    assert!(matches!(e, StoreError::Damaged { .. }) && e.to_string().contains("manifest"), "{e}");
}

fn every(ms: u64, count: Option<u64>) -> Cadence {
    Cadence { every: Duration::from_millis(ms), count, max_pause: None }
}

#[test]
fn a_cadence_never_queues_and_can_be_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create_or_open(dir.path()).unwrap();
    let guest = busy();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    let cancel = AtomicBool::new(false);
    let mut lines = Vec::new();
    let tried = checkpointer.run(&every(2, Some(10)), &cancel, |taken| {
        if lines.is_empty() {
            std::thread::sleep(Duration::from_millis(20));
            guest.faults().fail_next(Op::Save, 1);
        }
        lines.push(taken);
        ControlFlow::Continue(())
    });
    assert_eq!((tried, lines.len()), (10, 10));
    // The first epoch that began after the first outcome was reported, with others in flight by
    // then.
    let late = |t: &TakenEpoch| t.late >= Duration::from_millis(15) && t.skipped >= 7;
    assert!(lines.iter().any(late), "{lines:?}");
    assert_eq!(lines.iter().filter(|l| l.outcome.is_err()).count(), 1);
    restored(dir.path(), None).0.verify().unwrap();
    cancel.store(true, std::sync::atomic::Ordering::Relaxed);
    let none = checkpointer.run(&every(9000, None), &cancel, |_| ControlFlow::Continue(()));
    assert_eq!(none, 0);
    let mut tally = Tally::default();
    lines.iter().for_each(|taken| tally.add(taken));
    let achieved = tally.achieved();
    assert_eq!((achieved.epochs, achieved.failed, achieved.early), (9, 1, 0));
    assert!(achieved.skipped >= 7 && achieved.interval.max_us >= 20_000, "{achieved:?}");
    assert!(achieved.pause.p50_us <= achieved.pause.p99_us && achieved.write.max_us > 0);
}

#[test]
fn epoch_comes_early_when_the_buffer_fills() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create_or_open(dir.path()).unwrap();
    let guest = busy();
    let limits = StagingLimits { first_bytes: 256 * 4096, most_bytes: 256 * 4096 };
    let mut checkpointer = Checkpointer::with_staging(guest, store, limits).unwrap();
    let max_pause = Some(Duration::from_secs(1));
    // Its writers have written their whole working set long before each epoch is due.
    let cadence = Cadence { max_pause, ..every(4_000, Some(4)) };
    let mut taken = Vec::new();
    checkpointer.run(&cadence, &AtomicBool::new(false), |t| {
        taken.push(t);
        ControlFlow::Continue(())
    });
    assert!(!taken[0].early && taken[1..].iter().all(|t| t.early), "{taken:?}");
    assert!(taken[1..].iter().all(|t| t.outcome.as_ref().unwrap().frames >= 192), "{taken:?}");
}

#[test]
fn report_has_the_documented_fields() {
    let dir = tempfile::tempdir().unwrap();
    let guest = busy();
    let mut checkpointer =
        Checkpointer::new(guest, Store::create_or_open(dir.path()).unwrap()).unwrap();
    let line = serde_json::to_value(checkpointer.take().unwrap()).unwrap();
    let names: Vec<&String> = line.as_object().unwrap().keys().collect();
    let promised = [
        "checkpoint",
        "copied_after_frames",
        "disk_blocks",
        "durable",
        "frames",
        "pause_us",
        "waited_us",
        "waits",
        "write_ms",
        "written_bytes",
    ];
    assert_eq!(names, promised);
}

#[test]
fn replaced_store_fails_the_epoch() {
    let guest = busy();
    for whole in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let (path, moved) = (dir.path().join("store"), dir.path().join("moved"));
        let store = Store::create_or_open(&path).unwrap();
        let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
        checkpointer.take().unwrap();
        if whole {
            std::fs::rename(&path, &moved).unwrap();
            drop(Store::create_or_open(&path).unwrap());
        } else {
            std::fs::remove_file(path.join("lock")).unwrap();
        }
        let e = checkpointer.take().unwrap_err();
        assert_eq!(e.guest, RunState::Running, "{e}");
        assert!(e.to_string().contains("was removed or replaced while this process held"), "{e}");
        assert!(Store::open(&path).unwrap().list().unwrap().unfinished.is_empty());
        // No other writer has the lock: the next epoch takes it again, and needs nothing from
        // before.
        let report = checkpointer.take().unwrap();
        assert_eq!(report.epoch, e.epoch + 1);
        let (copy, restored) = restored(&path, None);
        copy.verify().unwrap();
        assert_eq!((restored.epoch, restored.epochs), (report.epoch, 1));
        let e = Store::create_or_open(&path).unwrap_err();
        assert!(matches!(e, StoreError::InUse { .. }), "it is locked again: {e}");
    }
}

#[test]
fn store_moved_away_and_back_is_reused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, moved) = (dir.path().join("store"), dir.path().join("moved"));
    let store = Store::create_or_open(&path).unwrap();
    let mut checkpointer = Checkpointer::new(busy(), store).unwrap();
    checkpointer.take().unwrap();
    std::fs::rename(&path, &moved).unwrap();
    let e = checkpointer.take().unwrap_err().to_string();
    assert!(e.contains("was removed or replaced while this process held"), "{e}");
    std::fs::rename(&moved, &path).unwrap();
    let report = checkpointer.take().unwrap();
    let (copy, restored) = restored(&path, None);
    copy.verify().unwrap();
    assert_eq!((restored.epoch, restored.epochs), (report.epoch, 1));
    let e = Store::create_or_open(&path).unwrap_err();
    assert!(matches!(e, StoreError::InUse { .. }), "it is still locked: {e}");
}

#[test]
fn lost_lock_stays_with_its_new_holder() {
    let dir = tempfile::tempdir().unwrap();
    let (guest, other) = (busy(), busy());
    let store = Store::create_or_open(dir.path()).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    checkpointer.take().unwrap();
    std::fs::remove_file(dir.path().join("lock")).unwrap();
    // The page file is still the first writer's: its slots are not reused until it has noticed.
    let second = Store::create_or_open(dir.path()).unwrap();
    let e = second.compact().unwrap_err();
    assert!(matches!(e, StoreError::InUse { pid: None, .. }), "{e}");
    let e = Checkpointer::new(guest.clone(), second).unwrap_err();
    assert!(matches!(e, StoreError::InUse { pid: None, .. }), "{e}");
    let second = Store::create_or_open(dir.path()).unwrap();
    let e = checkpointer.take().unwrap_err().to_string();
    assert!(e.contains("was removed or replaced while this process held"), "{e}");
    let mut second = Checkpointer::new(guest.clone(), second).unwrap();
    let theirs = [second.take().unwrap().epoch, second.take().unwrap().epoch];
    for _ in 0..2 {
        let e = checkpointer.take().unwrap_err().to_string();
        assert!(e.contains(&format!("is in use by process {}", std::process::id())), "{e}");
    }
    drop(second);
    // Numbers that the other writer has used are not reused.
    let mine = checkpointer.take().unwrap().epoch;
    assert!(theirs.iter().all(|n| *n < mine), "{theirs:?} {mine}");
    restored(dir.path(), None).0.verify().unwrap();
    Store::open(dir.path()).unwrap().verify(|_, r| assert!(r.is_ok())).unwrap();

    // A store that has become another guest's stays that guest's.
    std::fs::remove_dir_all(dir.path()).unwrap();
    let store = Store::create_or_open(dir.path()).unwrap();
    Checkpointer::new(other, store).unwrap().take().unwrap();
    checkpointer.take().unwrap_err();
    let e = checkpointer.take().unwrap_err().to_string();
    assert!(e.contains("holds checkpoints of guest"), "{e}");
    assert_eq!(Store::open(dir.path()).unwrap().epochs().unwrap().len(), 1);
}

#[test]
fn leftovers_are_removed_and_foreign_files_kept() {
    let dir = tempfile::tempdir().unwrap();
    let guest = busy();
    let store = Store::create_or_open(dir.path()).unwrap();
    Checkpointer::new(guest, store).unwrap().take().unwrap();
    let leftovers = ["log-2", "manifest.tmp", "pages-7"];
    for leftover in leftovers {
        std::fs::write(dir.path().join(leftover), b"half").unwrap();
    }
    std::fs::write(dir.path().join("notes.txt"), b"mine").unwrap();
    let report = Store::open(dir.path()).unwrap().verify(|_, _| ()).unwrap();
    assert_eq!(report.unfinished, leftovers);
    assert_eq!(report.foreign, ["notes.txt"]);
    drop(Store::create_or_open(dir.path()).unwrap());
    let listing = Store::open(dir.path()).unwrap().list().unwrap();
    assert!(listing.unfinished.is_empty());
    assert_eq!(listing.foreign, ["notes.txt"]);
    assert_eq!(listing.epochs.len(), 1);
}

#[test]
fn emptied_store_restarts_with_a_full_epoch() {
    let guest = busy();
    for victims in [vec!["manifest", "log-1", "pages-1"], vec!["manifest", "log-1"]] {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create_or_open(dir.path()).unwrap();
        let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
        for _ in 0..3 {
            checkpointer.take().unwrap();
        }
        for victim in victims {
            std::fs::remove_file(dir.path().join(victim)).unwrap();
        }
        let report = checkpointer.take().unwrap();
        assert_eq!(report.epoch, 4, "numbers are not used again");
        let infos = Store::open(dir.path()).unwrap().epochs().unwrap();
        assert_eq!((infos.len(), infos[0].full), (1, true));
        let (copy, restored) = restored(dir.path(), None);
        copy.verify().unwrap();
        assert_eq!((restored.epoch, restored.epochs), (4, 1));
    }
}

#[test]
fn damaged_store_is_reported_and_not_overwritten() {
    let guest = busy();
    for victim in ["manifest", "log-1", "pages-1"] {
        for replace in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::create_or_open(dir.path()).unwrap();
            let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
            checkpointer.take().unwrap();
            let file = dir.path().join(victim);
            let sound = std::fs::read(&file).unwrap();
            std::fs::remove_file(&file).unwrap();
            if replace {
                std::fs::write(&file, b"something else").unwrap();
            }
            for _ in 0..2 {
                let e = checkpointer.take().unwrap_err();
                assert_eq!((e.step, e.guest), (EpochStep::Begin, RunState::Running), "{e}");
                let named = e.to_string().contains(victim);
                assert!(
                    named || e.to_string().contains("log-1 holds checkpoints, but"),
                    "{victim}: {e}"
                );
            }
            std::fs::write(&file, sound).unwrap();
            checkpointer.take().unwrap();
            assert_eq!(Store::open(dir.path()).unwrap().epochs().unwrap().len(), 2);
            restored(dir.path(), None).0.verify().unwrap();
        }
    }
}

#[test]
fn store_without_free_numbers_takes_no_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let guest = busy();
    let store = || Store::create_or_open(dir.path()).unwrap();
    let last = i64::MAX as u64 - 1;
    let mut checkpointer = Checkpointer::new(guest.clone(), store()).unwrap();
    checkpointer.take().unwrap();
    checkpointer.number_from(last);
    assert_eq!(checkpointer.take().unwrap().epoch, last);
    for _ in 0..2 {
        let e = checkpointer.take().unwrap_err();
        assert_eq!((e.step, e.guest), (EpochStep::Begin, RunState::Running), "{e}");
        assert!(matches!(e.cause, EpochFailure::Store(StoreError::Full { .. })), "{e}");
    }
    drop(checkpointer);
    let e = Checkpointer::new(guest, store()).unwrap_err().to_string();
    assert!(e.contains("has no number left for a checkpoint"), "{e}");
    assert!(e.contains(&format!("after {last};")), "{e}");
    restored(dir.path(), None).0.verify().unwrap();
}
