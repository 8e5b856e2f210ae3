//! Everything that was reported durable is there after a power loss at any sync and with failing
//! disks.

use std::collections::BTreeMap;
use std::sync::Arc;

use driftline_checkpoint::{Checkpointer, StagingLimits, restore};
use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::testing::{
    MemoryConfig, MemoryGuest, MemoryGuestFactory, Op, TestDisk, image, repeats,
};
use driftline_guest::{Clock, GuestContents, Lifecycle, RunState, VmId};
use driftline_store::Store;
use driftline_store::testing::{DiskOp, MemoryDisk, Survives};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

const EPOCHS: u64 = 20;
/// Few enough that page slots are reused again and again.
const KEEP: u64 = 3;

/// Size of the guest's drive, whose last block is partial.
const DISK_BYTES: u64 = 20 * PAGE_SIZE + 512;

/// Returns all of a guest's memory, slot after slot, and the content of its drive.
fn contents(guest: &MemoryGuest) -> Vec<u8> {
    let mut contents = image(guest);
    contents.extend(guest.disks().iter().flat_map(|disk| disk.contents().unwrap()));
    contents
}

fn still() -> Arc<MemoryGuest> {
    let mut config = MemoryConfig::still();
    (config.slots[0].frames, config.slots[1].frames) = (20, 30);
    let disk = TestDisk::new("disk", DISK_BYTES).unwrap();
    MemoryGuest::with_disks(VmId::random(), config, vec![disk]).unwrap()
}

/// Fills the `n`-th of the guest's 50 frames, and a part of its drive, with `byte`, except the
/// first byte, which is `salt`.
fn write(guest: &MemoryGuest, n: u64, byte: u8, salt: u8) {
    let gpa = if n < 20 { n } else { 0x400 + n - 20 } * PAGE_SIZE;
    let mut page = [byte; PAGE_SIZE as usize];
    page[0] = salt;
    guest.ram().write_slice(&page, GuestAddress(gpa)).unwrap();
    let offset = n * 2048 % (DISK_BYTES - 512);
    let len = PAGE_SIZE.min(DISK_BYTES - offset) as usize;
    guest.disks()[0].write(offset, &page[..len]).unwrap();
}

fn restored(disk: &MemoryDisk, epoch: Option<u64>) -> (u64, Vec<u8>) {
    let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
    // The restore overwrites whatever it holds.
    let spare = TestDisk::new("disk", DISK_BYTES).unwrap();
    spare.write(PAGE_SIZE, &[0xee; 15 * 4096]).unwrap();
    let factory = MemoryGuestFactory { disks: vec![spare], ..Default::default() };
    let (guest, report) = restore(&store, epoch, &factory, Clock::Continue).unwrap();
    (report.epoch, contents(&guest))
}

fn checkpointer(guest: &Arc<MemoryGuest>, disk: &MemoryDisk) -> Checkpointer {
    let store = Store::with_backend(Box::new(disk.clone()), true).unwrap();
    let limits = StagingLimits { first_bytes: 4 * PAGE_SIZE, most_bytes: 8 * PAGE_SIZE };
    Checkpointer::with_staging(guest.clone(), store, limits).unwrap()
}

/// Memory at each epoch's pause, and whether the epoch was reported durable.
type EpochImages = BTreeMap<u64, (Vec<u8>, bool)>;

/// Takes epochs, also after the disk has stopped. A log of more than `log_bound` bytes is
/// rewritten.
fn run(disk: &MemoryDisk, log_bound: u64) -> (Arc<MemoryGuest>, EpochImages) {
    let guest = still();
    let mut epochs = BTreeMap::new();
    let mut checkpointer = checkpointer(&guest, disk);
    checkpointer.keep(Some(KEEP));
    checkpointer.log_bound(log_bound);
    for round in 0..EPOCHS {
        for i in 0..6 + round % 5 {
            let n = (round * 17 + i * 7) % 50;
            write(&guest, n, if i % 3 == 0 { 0 } else { round as u8 + 1 }, 0);
        }
        let now = contents(&guest);
        match checkpointer.take() {
            Ok(report) => epochs.insert(report.epoch, (now, true)),
            Err(e) => epochs.insert(e.epoch, (now, false)),
        };
    }
    (guest, epochs)
}

