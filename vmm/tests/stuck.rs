//! Storage that never answers: no request, and no end of the process, waits for it.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/script.rs"]
mod script;
#[path = "common/stuck.rs"]
mod storage;

use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{Place, Vmm, driftline, receiver, text, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use script::{MEM_BYTES, Script, Target};
use storage::StuckStorage;
use vmm::testing::{kvm_or_skip, skip};

const DISK_BYTES: usize = 1 << 20;
/// More than any of it takes; what waited for the storage would wait for ever.
const LIMIT: Duration = Duration::from_secs(50);

/// A guest with a disk on such storage, which goes first: a thread that waits for a flush cannot be
/// killed.
struct World<'p> {
    storage: StuckStorage,
    vmm: Vmm<'p>,
}

impl<'p> World<'p> {
    fn or_skip(place: &'p Place, test: &str) -> Option<Self> {
        if !kvm_or_skip(test) {
            return None;
        }
        let storage = StuckStorage::new(DISK_BYTES).inspect_err(|why| skip(test, why)).ok()?;
        let guest = ["--mem", "32M", "--guest", "payload,ws=1M", "--disk"];
        let vmm = Vmm::run(place, "source", &[&guest[..], &[&disk(&storage)]].concat());
        Some(Self { storage, vmm })
    }

    /// A guest that flushes such a disk, which does not come to an end.
    fn in_a_flush(place: &'p Place, test: &str) -> Option<Self> {
        if !kvm_or_skip(test) {
            return None;
        }
        let storage = StuckStorage::new(DISK_BYTES).inspect_err(|why| skip(test, why)).ok()?;
        let mut script = Script::default();
        script.flush(Target { index: 0, queue: 0, label: "virtio-blk \"disk0\"" });
        std::fs::write(place.path("kernel"), script.kernel()).unwrap();
        let (kernel, memory) = (place.text("kernel"), MEM_BYTES.to_string());
        let guest = ["--mem", &memory, "--kernel", &kernel, "--disk", &disk(&storage)];
        storage.answer_only(0);
        let vmm = Vmm::run(place, "source", &guest);
        wait_for("the guest's flush", || (storage.stuck() > 0).then_some(()));
        Some(Self { storage, vmm })
    }
}

/// Waits until all of the process has ended but threads that wait in the kernel for the storage: those
/// cannot be killed.
fn await_end(vmm: &Vmm<'_>) {
    let has_ended = |stat: String| {
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest.starts_with(['Z', 'X', 'D']));
        state.unwrap_or(true)
    };
    let tasks = format!("/proc/{}/task", vmm.pid());
    wait_for("the end", || {
        let tasks = std::fs::read_dir(&tasks).into_iter().flatten().flatten();
        let mut stats = tasks.map(|task| std::fs::read_to_string(task.path().join("stat")));
        stats.all(|stat| has_ended(stat.unwrap_or_default())).then_some(())
    });
}

fn sigterm(vmm: &Vmm<'_>) {
    kill_process(Pid::from_raw(vmm.pid() as i32).unwrap(), Signal::TERM).unwrap();
}

fn disk(storage: &StuckStorage) -> String {
    format!("path={}", storage.disk().display())
}

/// `work`, in time.
fn in_time<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let done = work();
    assert!(began.elapsed() < LIMIT, "{what} took {:?}", began.elapsed());
    done
}

