//! Several epochs in flight to the disk: they become durable in order, and if one fails, so do the
//! epochs built on it.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use driftline_checkpoint::{
    Cadence, CheckpointError, Checkpointable, Checkpointer, EpochReport, TakenEpoch, restore,
};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, repeats};
use driftline_guest::{
    Clock, DirtyLog, GuestContents, GuestError, GuestIdentity, Lifecycle, RunState, SavedPause,
    Stateful, VcpuPauses,
};
use driftline_store::Store;
use driftline_store::testing::{DiskOp, MemoryDisk, Survives};

/// Maximum number of epochs that a series has in flight.
const IN_FLIGHT: u64 = 4;
/// Time for which syncs stay blocked once the maximum is in flight. An epoch beyond it would begin
/// in that time.
const GRACE: Duration = Duration::from_millis(200);

fn busy() -> Arc<MemoryGuest> {
    MemoryGuest::start(MemoryConfig { writes_per_s: 0, ..MemoryConfig::small() }).unwrap()
}

/// A guest that counts its pauses.
struct CountingGuest {
    guest: Arc<MemoryGuest>,
    pauses: AtomicU64,
}

driftline_guest::delegate!(
    CountingGuest as counting => *counting.guest;
    GuestIdentity, GuestContents, DirtyLog, Stateful,
);

impl CountingGuest {
    fn new() -> Arc<Self> {
        Arc::new(Self { guest: busy(), pauses: AtomicU64::new(0) })
    }

    /// Returns the number of pauses so far.
    fn pauses(&self) -> u64 {
        self.pauses.load(Ordering::SeqCst)
    }
}

impl Lifecycle for CountingGuest {
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }

    fn pause(&self) -> Result<RunState, GuestError> {
        self.pauses.fetch_add(1, Ordering::SeqCst);
        self.guest.pause()
    }

    fn pause_and_save(&self) -> Result<SavedPause, GuestError> {
        self.pauses.fetch_add(1, Ordering::SeqCst);
        self.guest.pause_and_save()
    }

    fn resume(&self) -> Result<(), GuestError> {
        self.guest.resume()
    }

    fn stop(&self, why: &str) {
        self.guest.stop(why);
    }

    fn vcpu_pauses(&self) -> Vec<VcpuPauses> {
        self.guest.vcpu_pauses()
    }
}

fn checkpointer(guest: Arc<dyn Checkpointable>, disk: &MemoryDisk, keep: u64) -> Checkpointer {
    let store = Store::with_backend(Box::new(disk.clone()), true).unwrap();
    let mut checkpointer = Checkpointer::new(guest, store).unwrap();
    checkpointer.keep(Some(keep));
    checkpointer.log_bound(32 << 10);
    checkpointer
}

fn every(ms: u64, count: u64) -> Cadence {
    Cadence { every: Duration::from_millis(ms), count: Some(count), max_pause: None }
}

fn number(taken: &TakenEpoch) -> u64 {
    match &taken.outcome {
        Ok(EpochReport { epoch, .. }) | Err(CheckpointError { epoch, .. }) => *epoch,
    }
}

/// Checks that all kept epochs restore completely.
fn all_whole(disk: &MemoryDisk) -> Vec<u64> {
    let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
    store.verify(|_, _| ()).unwrap();
    let kept: Vec<u64> = store.epochs().unwrap().iter().map(|e| e.epoch).collect();
    for epoch in &kept {
        let factory = MemoryGuestFactory::default();
        let (copy, _) = restore(&store, Some(*epoch), &factory, Clock::Continue).unwrap();
        copy.verify().unwrap();
    }
    kept
}

#[test]
fn epochs_in_flight_are_reported_in_order() {
    let (disk, guest) = (MemoryDisk::default(), CountingGuest::new());
    let mut checkpointer = checkpointer(guest.clone(), &disk, 5);
    checkpointer.take().unwrap();
    let (mut taken, before) = (Vec::new(), guest.pauses());
    let mut at_the_first = None;
    with_held_syncs(&disk, &guest, || {
        let tried = checkpointer.run(&every(10, 20), &AtomicBool::new(false), |t| {
            at_the_first.get_or_insert_with(|| guest.pauses() - before);
            taken.push(t);
            ControlFlow::Continue(())
        });
        assert_eq!(tried, 20);
    });
    assert_eq!(taken.iter().map(number).collect::<Vec<_>>(), (2..=21).collect::<Vec<_>>());
    // They were taken while nothing became durable; the fifth had to wait for the first.
    assert_eq!(at_the_first, Some(IN_FLIGHT));
    let waited = |t: &TakenEpoch| t.outcome.as_ref().unwrap().write_ms >= GRACE.as_secs_f64() * 1e3;
    assert!(taken[..3].iter().all(waited), "{taken:?}");
    assert!(taken[4].late >= GRACE / 2, "{:?}", taken[4]);
    drop(checkpointer);
    assert_eq!(all_whole(&disk), [17, 18, 19, 20, 21]);
}

/// Runs `act`, and blocks all syncs until the maximum number of epochs is in flight.
fn with_held_syncs(disk: &MemoryDisk, guest: &CountingGuest, act: impl FnOnce()) {
    let before = guest.pauses();
    disk.stall_syncs(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let until = Instant::now() + Duration::from_secs(60);
            while guest.pauses() < before + IN_FLIGHT && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(GRACE);
            disk.stall_syncs(false);
        });
        act();
    });
}