/// Checks that what a crash left has every durable epoch that is to be kept, bit for bit, and that
/// the store remains usable.
fn check_crash(after: &MemoryDisk, guest: &Arc<MemoryGuest>, epochs: &EpochImages, how: Survives) {
    let store = Store::with_backend(Box::new(after.clone()), false).unwrap();
    store.verify(|_, _| ()).unwrap();
    let kept: Vec<u64> = store.epochs().unwrap().iter().map(|e| e.epoch).collect();
    let durable: Vec<u64> = epochs.iter().filter(|(_, (_, d))| *d).map(|(n, _)| *n).collect();
    // An epoch that was not reported durable may be there, and have taken an old one's place.
    for epoch in durable.iter().rev().take(KEEP as usize - 1) {
        assert!(kept.contains(epoch), "{how:?}: epoch {epoch} was durable; there are {kept:?}");
    }
    assert!(kept.len() >= durable.len().min(KEEP as usize), "{how:?}: {kept:?} of {durable:?}");
    for epoch in &kept {
        assert!(restored(after, Some(*epoch)) == (*epoch, epochs[epoch].0.clone()), "{how:?}");
    }
    if let Some(latest) = kept.last() {
        assert_eq!(restored(after, None).0, *latest);
    }
    let mut again = checkpointer(guest, after);
    again.keep(Some(KEEP));
    let report = again.take().unwrap();
    assert_eq!(restored(after, None), (report.epoch, contents(guest)));
    let now: Vec<u64> = store.epochs().unwrap().iter().map(|e| e.epoch).collect();
    assert_eq!(now.len(), (kept.len() + 1).min(KEEP as usize), "{how:?}: {now:?} after {kept:?}");
    for epoch in now.iter().filter(|epoch| **epoch != report.epoch) {
        assert!(restored(after, Some(*epoch)) == (*epoch, epochs[epoch].0.clone()), "{how:?}");
    }
    // What a new process found in the cache, and reported stored, is durable.
    assert_eq!(restored(&after.crash(Survives::Nothing), None), (report.epoch, contents(guest)));
}

fn crash_at_every_sync(log_bound: u64) -> u64 {
    let mut stop = 0;
    loop {
        let disk = MemoryDisk::default();
        disk.stop_at_sync(stop);
        let (guest, epochs) = run(&disk, log_bound);
        let torn = (0..repeats(1, 12)).map(|seed| Survives::Torn(seed + stop * 100));
        for how in [Survives::Nothing, Survives::Everything].into_iter().chain(torn) {
            check_crash(&disk.crash(how), &guest, &epochs, how);
        }
        if !disk.is_stopped() {
            return stop;
        }
        stop += 1;
    }
}

#[test]
fn durable_epochs_survive_a_crash_at_any_sync() {
    // Creating the store takes five syncs.
    let stops = crash_at_every_sync(u64::MAX);
    assert_eq!(stops, 5 + 2 * EPOCHS, "one sync of the page file and one of the log an epoch");
}

#[test]
fn durable_epochs_survive_crashes_during_log_rotation() {
    let stops = crash_at_every_sync(4 << 10);
    assert!(stops >= 5 + 2 * EPOCHS + 8, "the log was rewritten: {stops} syncs");
}

#[test]
fn durable_epochs_survive_a_crash_at_any_sector() {
    // Syncs that create the store, and in turn ones of the log and of the page file.
    let of_epochs = (6..5 + 2 * EPOCHS).step_by(repeats(17, 3));
    for stop in [0, 3].into_iter().chain(of_epochs) {
        let disk = MemoryDisk::default();
        disk.stop_at_sync(stop);
        let (guest, epochs) = run(&disk, 8 << 10);
        for sectors in 0..=disk.unsynced_sectors() {
            let how = Survives::First(sectors);
            check_crash(&disk.crash(how), &guest, &epochs, how);
        }
    }
}

