//! Epochs copied after the guest has resumed equal a copy made in the pause.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::scripted::{Scripted, ScriptedGuest, Write};
use driftline_checkpoint::{Checkpointer, EpochStep, StagingLimits, restore};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, Op, image, repeats};
use driftline_guest::{Clock, GuestIdentity, Lifecycle, RunState, VmId};
use driftline_store::Store;
use driftline_store::testing::{DiskOp, MemoryDisk};
use proptest::prelude::*;

fn writes() -> impl Strategy<Value = Vec<Write>> {
    // Crowded, so that writes often hit protected frames.
    let frame = prop_oneof![0u64..60, 290u64..320, 0u64..1024];
    let write = (frame, any::<u8>(), 0u8..8, any::<bool>());
    let write = write.prop_map(|(frame, value, phase, slow)| Write { frame, value, phase, slow });
    prop::collection::vec(write, 0..400)
}

fn limits(frames: u64) -> StagingLimits {
    StagingLimits { first_bytes: frames * 4096, most_bytes: frames * 4096 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    fn each_epoch_is_what_memory_was(
        script in writes(),
        staged in 2u64..80,
        // Few writes happen before the first frame is protected, so larger numbers are seldom
        // reached.
        background_from in prop_oneof![3 => Just(1u64), 1 => 1u64..20],
        saved in 0u64..300,
    ) {
        let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
        guest.resume().unwrap();
        let scripted = Scripted::new(guest.clone(), script, saved);
        let store = Store::with_backend(Box::new(MemoryDisk::default()), true).unwrap();
        let scripted_guest = Arc::new(ScriptedGuest(scripted.clone()));
        let limits = limits(staged);
        let mut checkpointer = Checkpointer::with_staging(scripted_guest, store, limits).unwrap();
        checkpointer.background_copy_from(background_from);
        for _ in 0..4 {
            let report = checkpointer.take().unwrap();
            COPIED_AFTER.fetch_add(report.copied_after_frames, Ordering::Relaxed);
            let left = scripted.protected_and_waiting();
            prop_assert_eq!(left, (0, 0), "a writer still waits after the epoch");
            let factory = MemoryGuestFactory::default();
            let (copy, _) = restore(checkpointer.store(), None, &factory, Clock::Continue).unwrap();
            let (is, was) = (image(&copy), scripted.memory_at_pause());
            let wrong = is.chunks(4096).zip(was.chunks(4096)).position(|(is, was)| is != was);
            prop_assert_eq!(wrong, None, "epoch {} has another content of a frame", report.epoch);
        }
    }
}

#[test]
fn background_copy_equals_memory_of_the_pause() {
    each_epoch_is_what_memory_was();
    let copied_after = COPIED_AFTER.load(Ordering::Relaxed);
    assert!(copied_after >= u64::from(cases()), "{copied_after} frames copied in the background");
}

/// Frames that all cases of the property copied after the guest had resumed.
static COPIED_AFTER: AtomicU64 = AtomicU64::new(0);

fn cases() -> u32 {
    repeats(20, 400)
}

/// Starts four writers that write as fast as they can to most of memory.
fn fastest() -> Arc<MemoryGuest> {
    let config =
        MemoryConfig { writers: 4, working_set: 900, writes_per_s: 0, ..MemoryConfig::small() };
    MemoryGuest::start(config).unwrap()
}

#[track_caller]
fn continues(guest: &MemoryGuest) {
    assert_eq!((guest.run_state(), guest.protected()), (RunState::Running, 0));
    guest.wait_for_writes(1000);
}

#[test]
fn epochs_of_a_fast_writer_are_whole() {
    let (guest, disk) = (fastest(), MemoryDisk::default());
    let store = Store::with_backend(Box::new(disk), true).unwrap();
    let mut checkpointer = Checkpointer::with_staging(guest.clone(), store, limits(200)).unwrap();
    checkpointer.background_copy_from(16);
    let (mut copied_after, mut waits) = (0, 0);
    for _ in 0..repeats(30, 300) {
        let report = checkpointer.take().unwrap();
        (copied_after, waits) = (copied_after + report.copied_after_frames, waits + report.waits);
        continues(&guest);
        let factory = MemoryGuestFactory::default();
        let (copy, _) = restore(checkpointer.store(), None, &factory, Clock::Continue).unwrap();
        copy.verify().unwrap();
    }
    guest.verify().unwrap();
    assert!(
        copied_after > 0 && waits > 0,
        "{copied_after} frames copied in the background, {waits} waits"
    );
}

#[test]
fn failed_copy_stalls_no_writer_and_loses_nothing() {
    let (guest, disk) = (fastest(), MemoryDisk::default());
    let store = Store::with_backend(Box::new(disk.clone()), true).unwrap();
    let mut checkpointer = Checkpointer::with_staging(guest.clone(), store, limits(200)).unwrap();
    checkpointer.background_copy_from(16);
    checkpointer.take().unwrap();
    let whole = |checkpointer: &mut Checkpointer| {
        continues(&guest);
        checkpointer.take().unwrap();
        let factory = MemoryGuestFactory::default();
        let (copy, _) = restore(checkpointer.store(), None, &factory, Clock::Continue).unwrap();
        copy.verify().unwrap();
    };
    for op in [Op::Pause, Op::Save, Op::Collect] {
        continues(&guest);
        guest.faults().fail_next(op, 1);
        checkpointer.take().unwrap_err();
        whole(&mut checkpointer);
    }
    for nth in 0..12 {
        continues(&guest);
        disk.fail(DiskOp::Write, libc::EIO, nth);
        let failed = checkpointer.take().is_err();
        disk.heal();
        assert!(failed || nth > 2, "write {nth} of an epoch of hundreds of frames");
        whole(&mut checkpointer);
    }
    let copying = [Op::Unprotect, Op::Awaited, Op::Awaited, Op::Awaited];
    let copying = copying.map(|op| (op, EpochStep::CopyInBackground));
    for (op, step) in copying.into_iter().chain([(Op::Protect, EpochStep::Protect)]) {
        continues(&guest);
        guest.faults().fail_next(op, 1);
        let e = checkpointer.take().unwrap_err();
        assert_eq!(e.step, step, "{e}");
        whole(&mut checkpointer);
        // This checkpointer does not use write protection for a while; another one does.
        continues(&guest);
        assert_eq!(checkpointer.take().unwrap().copied_after_frames, 0);
        drop(checkpointer);
        let store = Store::with_backend(Box::new(MemoryDisk::default()), true).unwrap();
        checkpointer = Checkpointer::with_staging(guest.clone(), store, limits(200)).unwrap();
        checkpointer.background_copy_from(16);
        whole(&mut checkpointer);
    }
    guest.verify().unwrap();
}

#[test]
fn dead_copy_thread_leaves_nothing_protected() {
    let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
    guest.resume().unwrap();
    let write = |phase: u8, frame| Write { frame, value: phase + 1, phase, slow: false };
    let script = (0..9).flat_map(|phase| (0..30).map(move |frame| write(phase, frame)));
    let scripted = Scripted::new(guest, script.collect(), 7);
    let store = Store::with_backend(Box::new(MemoryDisk::default()), true).unwrap();
    let scripted_guest = Arc::new(ScriptedGuest(scripted.clone()));
    let mut checkpointer = Checkpointer::with_staging(scripted_guest, store, limits(200)).unwrap();
    checkpointer.background_copy_from(1);
    let mut copied_after = checkpointer.take().unwrap().copied_after_frames;
    copied_after += checkpointer.take().unwrap().copied_after_frames;
    assert!(copied_after > 0);
    scripted.fail_next_query();
    let e = checkpointer.take().unwrap_err();
    assert_eq!((e.step, e.guest), (EpochStep::CopyInBackground, RunState::Running), "{e}");
    assert!(e.to_string().contains("the script says so"), "{e}");
    assert_eq!(scripted.protected_and_waiting(), (0, 0));
    for _ in 0..2 {
        checkpointer.take().unwrap();
        let factory = MemoryGuestFactory::default();
        let (copy, _) = restore(checkpointer.store(), None, &factory, Clock::Continue).unwrap();
        assert!(image(&copy) == scripted.memory_at_pause());
    }
}

#[test]
fn failed_write_protection_is_retried_later() {
    let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
    guest.resume().unwrap();
    let store = Store::with_backend(Box::new(MemoryDisk::default()), true).unwrap();
    let mut checkpointer = Checkpointer::with_staging(guest.clone(), store, limits(200)).unwrap();
    checkpointer.background_copy_from(1);
    let write = |value| guest.write(guest.layout().slots().next().unwrap().base, &[value]);
    checkpointer.take().unwrap();
    guest.faults().fail_next(Op::Protect, 1);
    write(1).unwrap();
    assert_eq!(checkpointer.take().unwrap_err().step, EpochStep::Protect);
    // At first, write protection cannot be set up.
    guest.faults().fail_next(Op::WriteProtection, 1);
    let copied_after = (0..202).map(|n| {
        write(n).unwrap();
        checkpointer.take().unwrap().copied_after_frames
    });
    let copied_after: Vec<u64> = copied_after.collect();
    assert_eq!((copied_after[..201].iter().sum::<u64>(), copied_after[201]), (0, 1));
}

#[test]
fn unprotectable_guest_is_copied_in_the_pause() {
    let guest = fastest();
    guest.faults().fail_next(Op::WriteProtection, 1);
    let store = Store::with_backend(Box::new(MemoryDisk::default()), true).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    checkpointer.background_copy_from(1);
    for _ in 0..3 {
        continues(&guest);
        assert_eq!(checkpointer.take().unwrap().copied_after_frames, 0);
    }
}
