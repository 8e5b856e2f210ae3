//! The test guest detects the errors for which other tests rely on it.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use driftline_dirty_tracker::FrameRun;
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, Op, TestDisk};
use driftline_guest::{
    Clock, DirtyLog, GuestContents, GuestError, GuestFactory, GuestIdentity, HandOver, Lifecycle,
    NextHost, Paused, RunState, Section, SectionTag, Stateful, VmId,
};
use vm_memory::{Bytes, GuestAddress};

fn copy(from: &MemoryGuest, to: &MemoryGuest, runs: impl IntoIterator<Item = FrameRun>) {
    for run in runs {
        let mut bytes = vec![0; run.bytes() as usize];
        from.ram().read_slice(&mut bytes, GuestAddress(run.start.gpa())).unwrap();
        to.ram().write_slice(&bytes, GuestAddress(run.start.gpa())).unwrap();
    }
}

#[test]
fn copy_and_later_epochs_are_complete() {
    let source =
        MemoryGuest::start(MemoryConfig { writes_per_s: 0, ..MemoryConfig::small() }).unwrap();
    source.wait_for_writes(500);
    let mut epochs = source.subscribe("test").unwrap();
    let factory = MemoryGuestFactory::default();
    let copy_guest = factory.create(source.vm_id(), &source.config()).unwrap();
    copy(&source, &copy_guest, source.populated().unwrap());
    for _ in 0..20 {
        let epoch = epochs.drain();
        copy(&source, &copy_guest, epoch.runs());
        epoch.commit();
        std::thread::sleep(Duration::from_millis(1));
    }
    let paused = Paused::new(&*source).unwrap();
    let epoch = paused.drain(&mut epochs).unwrap();
    copy(&source, &copy_guest, epoch.runs());
    epoch.commit();
    copy_guest.restore_state(&paused.save_state().unwrap(), Clock::Continue).unwrap();
    copy_guest.verify().unwrap();
    assert_eq!(copy_guest.writes(), source.writes());
    paused.keep_paused();
    source.stop("the copy runs");
    copy_guest.resume().unwrap();
    copy_guest.wait_for_writes(2000);
    copy_guest.verify().unwrap();
}

#[test]
fn lost_torn_and_stray_frames_are_detected() {
    let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
    guest.wait_for_writes(2000);
    guest.pause().unwrap();
    guest.verify().unwrap();
    let corrupt = |at: u64, bytes: &[u8]| {
        let mut before = vec![0; bytes.len()];
        guest.ram().read_slice(&mut before, GuestAddress(at)).unwrap();
        guest.ram().write_slice(bytes, GuestAddress(at)).unwrap();
        let wrong = guest.verify().unwrap_err();
        assert_eq!((wrong.frames, wrong.first.len()), (1, 1), "{wrong}");
        assert_eq!(wrong.first[0].gfn.gpa(), at & !4095);
        guest.ram().write_slice(&before, GuestAddress(at)).unwrap();
        guest.verify().unwrap();
    };
    let full = guest.populated().unwrap()[0].start.gpa();
    corrupt(full, &[0; 4096]);
    corrupt(full + 4095, &{
        let mut last = [0];
        guest.ram().read_slice(&mut last, GuestAddress(full + 4095)).unwrap();
        [last[0] ^ 1]
    });
    corrupt(0x400_000 + 700 * 4096 + 5, &[1]);
}

#[test]
fn operations_fail_on_request_and_only_then() {
    let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
    let fails = |op, call: &dyn Fn() -> Result<(), GuestError>| {
        guest.faults().fail_next(op, 1);
        call().unwrap_err();
        call().unwrap();
    };
    fails(Op::Collect, &|| guest.collect().map(drop));
    fails(Op::Populated, &|| guest.populated().map(drop));
    fails(Op::Subscribe, &|| guest.subscribe("x").map(drop));
    fails(Op::Pause, &|| guest.pause().map(drop));
    fails(Op::Save, &|| guest.save_state().map(drop));
    fails(Op::Release, &|| guest.release(NextHost::Another));
    fails(Op::Detach, &|| guest.detach(NextHost::Another).map(drop));
    guest.faults().fail_next(Op::Attach, 1);
    guest.attach(b"lost");
    assert!(guest.received_packets().is_empty());
    guest.attach(b"packets");
    assert_eq!(guest.received_packets(), b"packets");
    fails(Op::Acquire, &|| guest.acquire());
    fails(Op::Resume, &|| guest.resume());
    assert_eq!(guest.run_state(), RunState::Running);
    assert!(matches!(
        guest.save_state(),
        Err(GuestError::State { request: "save", state: RunState::Running })
    ));
}

#[test]
fn drive_has_one_holder_and_counts_running_guests() {
    let source = MemoryGuest::start(MemoryConfig::small()).unwrap();
    let factory =
        MemoryGuestFactory { drive: source.drive().clone(), ..MemoryGuestFactory::default() };
    let other = factory.create(source.vm_id(), &source.config()).unwrap();
    other.acquire().unwrap_err();
    assert_eq!(source.drive().most_running(), 1);
    other.resume().unwrap();
    assert_eq!(source.drive().most_running(), 2);
    source.pause().unwrap();
    source.release(NextHost::Another).unwrap();
    other.acquire().unwrap_err();
    assert!(!other.drive().is_held(), "a failed acquire holds nothing");
    source.detach(NextHost::Another).unwrap();
    other.acquire().unwrap();
    assert!(Arc::ptr_eq(source.drive(), other.drive()) && other.drive().is_held());
}

#[test]
fn writes_of_read_only_drive_are_not_tracked() {
    let disks = [TestDisk::read_only("one", 4096), TestDisk::new("two", 4096)];
    let disks = disks.into_iter().map(Result::unwrap).collect();
    let guest = MemoryGuest::with_disks(VmId::random(), MemoryConfig::small(), disks).unwrap();
    let drives = guest.drives();
    let tracked = drives.iter().map(|drive| drive.subscribe("test").unwrap().is_some());
    assert!(tracked.eq([false, true]));
}

#[test]
fn hostile_configurations_and_states_are_refused() {
    let guest = MemoryGuest::new(VmId::random(), MemoryConfig::small()).unwrap();
    let config = guest.config();
    let factory = MemoryGuestFactory::default();
    for len in 0..config.len() {
        factory.create(guest.vm_id(), &config[..len]).unwrap_err();
    }
    for bit in 0..config.len() * 8 {
        let mut bent = config.clone();
        bent[bit / 8] ^= 1 << (bit % 8);
        // Some bits make another guest; none may exceed the bounds, or panic.
        let _ = factory.create(guest.vm_id(), &bent);
    }
    let mut sections = guest.save_state().unwrap();
    sections.push(Section::new(SectionTag(99), 0, vec![]));
    let e = guest.restore_state(&sections, Clock::Continue).unwrap_err();
    assert_eq!(
        e.to_string(),
        "unknown section 99 cannot be used on this host: this guest has no such thing"
    );
    guest.restore_state(&sections[..1], Clock::Continue).unwrap_err();
    sections[2].must_understand = false;
    guest.restore_state(&sections, Clock::Continue).unwrap();
}