#[test]
fn failing_disk_costs_an_epoch_and_no_frame() {
    let refusals = [
        (DiskOp::Create, libc::EROFS),
        (DiskOp::Write, libc::ENOSPC),
        (DiskOp::Sync, libc::EIO),
        (DiskOp::Rename, libc::ENOSPC),
        (DiskOp::SyncDir, libc::EIO),
        (DiskOp::Allocate, libc::EFBIG),
        (DiskOp::Truncate, libc::EIO),
        (DiskOp::Lock, libc::ENOLCK),
    ];
    for (op, errno) in refusals {
        for full in [true, false] {
            for after in 0..2 {
                fail_one_operation(op, errno, full, after);
            }
        }
    }
}

/// Takes epochs on a disk on which `op` fails after this many successes. The first of them is
/// `full`, or follows one that succeeded.
fn fail_one_operation(op: DiskOp, errno: i32, full: bool, after: u32) {
    let (disk, guest) = (MemoryDisk::default(), still());
    guest.resume().unwrap();
    let mut checkpointer = checkpointer(&guest, &disk);
    checkpointer.keep(Some(1));
    (0..30).for_each(|n| write(&guest, n, 1, 9));
    if !full {
        checkpointer.take().unwrap();
    }
    (20..50).for_each(|n| write(&guest, n, 2, 9));
    disk.fail(op, errno, after);
    if op == DiskOp::Truncate {
        // The log is cut only after a failure.
        disk.fail(DiskOp::Sync, errno, 1);
    }
    let mut failed = 0;
    for _ in 0..3 {
        if let Err(e) = checkpointer.take() {
            failed += 1;
            assert_eq!(e.guest, RunState::Running, "{e}");
            let reason = std::io::Error::from_raw_os_error(errno).to_string();
            assert!(e.to_string().contains(&reason), "{e}");
        }
        write(&guest, 49, 3, after as u8);
    }
    disk.heal();
    // An existing store creates, renames and allocates nothing; a new one makes its files only
    // once.
    let there = matches!(op, DiskOp::Create | DiskOp::Rename | DiskOp::SyncDir | DiskOp::Allocate);
    let once = matches!(op, DiskOp::Rename | DiskOp::Allocate) && after == 1;
    assert_eq!(failed == 0, (there && !full) || once, "{op:?}, {full}, {after}: {failed}");
    let report = checkpointer.take().unwrap();
    assert_eq!(restored(&disk, None), (report.epoch, contents(&guest)), "{op:?}");
    let crashed = disk.crash(Survives::Nothing);
    assert_eq!(restored(&crashed, None), (report.epoch, contents(&guest)), "{op:?}");
    let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
    assert!(store.verify(|_, _| ()).unwrap().unfinished.is_empty());
}

#[test]
fn reopened_log_is_synced_before_the_next_epoch() {
    let (disk, guest) = (MemoryDisk::default(), still());
    let mut first = checkpointer(&guest, &disk);
    (0..30).for_each(|n| write(&guest, n, 1, 1));
    first.take().unwrap();
    (10..40).for_each(|n| write(&guest, n, 2, 2));
    let was = contents(&guest);
    // All of it is in the log, neither durable nor cut off.
    disk.fail(DiskOp::Sync, libc::EIO, 1);
    disk.fail(DiskOp::Truncate, libc::EIO, 0);
    first.take().unwrap_err();
    drop(first);
    disk.heal();
    assert!(restored(&disk, None) == (2, was.clone()));
    let mut second = checkpointer(&guest, &disk);
    assert!(restored(&disk.crash(Survives::Nothing), None) == (2, was));
    second.take().unwrap();
    assert!(restored(&disk.crash(Survives::Nothing), None) == (3, contents(&guest)));
}

