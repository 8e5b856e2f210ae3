//! `driftline serve` with snapshots: the guest is the payload, which checks its memory.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use driftline_images::{PAYLOAD_ELF, PayloadReport, PayloadSpec};
use driftline_machine::testing::{kvm_or_skip, skip};
use rustix::fs::{SeekFrom, seek};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::serving::ServeProcess;
use crate::common::{TIMEOUT, TestDir, driftline, last_reports, side_by_side, succeed, wait_for};

const START: &str = r#"{"action_type": "InstanceStart"}"#;
const PAUSE: &str = r#"{"state": "Paused"}"#;
const RESUME: &str = r#"{"state": "Resumed"}"#;
const NOT_RESTORED: &str = "Load snapshot error: Failed to restore from snapshot: ";
const MIB: u64 = 1 << 20;

/// A process with a socket and a serial log of its own.
struct Instance<'t> {
    vmm: ServeProcess,
    tmp: &'t TestDir,
    name: &'static str,
}

impl<'t> Instance<'t> {
    fn new(tmp: &'t TestDir, name: &'static str) -> Self {
        Self::wrapped(tmp, name, &[])
    }

    /// As [`new`](Self::new). If `wrapper` has a command, that starts the process.
    fn wrapped(tmp: &'t TestDir, name: &'static str, wrapper: &[&str]) -> Self {
        let socket = tmp.text(&format!("{name}.sock"));
        let mut command = driftline(&["serve", "--api-sock", &socket, "--id", name]);
        if let [program, args @ ..] = wrapper {
            let mut outer = Command::new(program);
            outer.args(args).arg(command.get_program()).args(command.get_args());
            outer.env_remove("RUST_LOG").stdin(Stdio::null());
            command = outer;
        }
        let vmm = ServeProcess::spawn(command, socket);
        let serial = json!({ "serial_out_path": tmp.path(&format!("{name}.serial")) });
        vmm.done("PUT", "/serial", &serial.to_string());
        Self { vmm, tmp, name }
    }

    /// Configures the payload with two vCPUs and 32 MiB.
    fn boot(tmp: &'t TestDir, tracked: bool) -> Self {
        Self::new(tmp, "first").configured(tracked)
    }

    fn configured(self, tracked: bool) -> Self {
        let (tmp, guest) = (self.tmp, self);
        fs::write(tmp.path("kernel"), PAYLOAD_ELF).unwrap();
        let spec: PayloadSpec = "payload,ws=1M,rate=10M,pattern=seq,report=300".parse().unwrap();
        let source =
            json!({ "kernel_image_path": tmp.path("kernel"), "boot_args": spec.cmdline(2) });
        guest.vmm.done("PUT", "/boot-source", &source.to_string());
        let machine = json!({ "vcpu_count": 2, "mem_size_mib": 32, "track_dirty_pages": tracked });
        guest.vmm.done("PUT", "/machine-config", &machine.to_string());
        guest
    }

    fn add_drive(&self) {
        let disk = self.tmp.path("disk");
        File::create(&disk).unwrap().set_len(MIB).unwrap();
        let drive = json!({ "drive_id": "data", "is_root_device": false, "io_engine": "Sync",
            "cache_type": "Writeback", "path_on_host": disk,
            "rate_limiter": { "ops": { "size": 100, "refill_time": 10 } } });
        self.vmm.done("PUT", "/drives/data", &drive.to_string());
    }

    fn start(self) -> Self {
        self.vmm.done("PUT", "/actions", START);
        self.progress();
        self
    }

    /// Loads a snapshot.
    fn load(tmp: &'t TestDir, name: &'static str, files: (&str, &str), more: Value) -> Self {
        Self::new(tmp, name).loaded(files, more)
    }

    fn loaded(self, files: (&str, &str), more: Value) -> Self {
        self.vmm.done("PUT", "/snapshot/load", &load_body(self.tmp, files, more));
        self
    }

    /// Sends a load that fails and ends the process. Returns the text.
    fn failed_load(tmp: &'t TestDir, name: &'static str, body: &str) -> String {
        let mut guest = Self::new(tmp, name);
        let text = guest.vmm.refusal("PUT", "/snapshot/load", body);
        let (code, stderr) = guest.vmm.wait();
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.contains(&format!("no guest is loaded: {text}")), "{stderr}");
        text
    }

    fn reports(&self) -> Vec<PayloadReport> {
        last_reports(&self.tmp.path(&format!("{}.serial", self.name)))
    }

    /// Waits until both vCPUs have gone through all their pages some more times, and so have
    /// checked each. The payload queues its lines, so the log may lag behind on a busy host.
    fn progress(&self) -> Vec<PayloadReport> {
        let begin = wait_for("both vCPUs", || Some(self.reports()).filter(|now| now.len() == 2));
        let is_through = |now: &[PayloadReport]| {
            now.iter().zip(&begin).all(|(now, begin)| now.passes >= begin.passes + 4)
        };
        let reports = || Some(self.reports()).filter(|now| is_through(now));
        let now = wait_for("the guest's reports", reports);
        assert!(now.iter().all(|report| report.errors == 0), "{now:?}");
        now
    }

    fn pause(&self) {
        self.vmm.done("PATCH", "/vm", PAUSE);
    }

    fn resume(&self) -> Vec<PayloadReport> {
        self.vmm.done("PATCH", "/vm", RESUME);
        self.progress()
    }

    fn create(&self, kind: &str, files: (&str, &str)) {
        self.vmm.done("PUT", "/snapshot/create", &create_body(self.tmp, kind, files));
    }
}

