//! Verifies the backend's promises: no write escapes the trees, a restored state continues where it
//! was saved, and the end is final.

use std::path::Path;
use std::time::Duration;

use driftline_checkpoint::{Checkpointer, restore};
use driftline_dirty_tracker::FrameRun;
use driftline_guest::{
    Clock, DirtyLog, GuestContents, GuestError, GuestIdentity, Lifecycle, Paused, RunState,
    Stateful, VmId,
};
use driftline_store::Store;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use driftline_machine::config::{BackendKind, SerialSink};
use driftline_machine::testing::{payload_config, skip};

fn config(spec: &str, vcpus: u8) -> MachineConfig {
    MachineConfig {
        mem_bytes: 64 << 20,
        vcpus,
        boot: Boot::Payload(spec.into()),
        ..payload_config(BackendKind::Threads)
    }
}

fn machine(spec: &str, vcpus: u8, serial: SerialSink) -> Arc<ThreadMachine> {
    let host = HostConfig { serial, ..Default::default() };
    ThreadMachine::new(VmId::random(), config(spec, vcpus), &host).unwrap()
}

fn copy(guest: &ThreadMachine, runs: impl IntoIterator<Item = FrameRun>, to: &mut [u8]) {
    for run in runs {
        let at = run.start.gpa();
        let range = at as usize..(at + run.bytes()) as usize;
        guest.ram().read_slice(&mut to[range], GuestAddress(at)).unwrap();
    }
}

fn lines(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

#[test]
fn copy_and_epochs_equal_the_memory() {
    let guest = machine("payload,ws=8M,rate=max,pattern=random,fill=random", 2, SerialSink::Null);
    guest.resume().unwrap();
    let mut subscription = guest.subscribe("test").unwrap();
    let mut mirror = vec![0; 64 << 20];
    copy(&guest, guest.populated().unwrap(), &mut mirror);
    // The host decides how often the workers run, so the loop ends when enough was written.
    let (mut written, mut rounds) = (0, 0);
    let end = Instant::now() + Duration::from_secs(60);
    while rounds < 20 || written < 1000 {
        assert!(Instant::now() < end, "the guest has written {written} pages");
        std::thread::sleep(Duration::from_millis(5));
        guest.collect().unwrap();
        let epoch = subscription.drain();
        written += epoch.frames();
        copy(&guest, epoch.runs(), &mut mirror);
        epoch.commit();
        rounds += 1;
    }
    let paused = Paused::new(&*guest).unwrap();
    let epoch = paused.drain(&mut subscription).unwrap();
    copy(&guest, epoch.runs(), &mut mirror);
    let mut now = vec![0; 64 << 20];
    copy(&guest, guest.layout().slots().map(|s| s.run()), &mut now);
    assert!(mirror == now, "a write is in no epoch");
    epoch.commit();
    paused.keep_paused();
    assert!(subscription.drain().is_empty(), "a paused guest writes nothing");
}

#[test]
fn restored_state_continues_without_errors() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("serial");
    // At this rate the guest runs for more than a second, so it runs when it is paused.
    let spec = "payload,ws=4M,rate=128M,pattern=zipf,passes=40";
    let before = dir.path().join("before");
    let first = machine(spec, 3, SerialSink::File(before.clone()));
    first.resume().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    first.pause().unwrap();
    let state = first.save_state().unwrap();
    assert_eq!(state.len(), 3);
    let mut memory = vec![0; 64 << 20];
    copy(&first, first.populated().unwrap(), &mut memory);
    first.stop("it has moved");

    let second = machine(spec, 3, SerialSink::File(log.clone()));
    for run in first.populated().unwrap() {
        let range = run.start.gpa() as usize..run.end().gpa() as usize;
        second.ram().write_slice(&memory[range], GuestAddress(run.start.gpa())).unwrap();
    }
    second.restore_state(&state, Clock::Continue).unwrap();
    second.resume().unwrap();
    let end = second.wait_end(Some(Duration::from_secs(60)));
    assert_eq!(end, Some(EndReason::PowerOff), "{}", lines(&log));
    let log = lines(&log);
    assert!(!log.contains("payload ready"), "the first machine has printed it: {log}");
    drop(first);
    // On a busy host a worker may have finished before the pause.
    let done = |log: &str| log.matches(" done ").count();
    assert_eq!(done(&log) + done(&lines(&before)), 3, "{log}");
    assert_eq!(log.matches(" errors=0 ").count(), log.matches("errors=").count(), "{log}");
}

#[test]
fn epochs_copied_in_background_restore_correctly() {
    let dir = tempfile::tempdir().unwrap();
    // Each worker checks all its pages at its end.
    let guest = machine("payload,ws=16M,rate=max,pattern=random,seconds=3", 2, SerialSink::Null);
    if guest.write_protection().unwrap().is_none() {
        let name = "epochs_copied_in_background_restore_correctly";
        return skip(name, "this host has no userfaultfd for write protection");
    }
    guest.resume().unwrap();
    let store = Store::create_or_open(&dir.path().join("store")).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    checkpointer.background_copy_from(64);
    let mut copied_after = 0;
    for _ in 0..6 {
        std::thread::sleep(Duration::from_millis(30));
        copied_after += checkpointer.take().unwrap().copied_after_frames;
    }
    assert!(copied_after > 64, "{copied_after} frames copied after the pauses");
    guest.stop("there are copies");
    let store = checkpointer.store();
    let restores_correctly = |epoch: u64| {
        let log = dir.path().join(format!("of{epoch}"));
        let host = HostConfig { serial: SerialSink::File(log.clone()), ..Default::default() };
        let factory = crate::Factory::new(host);
        let (copy, _) = restore(store, Some(epoch), &factory, Clock::Continue).unwrap();
        copy.resume().unwrap();
        let end = copy.wait_end(Some(Duration::from_secs(60)));
        assert_eq!(end, Some(EndReason::PowerOff), "{}", lines(&log));
        let log = lines(&log);
        assert_eq!(log.matches(" done ").count(), 2, "{log}");
        assert_eq!(log.matches(" errors=0 ").count(), log.matches("errors=").count(), "{log}");
    };
    // Each guest runs until the time of its end.
    std::thread::scope(|scope| {
        for epoch in [2, 4, 6] {
            scope.spawn(move || restores_correctly(epoch));
        }
    });
}