#[test]
fn named_files_stay_until_the_manifest_is_durable() {
    let (disk, guest) = (MemoryDisk::default(), still());
    checkpointer(&guest, &disk).take().unwrap();
    let mut epochs = 1;
    // The second sync of a manifest that replaces another fails.
    while disk.names().iter().filter(|name| name.starts_with("log-")).count() < 2 {
        write(&guest, epochs % 50, epochs as u8, 1);
        let mut first = checkpointer(&guest, &disk);
        first.keep(Some(1));
        first.log_bound(1);
        disk.fail(DiskOp::SyncDir, libc::EIO, 1);
        epochs = first.take().unwrap().epoch;
        // The log is rewritten after that.
        drop(first);
        disk.heal();
        assert!(epochs < 100);
    }
    for stop in 0..3 {
        for seed in 0..20 {
            let disk = disk.copy();
            disk.stop_at_sync(disk.syncs() + stop);
            let opened = Store::with_backend(Box::new(disk.clone()), true);
            assert_eq!(opened.is_ok(), stop == 2);
            let after = disk.crash(Survives::Torn(seed));
            assert!(restored(&after, None) == (epochs, contents(&guest)), "{stop}, {seed}");
        }
    }
}

#[test]
fn nearly_full_disk_is_used_to_the_end() {
    for errno in [libc::ENOSPC, libc::EDQUOT] {
        let (disk, guest) = (MemoryDisk::default(), still());
        let mut checkpointer = checkpointer(&guest, &disk);
        checkpointer.keep(Some(1));
        disk.fail(DiskOp::Allocate, errno, 0);
        for round in 0..4 {
            (0..30).for_each(|n| write(&guest, (n + round * 7) % 50, round as u8 + 1, 9));
            let report = checkpointer.take().unwrap();
            assert_eq!(restored(&disk, None), (report.epoch, contents(&guest)));
        }
        let pages = disk.contents("pages-1").unwrap().len();
        assert_eq!(pages, (1 + 128) * 4096, "half of what was asked for");
    }
}

#[test]
fn read_error_is_no_damage() {
    let (disk, guest) = (MemoryDisk::default(), still());
    checkpointer(&guest, &disk).take().unwrap();
    // The disk itself would report EIO, which is damage.
    disk.fail(DiskOp::Read, libc::ETIMEDOUT, 5);
    let store = Store::with_backend(Box::new(disk), false).unwrap();
    let factory = MemoryGuestFactory::default();
    let e = restore(&store, None, &factory, Clock::Continue).unwrap_err().to_string();
    assert!(
        e.starts_with("reading /memory-disk/") && e.contains(" failed: Connection timed out"),
        "{e}"
    );
}

#[test]
fn read_error_admits_no_other_guest() {
    let (disk, guest, other) = (MemoryDisk::default(), still(), still());
    checkpointer(&guest, &disk).take().unwrap();
    let refused = || {
        let store = Store::with_backend(Box::new(disk.clone()), true);
        store.and_then(|store| Checkpointer::new(other.clone(), store)).unwrap_err().to_string()
    };
    disk.fail(DiskOp::Read, libc::EIO, 0);
    assert!(refused().contains("Input/output error"), "{}", refused());
    disk.heal();
    assert!(refused().contains("holds checkpoints of guest"), "{}", refused());
    checkpointer(&guest, &disk).take().unwrap();
}

#[derive(Clone, Debug)]
enum CrashAct {
    Write(u64, u8),
    Epoch,
    /// An epoch whose disk operation, or guest operation, fails.
    DiskFails(DiskOp, u32),
    GuestFails(Op),
    /// Another process takes over, and keeps this many epochs.
    Restart(Option<u64>),
    /// The store is compacted in between.
    Compact,
    /// Power is lost. The guest survives, as is possible in a test only, and gets a new process.
    Crash(u64),
}

fn act() -> impl Strategy<Value = CrashAct> {
    let disk_op = prop::sample::select(vec![
        DiskOp::Create,
        DiskOp::Write,
        DiskOp::Sync,
        DiskOp::Rename,
        DiskOp::SyncDir,
        DiskOp::Allocate,
        DiskOp::Truncate,
    ]);
    let guest_op = prop::sample::select(vec![Op::Pause, Op::Collect, Op::Save, Op::Resume]);
    prop_oneof![
        12 => (0u64..50, 0u8..4).prop_map(|(n, byte)| CrashAct::Write(n, byte)),
        4 => Just(CrashAct::Epoch),
        1 => (disk_op, 0u32..3).prop_map(|(op, after)| CrashAct::DiskFails(op, after)),
        1 => guest_op.prop_map(CrashAct::GuestFails),
        1 => prop::option::of(1u64..5).prop_map(CrashAct::Restart),
        1 => Just(CrashAct::Compact),
        1 => (0u64..1000).prop_map(CrashAct::Crash),
    ]
}

