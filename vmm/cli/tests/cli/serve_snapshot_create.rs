//! `driftline serve` with snapshots as they are created: full, as diffs, and of running guests.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use driftline_machine::testing::kvm_or_skip;
use rustix::fs::{SeekFrom, seek};
use serde_json::{Value, json};

use crate::common::snapshots::{Instance, MIB, RESUME, create_body, snapshot};
use crate::common::{TestDir, side_by_side, wait_for};

/// Returns `body` with `"live": true`.
fn live(body: &str) -> String {
    let mut body: Value = serde_json::from_str(body).unwrap();
    body["live"] = json!(true);
    body.to_string()
}

/// Copies all data of `diff` over `base`, as Firecracker's editor of snapshots does.
fn rebase(base: &File, diff: &File) -> u64 {
    let (mut at, mut copied) = (0, 0);
    while let Ok(start) = seek(diff, SeekFrom::Data(at)) {
        at = seek(diff, SeekFrom::Hole(start)).unwrap();
        let mut data = vec![0; (at - start) as usize];
        diff.read_exact_at(&mut data, start).unwrap();
        base.write_all_at(&data, start).unwrap();
        copied += at - start;
    }
    copied
}

#[test]
fn diffs_merge_into_the_guest_as_it_is() {
    if !kvm_or_skip("diffs_merge_into_the_guest_as_it_is") {
        return;
    }
    let tmp = TestDir::new();
    let guest = Instance::boot(&tmp, true).start();
    guest.pause();
    guest.create("Full", ("state-1", "memory"));
    guest.resume();
    guest.pause();
    // A diff that is merged in place.
    guest.create("Diff", ("state-2", "memory"));
    fs::copy(tmp.path("memory"), tmp.path("rebased")).unwrap();
    let base = File::options().write(true).open(tmp.path("rebased")).unwrap();
    // Diffs into files of their own, which have no more than the guest has written. The log that
    // shows the guest's progress may lag behind, so the first of these diffs may be small.
    wait_for("a diff with all pages of the working set", || {
        guest.resume();
        guest.pause();
        guest.create("Diff", ("state-3", "diff"));
        let diff = File::open(tmp.path("diff")).unwrap();
        assert_eq!(diff.metadata().unwrap().len(), 32 * MIB);
        fs::remove_file(tmp.path("diff")).unwrap();
        let written = rebase(&base, &diff);
        assert!(written < 3 * MIB, "{written} bytes of a working set of 1 MiB");
        (written >= MIB).then_some(())
    });
    drop(guest);
    Instance::load(&tmp, "second", ("state-2", "memory"), json!({})).resume();
    Instance::load(&tmp, "third", ("state-3", "rebased"), json!({})).resume();
}

#[test]
fn first_diff_of_a_booted_guest_is_complete() {
    if !kvm_or_skip("first_diff_of_a_booted_guest_is_complete") {
        return;
    }
    // Without tracking, every Diff has all memory.
    side_by_side([true, false], |tracked| {
        let tmp = TestDir::new();
        let guest = Instance::boot(&tmp, tracked).start();
        guest.pause();
        guest.create("Diff", ("state", "memory"));
        guest.resume();
        guest.pause();
        if !tracked {
            guest.create("Diff", ("state", "memory"));
        }
        drop(guest);
        Instance::load(&tmp, "second", ("state", "memory"), json!({})).resume();
    });
}

#[test]
fn live_snapshots_of_a_running_guest_load() {
    if !kvm_or_skip("live_snapshots_of_a_running_guest_load") {
        return;
    }
    side_by_side([true, false], |tracked| {
        let tmp = TestDir::new();
        let first = Instance::boot(&tmp, tracked).start();
        for (kind, clone) in [("Full", "second"), ("Diff", "third")] {
            let body = create_body(&tmp, kind, ("state", "memory"));
            let text = first.vmm.refusal("PUT", "/snapshot/create", &body);
            assert!(text.contains("save/restore unavailable while running"), "{text}");
            let before = first.progress();
            first.vmm.done("PUT", "/snapshot/create", &live(&body));
            assert_eq!(first.vmm.get("/")["state"], "Running");
            let after = first.progress();
            let clone = Instance::load(&tmp, clone, ("state", "memory"), json!({}));
            for (id, report) in clone.resume().iter().enumerate() {
                assert!(report.t_ms > before[id].t_ms, "{report:?} {before:?}");
            }
            assert!(after.iter().all(|report| report.errors == 0), "{after:?}");
        }
        // Of a paused guest, the field changes nothing.
        first.pause();
        first.vmm.done("PUT", "/snapshot/create", &live(&create_body(&tmp, "Full", ("s", "m"))));
        assert_eq!(first.vmm.get("/")["state"], "Paused");
        Instance::load(&tmp, "fourth", ("s", "m"), json!({})).resume();
        first.resume();
    });
}

