//! `driftline serve` with guests that are loaded from snapshots. The guest is the payload, which
//! checks its memory.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use driftline_images::PayloadReport;
use driftline_machine::testing::{kvm_or_skip, skip};
use rustix::process::Signal;
use serde_json::json;

use crate::common::snapshots::{Instance, MIB, NOT_RESTORED, create_body, load_body, snapshot};
use crate::common::{TIMEOUT, TestDir, succeed, wait_for};

#[test]
fn loaded_guest_continues_where_it_was_paused() {
    if !kvm_or_skip("loaded_guest_continues_where_it_was_paused") {
        return;
    }
    let tmp = TestDir::new();
    let first = Instance::boot(&tmp, false);
    first.add_drive();
    let balloon = json!({ "amount_mib": 1, "deflate_on_oom": true, "free_page_hinting": true,
        "stats_polling_interval_s": 5 });
    first.vmm.done("PUT", "/balloon", &balloon.to_string());
    first.vmm.done("PUT", "/entropy", "{}");
    let first = first.start();
    first.vmm.done("PATCH", "/balloon", r#"{"amount_mib": 2}"#);
    first.vmm.done("PATCH", "/balloon/statistics", r#"{"stats_polling_interval_s": 6}"#);
    // The snapshot names the file that the drive has, which is larger than its first one.
    File::create(tmp.path("new-disk")).unwrap().set_len(2 * MIB).unwrap();
    let new = json!({ "drive_id": "data", "path_on_host": tmp.path("new-disk") });
    first.vmm.done("PATCH", "/drives/data", &new.to_string());
    fs::remove_file(tmp.path("disk")).unwrap();
    first.pause();
    let before = first.reports();
    first.create("Full", ("state", "memory"));
    assert_eq!(first.vmm.get("/")["state"], "Paused");
    assert_eq!(fs::metadata(tmp.path("memory")).unwrap().len(), 32 * MIB);
    let shown = first.vmm.get("/vm/config");
    drop(first);

    let second = Instance::load(&tmp, "second", ("state", "memory"), json!({}));
    let instance = second.vmm.get("/");
    assert_eq!((&instance["id"], &instance["state"]), (&json!("second"), &json!("Paused")));
    assert_eq!(second.vmm.get("/vm/config"), shown);
    assert_eq!(shown["balloon"]["stats_polling_interval_s"], 6);
    assert_eq!(shown["drives"][0]["path_on_host"], tmp.text("new-disk"));
    let statistics = second.vmm.get("/balloon/statistics");
    assert_eq!(statistics["target_mib"], 2, "{statistics}");
    assert_eq!(second.reports(), [], "it has not run");
    let after = second.resume();
    let is_later = |(now, then): (&PayloadReport, &PayloadReport)| now.passes > then.passes;
    assert!(after.iter().zip(&before).all(is_later), "{after:?} {before:?}");
    assert_eq!(second.vmm.get("/")["state"], "Running");
    let again = load_body(&tmp, ("state", "memory"), json!({}));
    let text = "The requested operation is not supported after starting the microVM.";
    assert_eq!(second.vmm.refusal("PUT", "/snapshot/load", &again), text);
    // Driftline's own requests reach the loaded guest, too.
    succeed(&["stop", "--wait", "--api-sock", &second.vmm.socket]);
}

/// Firecracker's jailer makes a jail without /proc.
#[test]
fn guest_with_a_drive_is_snapshotted_without_proc() {
    let test = "guest_with_a_drive_is_snapshotted_without_proc";
    if !kvm_or_skip(test) {
        return;
    }
    let hide = "mount -t tmpfs tmpfs /proc && exec \"$@\"";
    let hidden = ["unshare", "--mount", "--propagation", "private", "sh", "-c", hide, "sh"];
    match Command::new(hidden[0]).args(&hidden[1..]).arg("true").output() {
        Ok(out) if out.status.success() => {}
        _ => return skip(test, "/proc cannot be hidden from a process: that needs root"),
    }
    let tmp = TestDir::new();
    let first = Instance::wrapped(&tmp, "first", &hidden).configured(true);
    first.add_drive();
    let first = first.start();
    first.pause();
    first.create("Full", ("state", "memory"));
    // Only that very file is made durable.
    fs::rename(tmp.path("disk"), tmp.path("moved")).unwrap();
    let diff = create_body(&tmp, "Diff", ("state-2", "diff"));
    let text = first.vmm.refusal("PUT", "/snapshot/create", &diff);
    assert!(text.contains("cannot be made durable: the log says why"), "{text}");
    fs::rename(tmp.path("moved"), tmp.path("disk")).unwrap();
    first.resume();
    drop(first);
    Instance::wrapped(&tmp, "second", &hidden).loaded(("state", "memory"), json!({})).resume();
}

#[test]
fn clones_of_one_snapshot_run_side_by_side() {
    if !kvm_or_skip("clones_of_one_snapshot_run_side_by_side") {
        return;
    }
    let tmp = snapshot();
    let content = || (fs::read(tmp.path("state")).unwrap(), fs::read(tmp.path("memory")).unwrap());
    let before = content();
    let resumed = json!({ "resume_vm": true });
    let load = |name| Instance::load(&tmp, name, ("state", "memory"), resumed.clone());
    // All clones are loaded before the first one has run for long.
    let clones = ["one", "two", "three"].map(load);
    for clone in &clones {
        assert_eq!(clone.vmm.get("/")["state"], "Running");
        clone.progress();
    }
    clones.iter().for_each(|clone| _ = clone.progress());
    assert!(content() == before, "no clone writes to the snapshot");
}

#[test]
fn loaded_vsock_is_bound_before_the_guest_runs() {
    if !kvm_or_skip("loaded_vsock_is_bound_before_the_guest_runs") {
        return;
    }
    let (tmp, files) = (TestDir::new(), ("state", "memory"));
    let first = Instance::boot(&tmp, false);
    let vsock = json!({ "guest_cid": 3, "uds_path": tmp.path("v") });
    first.vmm.done("PUT", "/vsock", &vsock.to_string());
    let first = first.start();
    first.pause();
    first.create("Full", files);
    drop(first);
    let text = Instance::failed_load(&tmp, "second", &load_body(&tmp, files, json!({})));
    let in_use = "VsockUnixBackend: Error binding to the host-side Unix socket: Address already in \
                  use (os error 98)";
    assert!(text.starts_with(NOT_RESTORED) && text.ends_with(in_use), "{text}");
    assert!(tmp.path("v").exists());
    let other = json!({ "vsock_override": { "uds_path": tmp.path("w") } });
    let mut third = Instance::load(&tmp, "third", files, other);
    let mut program = UnixStream::connect(tmp.path("w")).unwrap();
    program.set_read_timeout(Some(TIMEOUT)).unwrap();
    program.write_all(b"CONNECT 7\n").unwrap();
    third.resume();
    assert_eq!(program.read(&mut [0]).unwrap(), 0, "the guest has no driver");
    third.vmm.signal(Signal::TERM);
    third.vmm.wait_status();
    assert!(tmp.path("w").exists());
}

#[test]
fn deprecated_memory_file_is_loaded_and_reported() {
    if !kvm_or_skip("deprecated_memory_file_is_loaded_and_reported") {
        return;
    }
    let tmp = snapshot();
    let second = Instance::new(&tmp, "second");
    let old = json!({ "snapshot_path": tmp.path("state"), "mem_file_path": tmp.path("memory") });
    let (status, head, _) = second.vmm.answer("PUT", "/snapshot/load", &old.to_string());
    assert_eq!(status, 204);
    assert!(head.contains("\r\ndeprecation: true"), "{head}");
    second.resume();
}

#[test]
fn clock_advances_by_the_time_since_the_snapshot() {
    if !kvm_or_skip("clock_advances_by_the_time_since_the_snapshot") {
        return;
    }
    let tmp = snapshot();
    let since = Instant::now();
    std::thread::sleep(Duration::from_secs(2));
    let advanced = json!({ "clock_realtime": true, "resume_vm": true });
    let away = since.elapsed().as_micros() as u64;
    let second = Instance::load(&tmp, "second", ("state", "memory"), advanced);
    // The guest sees that it did not run meanwhile.
    let sees = |report: &PayloadReport| report.max_gap_us >= away;
    let all_see = || Some(second.reports()).filter(|now| now.len() == 2 && now.iter().all(sees));
    let after = wait_for("the guest to see how long it was away", all_see);
    assert!(after.iter().all(|report| report.errors == 0), "{after:?}");
}