/// A guest whose checkpoints go to a disk that fails and crashes.
struct CrashRun {
    guest: Arc<MemoryGuest>,
    disk: MemoryDisk,
    keep: Option<u64>,
    /// `None` only while another process has the store.
    checkpointer: Option<Checkpointer>,
    /// Memory in the pause of each epoch that is durable.
    durable: BTreeMap<u64, Vec<u8>>,
}

impl CrashRun {
    fn new() -> Self {
        let (disk, guest) = (MemoryDisk::default(), still());
        let mut run =
            Self { guest, disk, keep: Some(2), checkpointer: None, durable: BTreeMap::new() };
        run.open();
        run
    }

    /// Starts another process that takes checkpoints.
    fn open(&mut self) {
        // The store is free before it is opened again.
        self.checkpointer = None;
        let mut checkpointer = checkpointer(&self.guest, &self.disk);
        checkpointer.keep(self.keep);
        checkpointer.log_bound(8 << 10);
        self.checkpointer = Some(checkpointer);
    }

    fn perform(&mut self, act: CrashAct) {
        match act {
            CrashAct::Write(n, byte) => write(&self.guest, n, byte, byte),
            CrashAct::Restart(keep) => {
                self.keep = keep;
                self.open();
            }
            CrashAct::Compact => {
                self.checkpointer = None;
                let store = Store::with_backend(Box::new(self.disk.clone()), true).unwrap();
                let has_manifest = self.disk.names().contains(&"manifest".to_owned());
                assert_eq!(store.compact().is_ok(), has_manifest);
                drop(store);
                self.open();
            }
            CrashAct::Crash(seed) => {
                self.disk = self.disk.crash(Survives::Torn(seed));
                self.open();
            }
            CrashAct::Epoch => self.take(|| ()),
            CrashAct::DiskFails(op, after) => {
                let disk = self.disk.clone();
                self.take(|| disk.fail(op, libc::EIO, after));
            }
            CrashAct::GuestFails(op) => {
                let guest = self.guest.clone();
                self.take(|| guest.faults().fail_next(op, 1));
            }
        }
    }

    /// Takes an epoch with the fault that `fail` sets.
    fn take(&mut self, fail: impl FnOnce()) {
        let Self { guest, disk, checkpointer, durable, .. } = self;
        guest.resume().unwrap();
        fail();
        let now = contents(guest);
        if let Ok(report) = checkpointer.as_mut().unwrap().take() {
            durable.insert(report.epoch, now);
        }
        disk.heal();
        [Op::Pause, Op::Collect, Op::Save, Op::Resume]
            .iter()
            .for_each(|&op| guest.faults().fail_next(op, 0));
        // The guest could not be resumed: nothing writes to the drive of a paused guest.
        guest.resume().unwrap();
    }

    fn check(&self) {
        let store = Store::with_backend(Box::new(self.disk.clone()), false).unwrap();
        let kept: Vec<u64> = store.epochs().unwrap().iter().map(|e| e.epoch).collect();
        for epoch in &kept {
            let (_, memory) = restored(&self.disk, Some(*epoch));
            // A failed epoch may be there after a crash. It is then complete, but the test does not
            // know its content.
            assert!(self.durable.get(epoch).is_none_or(|was| *was == memory), "epoch {epoch}");
        }
        if let Some((last, _)) = self.durable.last_key_value() {
            assert!(kept.contains(last) || kept.last() > Some(last), "{last} is not in {kept:?}");
        }
        store.verify(|_, _| ()).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_epoch_has_memory_of_its_pause(acts in prop::collection::vec(act(), 1..80)) {
        let mut run = CrashRun::new();
        acts.into_iter().for_each(|act| run.perform(act));
        run.check();
    }
}