#[test]
fn live_snapshot_refuses_a_drive_that_changes() {
    if !kvm_or_skip("live_snapshot_refuses_a_drive_that_changes") {
        return;
    }
    let tmp = TestDir::new();
    let guest = Instance::boot(&tmp, true);
    guest.add_drive();
    let guest = guest.start();
    let body = create_body(&tmp, "Full", ("state", "memory"));
    let text = guest.vmm.refusal("PUT", "/snapshot/create", &live(&body));
    assert!(text.contains("drive \"data\"") && text.contains("do not set `live`"), "{text}");
    assert!(!tmp.path("state").exists() && !tmp.path("memory").exists());
    guest.progress();
    guest.pause();
    guest.vmm.done("PUT", "/snapshot/create", &live(&body));
}

#[test]
fn snapshot_over_its_own_memory_file_spares_clones() {
    if !kvm_or_skip("snapshot_over_its_own_memory_file_spares_clones") {
        return;
    }
    let tmp = snapshot();
    let tracked = json!({ "track_dirty_pages": true, "resume_vm": true });
    let one = Instance::load(&tmp, "one", ("state", "memory"), tracked);
    let two = Instance::load(&tmp, "two", ("state", "memory"), json!({}));
    assert_eq!(one.vmm.get("/machine-config")["track_dirty_pages"], true);
    for kind in ["Diff", "Full", "Diff"] {
        one.progress();
        one.pause();
        one.create(kind, ("state", "memory"));
        one.vmm.done("PATCH", "/vm", RESUME);
    }
    one.progress();
    two.resume();
    Instance::load(&tmp, "three", ("state", "memory"), json!({})).resume();
}

#[test]
fn diff_over_another_guests_memory_is_refused() {
    if !kvm_or_skip("diff_over_another_guests_memory_is_refused") {
        return;
    }
    let tmp = TestDir::new();
    let first = Instance::boot(&tmp, true).start();
    first.pause();
    first.create("Full", ("state", "memory"));
    let second = Instance::load(&tmp, "second", ("state", "memory"), json!({}));
    first.resume();
    first.pause();
    let diff = create_body(&tmp, "Diff", ("state-2", "memory"));
    let text = first.vmm.refusal("PUT", "/snapshot/create", &diff);
    assert!(text.contains("is in use: a guest is loaded from it"), "{text}");
    second.resume();
    drop(second);
    first.create("Diff", ("state-2", "memory"));
    Instance::load(&tmp, "third", ("state-2", "memory"), json!({})).resume();
}

#[test]
fn failed_snapshot_leaves_the_guest_paused() {
    if !kvm_or_skip("failed_snapshot_leaves_the_guest_paused") {
        return;
    }
    let tmp = TestDir::new();
    let guest = Instance::boot(&tmp, true).start();
    let refusal = |files| {
        let text = guest.vmm.refusal("PUT", "/snapshot/create", &create_body(&tmp, "Full", files));
        text.strip_prefix("Create snapshot error: ").unwrap().to_owned()
    };
    let running = "Cannot save the microVM state: Operation not allowed: save/restore unavailable \
                   while running";
    assert_eq!(refusal(("state", "memory")), running);
    assert!(!tmp.path("state").exists() && !tmp.path("memory").exists());
    guest.pause();
    let not_found = "No such file or directory (os error 2)";
    let memory = format!("Cannot perform open on the memory backing file: {not_found}");
    assert_eq!(refusal(("state", "none/memory")), memory);
    let state = format!("Cannot perform open on the snapshot backing file: {not_found}");
    assert_eq!(refusal(("none/state", "memory")), state);
    let same = refusal(("state", "state"));
    assert!(same.contains("cannot be both the memory file and the state file"), "{same}");
    let other = refusal(("state", "."));
    assert!(other.contains("cannot be a file of a snapshot"), "{other}");
    assert!(!tmp.path("state").exists() && !tmp.path("memory").exists());
    assert_eq!(guest.vmm.get("/")["state"], "Paused");
    guest.create("Full", ("state", "memory"));
    guest.resume();
    Instance::load(&tmp, "second", ("state", "memory"), json!({})).resume();
}