/// Makes `op` fail while epochs are in flight that wait for a sync; collects all outcomes.
fn failing(op: DiskOp, errno: i32, keep: u64) -> MemoryDisk {
    let (disk, guest) = (MemoryDisk::default(), CountingGuest::new());
    let mut checkpointer = checkpointer(guest.clone(), &disk, keep);
    for _ in 0..3 {
        checkpointer.take().unwrap();
    }
    disk.fail(op, errno, 0);
    let mut taken = Vec::new();
    with_held_syncs(&disk, &guest, || {
        checkpointer.run(&every(1, 12), &AtomicBool::new(false), |t| {
            if t.outcome.is_err() {
                disk.heal();
            }
            taken.push(t);
            ControlFlow::Continue(())
        });
    });
    assert_eq!(taken.iter().map(number).collect::<Vec<_>>(), (4..=15).collect::<Vec<_>>());
    let failed = taken.iter().take_while(|t| t.outcome.is_err()).count();
    assert_eq!(failed as u64, IN_FLIGHT, "{taken:?}");
    assert!(taken[failed..].iter().all(|t| t.outcome.is_ok()), "{taken:?}");
    let said = |n: usize| taken[n].outcome.as_ref().unwrap_err().to_string();
    assert!(said(0).contains(&std::io::Error::from_raw_os_error(errno).to_string()), "{}", said(0));
    for n in 1..failed {
        let expected = format!("it builds on checkpoint {}, which is not stored", 3 + n);
        assert!(said(n).contains(&expected), "{}", said(n));
        assert!(said(n).contains("what changed will be in the next checkpoint"), "{}", said(n));
    }
    // The next epoch has what all of them had, and so has the last.
    guest.pause().unwrap();
    let last = checkpointer.take().unwrap().epoch;
    let factory = MemoryGuestFactory::default();
    let (copy, report) = restore(checkpointer.store(), None, &factory, Clock::Continue).unwrap();
    copy.verify().unwrap();
    assert_eq!((report.epoch, copy.writes()), (last, guest.guest.writes()));
    drop(checkpointer);
    let kept = all_whole(&disk);
    assert_eq!(kept[kept.len() - 2..], [15, 16]);
    disk
}

#[test]
fn failed_sync_fails_all_epochs_in_flight() {
    let disk = failing(DiskOp::Sync, libc::EIO, 50);
    let store = Store::with_backend(Box::new(disk), false).unwrap();
    let full = |e: &driftline_store::EpochInfo| e.full.then_some(e.epoch);
    let full: Vec<u64> = store.epochs().unwrap().iter().filter_map(full).collect();
    assert_eq!(full, [1, 8], "4 to 7 have failed");
}

#[test]
fn refused_commit_gives_all_frames_back() {
    failing(DiskOp::Lock, libc::ENOLCK, 2);
}

#[test]
fn failed_pause_fails_only_its_epoch() {
    let (disk, guest) = (MemoryDisk::default(), busy());
    let mut checkpointer = checkpointer(guest.clone(), &disk, 3);
    checkpointer.take().unwrap();
    disk.slow_syncs(Duration::from_millis(15));
    let mut taken = Vec::new();
    checkpointer.run(&every(5, 12), &AtomicBool::new(false), |t| {
        if taken.len() == 2 {
            guest.faults().fail_next(driftline_guest::testing::Op::Pause, 1);
        }
        taken.push(t);
        ControlFlow::Continue(())
    });
    assert_eq!(taken.iter().map(number).collect::<Vec<_>>(), (2..=13).collect::<Vec<_>>());
    assert_eq!(taken.iter().filter(|t| t.outcome.is_err()).count(), 1);
    drop(checkpointer);
    assert_eq!(all_whole(&disk), [11, 12, 13]);
}

#[test]
fn ended_series_reports_every_epoch() {
    let (disk, guest) = (MemoryDisk::default(), busy());
    let mut checkpointer = checkpointer(guest.clone(), &disk, 50);
    disk.slow_syncs(Duration::from_millis(5));
    let (mut durable, cancel) = (0, AtomicBool::new(false));
    let cadence = Cadence { every: Duration::from_millis(2), count: None, max_pause: None };
    let tried = checkpointer.run(&cadence, &cancel, |taken| {
        durable += u64::from(taken.outcome.is_ok());
        cancel.store(durable == 3, Ordering::Relaxed);
        ControlFlow::Continue(())
    });
    assert!(durable == tried && tried < 10, "{durable} of {tried}");
    let tried_then = checkpointer.run(&cadence, &AtomicBool::new(false), |taken| {
        durable += u64::from(taken.outcome.is_ok());
        ControlFlow::Break(())
    });
    assert!(
        durable == tried + tried_then && tried_then <= 5,
        "{durable} of {tried} + {tried_then}"
    );
    // Epochs in flight at drop are stored, and the lock is free afterwards.
    drop(checkpointer);
    assert_eq!(all_whole(&disk).len() as u64, durable);
}

#[test]
fn crash_with_epochs_in_flight_keeps_durable_ones() {
    for stop in (0..60).step_by(repeats(7, 1)) {
        let (disk, guest) = (MemoryDisk::default(), busy());
        disk.stop_at_sync(stop);
        let mut durable = Vec::new();
        let mut checkpointer = checkpointer(guest.clone(), &disk, 3);
        checkpointer.run(&every(0, 20), &AtomicBool::new(false), |taken| {
            durable.extend(taken.outcome.ok().map(|report| report.epoch));
            ControlFlow::Continue(())
        });
        drop(checkpointer);
        guest.stop("done");
        let torn = (0..4).map(|seed| Survives::Torn(seed + stop * 100));
        for how in [Survives::Nothing, Survives::Everything].into_iter().chain(torn) {
            let kept = all_whole(&disk.crash(how));
            for epoch in durable.iter().rev().take(2) {
                assert!(kept.contains(epoch), "{how:?}: {epoch} was durable; there are {kept:?}");
            }
        }
    }
}