fn create_body(tmp: &TestDir, kind: &str, (state, memory): (&str, &str)) -> String {
    json!({ "snapshot_type": kind, "snapshot_path": tmp.path(state),
        "mem_file_path": tmp.path(memory) })
    .to_string()
}

/// Returns `body` with `"live": true`.
fn live(body: &str) -> String {
    let mut body: Value = serde_json::from_str(body).unwrap();
    body["live"] = json!(true);
    body.to_string()
}

fn load_body(tmp: &TestDir, (state, memory): (&str, &str), more: Value) -> String {
    let mut body = json!({ "snapshot_path": tmp.path(state),
        "mem_backend": { "backend_path": tmp.path(memory), "backend_type": "File" } });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

/// Returns a directory with a full snapshot, "state" and "memory".
fn snapshot() -> TestDir {
    let tmp = TestDir::new();
    let guest = Instance::boot(&tmp, false).start();
    guest.pause();
    guest.create("Full", ("state", "memory"));
    drop(guest);
    tmp
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
fn damaged_state_is_refused_and_ends_the_process() {
    if !kvm_or_skip("damaged_state_is_refused_and_ends_the_process") {
        return;
    }
    let tmp = snapshot();
    let sound = fs::read(tmp.path("state")).unwrap();
    let refused = |state: &[u8]| {
        fs::write(tmp.path("bad"), state).unwrap();
        let body = load_body(&tmp, ("bad", "memory"), json!({ "resume_vm": true }));
        let text = Instance::failed_load(&tmp, "second", &body);
        let begin = format!(
            "{NOT_RESTORED}Failed to get snapshot state from file: Failed to load snapshot state \
             from file: "
        );
        assert!(text.starts_with(&begin), "{text}");
        assert!(text.contains(tmp.path("bad").to_str().unwrap()), "{text}");
    };
    // Unit tests flip each bit of a small state.
    let step = sound.len() / 16;
    for at in (0..16).map(|i| i * step + i).chain([sound.len() - 1]) {
        let mut bent = sound.clone();
        bent[at] ^= 1 << (at % 8);
        refused(&bent);
    }
    refused(&sound[..sound.len() - 1]);
    refused(&[]);
    refused(&[&sound[..], b"x"].concat());
}

#[test]
fn missing_or_foreign_files_end_the_process() {
    if !kvm_or_skip("missing_or_foreign_files_end_the_process") {
        return;
    }
    let tmp = snapshot();
    let refused = |files, more: Value, text: &str| {
        let body = load_body(&tmp, files, more);
        let refusal = Instance::failed_load(&tmp, "second", &body);
        assert!(refusal.starts_with(&format!("{NOT_RESTORED}{text}")), "{refusal}");
    };
    let not_found = "No such file or directory (os error 2)";
    let state = "Failed to get snapshot state from file: ";
    let opening = format!("{state}Failed to open snapshot file: {not_found}");
    refused(("none", "memory"), json!({}), &opening);
    let memory = "Failed to load guest memory: Error creating guest memory from file: ";
    let opening = format!("{memory}Failed to load guest memory: {not_found}");
    refused(("state", "none"), json!({}), &opening);
    for (name, bytes) in [("short", 32 * MIB - 1), ("long", 32 * MIB + 4096), ("empty", 0)] {
        fs::copy(tmp.path("memory"), tmp.path(name)).unwrap();
        File::options().write(true).open(tmp.path(name)).unwrap().set_len(bytes).unwrap();
        let text = format!(
            "{memory}Failed to restore guest memory: {} has {bytes} bytes",
            tmp.path(name).display()
        );
        refused(("state", name), json!({}), &text);
    }
    let nets = json!({ "network_overrides": [{ "iface_id": "eth0", "host_dev_name": "tap0" }] });
    refused(("state", "memory"), nets, &format!("{state}Unknown Network Device."));
    let vsock = json!({ "vsock_override": { "uds_path": "v.sock" } });
    refused(("state", "memory"), vsock, &format!("{state}Unknown Vsock Device."));
    let pool = format!("{memory}Cannot restore hugetlbfs backed snapshot");
    refused(("state", "memory"), json!({ "huge_pages": "2M" }), &pool);
    let connecting = "Failed to load guest memory: Error creating guest memory from uffd: Failed \
                      to connect to UDS Unix stream: ";
    drop(UnixListener::bind(tmp.path("left")).unwrap());
    for (socket, end) in [("none", not_found), ("left", "Connection refused (os error 111)")] {
        let handler = json!({ "mem_backend": { "backend_path": tmp.path(socket),
            "backend_type": "Uffd" } });
        refused(("state", "memory"), handler, &format!("{connecting}{end}"));
    }
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