#[test]
fn hand_over_fails_where_a_flush_hangs() {
    let place = Place::new();
    let Some(mut world) = World::or_skip(&place, "hand_over_fails_where_a_flush_hangs") else {
        return;
    };
    let World { storage, vmm } = &mut world;
    // The flush before the pause is answered, the one in the hand-over is not; then not even the
    // first.
    for answered in [1, 0] {
        storage.answer_only(answered);
        let (_receiver, address) = receiver(&place, "destination", &["--disk", &disk(storage)]);
        let said = in_time("a migration", || vmm.refuse(4, &["send-migration", &address]));
        assert!(said.contains("disk \"disk0\"") && said.contains("durable"), "{said}");
        assert!(storage.stuck() > 0, "no flush hung");
        assert_eq!(vmm.state(), "running");
        let before = vmm.reports();
        vmm.await_progress(1, &before);
    }
    // Nobody else gets the disk while its flush is under way (I7).
    let guest = ["run", "--serial", "null", "--mem", "32M", "--guest", "payload,ws=1M"];
    let said = common::fail(1, &[&guest[..], &["--disk", &disk(storage)]].concat());
    assert!(said.contains("in use by another"), "{said}");
    in_time("a pause", || vmm.tell(&["pause"]));
    in_time("a resume", || vmm.tell(&["resume"]));
    in_time("a stop", || vmm.tell(&["stop"]));
    in_time("the end", || await_end(&world.vmm));
}

#[test]
fn sigterm_ends_a_process_whose_flush_hangs() {
    let place = Place::new();
    let Some(world) = World::or_skip(&place, "sigterm_ends_a_process_whose_flush_hangs") else {
        return;
    };
    let World { storage, vmm } = &world;
    storage.answer_only(1);
    let (_receiver, address) = receiver(&place, "destination", &["--disk", &disk(storage)]);
    let socket = vmm.socket();
    let mut sending =
        common::driftline(&["send-migration", &address, "--api-sock", &socket]).spawn().unwrap();
    wait_for("the flush in the hand-over", || (storage.stuck() > 0).then_some(()));
    sigterm(vmm);
    in_time("the end", || await_end(&world.vmm));
    assert_ne!(sending.wait().unwrap().code(), Some(0), "it did not move");
}

#[test]
fn guest_in_a_flush_that_hangs_is_named_and_stopped() {
    let place = Place::new();
    let test = "guest_in_a_flush_that_hangs_is_named_and_stopped";
    let Some(world) = World::in_a_flush(&place, test) else { return };
    let vmm = &world.vmm;
    let said = in_time("a pause", || vmm.refuse(1, &["pause"]));
    assert!(said.contains("\"disk0\""), "{said}");
    assert_eq!(vmm.state(), "running");
    let store = place.text("store");
    let said = in_time("a checkpoint", || vmm.refuse(4, &["checkpoint", "--store", &store]));
    assert!(said.contains("\"disk0\""), "{said}");
    assert_eq!(vmm.state(), "running");
    // A run whose checkpoints wait for the disk ends with the one under way.
    vmm.tell(&["checkpoint", "--store", &store, "--every", "1ms", "--detach"]);
    let said = vmm.refuse(1, &["checkpoint", "--stop", "--timeout", "1s"]);
    assert!(said.contains("was told to end, and has not in 1s"), "{said}");
    in_time("the end of the run", || vmm.tell(&["checkpoint", "--stop", "--timeout", "60s"]));
    in_time("a stop", || vmm.tell(&["stop"]));
    in_time("the end", || await_end(vmm));
    assert!(vmm.said().contains("\"disk0\""), "{}", vmm.said());
}

#[test]
fn sigterm_ends_a_guest_in_a_flush_that_hangs() {
    let place = Place::new();
    let test = "sigterm_ends_a_guest_in_a_flush_that_hangs";
    let Some(world) = World::in_a_flush(&place, test) else { return };
    sigterm(&world.vmm);
    in_time("the end", || await_end(&world.vmm));
    assert!(world.vmm.said().contains("\"disk0\""), "{}", world.vmm.said());
}

/// A guest with a disk of its own, and storage for the copy, whose writes are not answered.
fn with_a_copy<'p>(place: &'p Place, test: &str) -> Option<(StuckStorage, Vmm<'p>)> {
    if !kvm_or_skip(test) {
        return None;
    }
    let storage = StuckStorage::new(DISK_BYTES).inspect_err(|why| skip(test, why)).ok()?;
    std::fs::write(place.path("own"), vec![7; DISK_BYTES]).unwrap();
    let own = format!("path={}", place.text("own"));
    let source =
        Vmm::run(place, "source", &["--mem", "32M", "--guest", "payload,ws=1M", "--disk", &own]);
    storage.answer_only_writes(0);
    Some((storage, source))
}

