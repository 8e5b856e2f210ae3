//! A restore to storage that never answers can be ended.
#![allow(clippy::unwrap_used)]

mod common;
#[allow(dead_code, reason = "this test lets writes hang alone")]
#[path = "common/stuck.rs"]
mod storage;

use common::{Place, Vmm, wait_for};
use driftline_machine::testing::{kvm_or_skip, skip};
use rustix::process::{Pid, Signal, kill_process};
use storage::StuckStorage;

const DISK_BYTES: usize = 1 << 20;

/// Returns whether the whole process has ended, except for threads that wait in the kernel for the
/// storage: these cannot be killed.
fn has_ended(vmm: &Vmm<'_>) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", vmm.pid()));
    tasks.into_iter().flatten().flatten().all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X', 'D']))
    })
}

#[test]
fn sigterm_ends_a_restore_whose_writes_hang() {
    let test = "sigterm_ends_a_restore_whose_writes_hang";
    let place = Place::new();
    if !kvm_or_skip(test) {
        return;
    }
    let Ok(storage) = StuckStorage::new(DISK_BYTES).inspect_err(|why| skip(test, why)) else {
        return;
    };
    std::fs::write(place.path("own"), vec![7; DISK_BYTES]).unwrap();
    let (own, store) = (format!("path={}", place.text("own")), place.text("store"));
    let guest = ["--mem", "32M", "--guest", "payload,ws=1M", "--disk", &own];
    let source = Vmm::run(&place, "source", &guest);
    source.tell(&["checkpoint", "--store", &store]);
    storage.answer_only_writes(0);
    let disk = format!("path={}", storage.disk().display());
    let restore = ["restore", "--store", &store, "--disk", &disk];
    // The storage is dropped first.
    let held = (storage, Vmm::start(&place, "restored", &restore));
    let (storage, restored) = &held;
    wait_for("a write that hangs", || (storage.stuck() > 0).then_some(()));
    kill_process(Pid::from_raw(restored.pid() as i32).unwrap(), Signal::TERM).unwrap();
    wait_for("the end", || has_ended(restored).then_some(()));
}