#[test]
fn lost_page_shows_as_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("serial");
    // At this rate the guest runs for more than a second, so it runs when it is paused.
    let guest = machine("payload,ws=1M,rate=32M,passes=40", 1, SerialSink::File(log.clone()));
    guest.resume().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while guest.populated().unwrap().iter().map(|run| run.count).sum::<u64>() < 8 {
        assert!(Instant::now() < end, "the guest writes nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
    guest.pause().unwrap();
    let at = guest.populated().unwrap()[0].start.gpa() + 7 * 4096;
    guest.ram().write_slice(&[0; 4096], GuestAddress(at)).unwrap();
    guest.resume().unwrap();
    assert_eq!(guest.wait_end(Some(Duration::from_secs(60))), Some(EndReason::PowerOff));
    assert!(lines(&log).contains("kind="), "{}", lines(&log));
}

#[test]
fn requests_in_the_wrong_state_are_refused() {
    let guest = machine("payload,ws=1M,rate=4M", 1, SerialSink::Null);
    assert_eq!(guest.run_state(), RunState::Paused);
    guest.resume().unwrap();
    assert!(matches!(guest.resume(), Err(GuestError::State { state: RunState::Running, .. })));
    assert!(matches!(guest.save_state(), Err(GuestError::State { .. })));
    assert_eq!(guest.pause().unwrap(), RunState::Running);
    assert_eq!(guest.pause().unwrap(), RunState::Paused);
    let state = guest.save_state().unwrap();
    let has_run = guest.restore_state(&state, Clock::Continue).unwrap_err().to_string();
    assert!(has_run.contains("into a guest that has never run"), "{has_run}");
    assert_eq!(guest.wait_end(Some(Duration::from_millis(1))), None);
    guest.stop("the test says so");
    assert_eq!(guest.wait_end(None), Some(EndReason::Stopped("the test says so".into())));
    let e = guest.resume().unwrap_err();
    assert_eq!(e.to_string(), "cannot resume a guest that is stopped");
}

#[test]
fn hostile_states_and_configurations_are_refused() {
    let guest = machine("payload,ws=1M", 2, SerialSink::Null);
    let good = guest.save_state().unwrap();
    let refused = |sections: &[Section]| {
        guest.restore_state(sections, Clock::Continue).unwrap_err().to_string()
    };
    assert_eq!(refused(&good[..1]), "the state of worker 1 is malformed: it is missing");
    let mut bad = good.clone();
    bad[1].instance = 7;
    assert!(refused(&bad).contains("the guest has only 2 vCPUs"), "{}", refused(&bad));
    let mut bad = good.clone();
    bad[0].bytes[0] = 9;
    assert!(refused(&bad).contains("version 9"), "{}", refused(&bad));
    let mut bad = good.clone();
    bad[0].bytes.push(0);
    assert!(refused(&bad).contains("1 bytes follow"), "{}", refused(&bad));
    bad[0].bytes.truncate(3);
    assert!(refused(&bad).contains("the state of worker 0 is malformed"), "{}", refused(&bad));
    let late = SavedThreadWorker { guest_ns: u64::MAX, wall_ns: 0, worker: Default::default() };
    let bad = [state::encode(0, &late).unwrap(), good[1].clone()];
    assert!(refused(&bad).contains("its time is 18446744073709551615 ns"), "{}", refused(&bad));
    let alien = Section::new(driftline_guest::SectionTag(999), 0, vec![]);
    let bad = [good.clone(), vec![alien]].concat();
    assert!(refused(&bad).contains("unknown section 999"), "{}", refused(&bad));
    // The worker has the same share of pages, but another rate.
    let other = machine("payload,ws=1M,rate=4M", 2, SerialSink::Null);
    other.resume().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while other.populated().unwrap().is_empty() {
        assert!(Instant::now() < end, "the guest writes nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
    other.pause().unwrap();
    let bad = other.save_state().unwrap();
    assert!(refused(&bad).contains("its workload is not this guest's"), "{}", refused(&bad));
    guest.restore_state(&good, Clock::Continue).unwrap();

    let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
    let big = config("payload,ws=1G", 1);
    let e = ThreadMachine::new(VmId::random(), big, &host).err().unwrap().to_string();
    assert!(e.contains("working set takes 262144 pages"), "{e}");
    let many = config("payload,ws=4K", 2);
    let e = ThreadMachine::new(VmId::random(), many, &host).err().unwrap().to_string();
    assert!(e.contains("too few for 2 vCPUs"), "{e}");
}