#[test]
fn receiver_refuses_where_writes_to_a_copy_hang() {
    let place = Place::new();
    let test = "receiver_refuses_where_writes_to_a_copy_hang";
    let Some((storage, source)) = with_a_copy(&place, test) else { return };
    let before = source.await_progress(1, &[]);
    let copy = format!("{},id=disk0,copy", disk(&storage));
    let (receiving, to) = receiver(&place, "receiving", &["--disk", &copy]);
    // The storage goes first.
    let held = (storage, receiving);
    let (storage, receiving) = &held;
    let said =
        in_time("a migration", || source.refuse(4, &["send-migration", &to, "--copy-disks"]));
    assert!(said.contains("copying disk \"disk0\" failed: writing its copy: "), "{said}");
    assert!(said.contains("the guest continues here"), "{said}");
    assert!(storage.stuck() > 0, "no write hung");
    wait_for("the receiver to wait on", || {
        receiving.said().contains("waiting for another source").then_some(())
    });
    receiving.tell(&["stop"]);
    in_time("the end", || await_end(receiving));
    let said = receiving.said();
    assert!(said.contains("copying disk \"disk0\" failed"), "{said}");
    assert_eq!(source.state(), "running");
    source.await_progress(1, &before);
}

#[test]
fn receiver_whose_copy_hangs_can_be_stopped() {
    type How = fn(&Vmm<'_>);
    let hows: [How; 2] = [|vmm| _ = vmm.tell(&["stop"]), sigterm];
    for how in hows {
        let place = Place::new();
        let test = "receiver_whose_copy_hangs_can_be_stopped";
        let Some((storage, source)) = with_a_copy(&place, test) else { return };
        let before = source.await_progress(1, &[]);
        let copy = format!("{},id=disk0,copy", disk(&storage));
        let (receiving, to) = receiver(&place, "receiving", &["--disk", &copy]);
        // The storage goes first.
        let held = (storage, receiving);
        let (storage, receiving) = &held;
        let sending =
            driftline(&["send-migration", &to, "--copy-disks", "--api-sock", &source.socket()])
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
        wait_for("a write that hangs", || (storage.stuck() > 0).then_some(()));
        how(receiving);
        in_time("the end", || await_end(receiving));
        let sent = sending.wait_with_output().unwrap();
        assert_eq!(sent.status.code(), Some(4), "{}", text(&sent.stderr));
        assert_eq!(source.state(), "running");
        source.await_progress(1, &before);
    }
}

#[test]
fn receiver_that_cannot_make_a_copy_can_be_stopped() {
    let place = Place::new();
    let test = "receiver_that_cannot_make_a_copy_can_be_stopped";
    let Some((storage, source)) = with_a_copy(&place, test) else { return };
    let before = source.await_progress(1, &[]);
    // Its size is made durable before anything comes: the receiving thread hangs itself.
    storage.answer_only(0);
    let copy = format!("{},id=disk0,copy", disk(&storage));
    let (receiving, to) = receiver(&place, "receiving", &["--disk", &copy]);
    // The storage goes first.
    let held = (storage, receiving);
    let (storage, receiving) = &held;
    let socket = source.socket();
    let send = ["send-migration", &to, "--copy-disks", "--api-sock", &socket];
    let sending = driftline(&send).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for("a flush that hangs", || (storage.stuck() > 0).then_some(()));
    receiving.tell(&["stop"]);
    in_time("the end", || await_end(receiving));
    assert!(receiving.said().contains("no guest was received"), "{}", receiving.said());
    let sent = sending.wait_with_output().unwrap();
    assert_eq!(sent.status.code(), Some(4), "{}", text(&sent.stderr));
    assert_eq!(source.state(), "running");
    source.await_progress(1, &before);
}
