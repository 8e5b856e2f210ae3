//! Storage that never answers: no request, and no end of the process, waits for it.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/stuck.rs"]
mod storage;

use std::time::{Duration, Instant};

use common::{Place, Vmm, receiver, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use storage::StuckStorage;
use vmm::testing::{kvm_or_skip, skip};

const DISK_BYTES: usize = 1 << 20;
/// More than any of it takes; what waited for the storage would wait for ever.
const LIMIT: Duration = Duration::from_secs(50);

/// A guest with a disk on such storage, which goes first: a thread that waits for a flush cannot be killed.
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

    /// Waits until all of the process has ended but threads that wait in the kernel for the storage.
    fn await_end(&self) {
        let stat = format!("/proc/{}/stat", self.vmm.pid());
        wait_for("the end", || {
            let stat = std::fs::read_to_string(&stat).unwrap_or_default();
            let state = stat.rsplit_once(") ").map(|(_, rest)| rest.starts_with('Z'));
            state.unwrap_or(true).then_some(())
        });
    }
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
    // The flush before the pause is answered, the one in the hand-over is not; then not even the first.
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
    in_time("the end", || world.await_end());
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
    let pid = Pid::from_raw(vmm.pid() as i32).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    in_time("the end", || world.await_end());
    assert_ne!(sending.wait().unwrap().code(), Some(0), "it did not move");
}
