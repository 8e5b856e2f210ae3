//! All exit codes in one table, and the object that `--json` prints for each result and each
//! failure.

use std::net::TcpListener;
use std::process::Command;

use crate::common::{TestDir, Vmm, driftline, output, receiver, text, wait_for};
use driftline_machine::testing::{kvm_or_skip, skip};
use serde_json::{Value, json};

const THREADS: &[&str] =
    &["run", "--serial", "null", "--backend", "threads", "--guest", "payload,ws=1M,passes=1"];
const KVM: &[&str] = &["run", "--serial", "null", "--guest", "payload,ws=1M"];

/// Returns the exit code of a command, its stdout, and its stderr.
fn run(args: &[&str]) -> (Option<i32>, String, String) {
    let out = output(args);
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

#[test]
fn exit_codes_follow_the_table() {
    let tmp = TestDir::new();
    let (state, store, none) = (tmp.text("state"), tmp.text("store"), tmp.text("none"));
    let mut vmm = Vmm::run(
        &tmp,
        "a",
        &["--backend", "threads", "--mem", "64M", "--guest", "payload,ws=1M,rate=1M,burst=8"],
    );
    vmm.tell(&["checkpoint", "--store", &store]);
    let socket = vmm.socket();
    let here = ["--state-dir", &state];
    let restore: &[&str] = &["restore", "--serial", "null", "--store", &store];
    let (no_disk, no_tap) = (format!("path={none},id=foo"), "tap=dlnone,id=foo");
    let no_vsock = format!("uds={none}");
    let cases: &[(i32, &[&str], &[&str])] = &[
        (0, &["--version"], &[]),
        (0, THREADS, &["--mem", "64M"]),
        (0, &["doctor"], &[]),
        (0, &["info", "--api-sock", &socket], &[]),
        (1, &["info", "--api-sock", &none], &[]),
        (1, restore, &["--checkpoint", "99"]),
        (1, THREADS, &["--mem", "64M", "--log-file", "/nonexistent/log"]),
        (1, &["run", "--backend", "threads", "--guest", "payload,ws=2G", "--mem", "1G"], &[]),
        (2, &["run"], &[]),
        (2, &["info", "--api-sock", &socket, "--log", "a=b=c"], &[]),
        (2, KVM, &["--disk", "path=/dev/null,copy"]),
        (2, KVM, &["--disk", "path=/dev/null,identity=any"]),
        (2, KVM, &["--shadow", "compare", "--tracking", "none"]),
        (2, restore, &["--disk", &no_disk]),
        (2, restore, &["--net", no_tap]),
        (2, restore, &["--vsock", &no_vsock]),
        (3, THREADS, &["--mem", "16384G"]),
        (3, THREADS, &["--mem", "15000G", "--hugepages", "hugetlbfs"]),
        (4, &["checkpoint", "--api-sock", &socket, "--store", "/proc/none"], &[]),
        (4, &["send-migration", "tcp:127.0.0.1:1", "--api-sock", &socket], &[]),
    ];
    for (code, args, more) in cases {
        let hosted = matches!(args[0], "run" | "restore");
        let here: &[&str] = if hosted && args.len() > 1 { &here } else { &[] };
        let args = [*args, *more, here].concat();
        let (ended, _, stderr) = run(&args);
        assert_eq!(ended, Some(*code), "{args:?}: {stderr}");
    }
    assert_eq!(vmm.state(), "running", "after all that");
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
}

#[test]
fn kvm_guests_end_with_the_same_codes() {
    if !kvm_or_skip("kvm_guests_end_with_the_same_codes") {
        return;
    }
    let tmp = TestDir::new();
    let here = ["--state-dir", &tmp.text("state")];
    let cases: &[(i32, &[&str])] = &[
        (0, &["doctor", "--check"]),
        (0, &["run", "--serial", "null", "--mem", "64M", "--guest", "payload,ws=1M,passes=1"]),
        // The payload prints on its console that it cannot continue, and why.
        (
            1,
            &[KVM, &["--mem", "64M", "--cpu", "host,-kvmclock,-kvmclock2,-kvmclock_stable"]]
                .concat(),
        ),
        (1, &["run", "--serial", "null", "--mem", "1G", "--guest", "payload,ws=2G"]),
        (3, &[KVM, &["--mem", "64M", "--net", "tap=dlnone"]].concat()),
        (3, &[KVM, &["--mem", "16384G"]].concat()),
        (3, &[KVM, &["--mem", "15000G", "--hugepages", "hugetlbfs"]].concat()),
    ];
    for (code, args) in cases {
        let here: &[&str] = if args[0] == "run" { &here } else { &[] };
        let args = [*args, here].concat();
        let (ended, _, stderr) = run(&args);
        assert_eq!(ended, Some(*code), "{args:?}: {stderr}");
    }
}

/// Runs in a separate mount namespace with an empty `/dev`.
#[test]
fn doctor_exits_3_without_kvm() {
    const TEST: &str = "doctor_exits_3_without_kvm";
    let without_kvm = |args: &[&str]| {
        let mut unshare = Command::new("unshare");
        unshare.args(["--map-root-user", "--mount", "sh", "-c"]);
        unshare.args(["mount -t tmpfs none /dev && exec \"$0\" \"$@\""]);
        unshare.arg(env!("CARGO_BIN_EXE_driftline")).args(args);
        unshare
    };
    let out = without_kvm(&["--version"]).output();
    match out.map(|out| (out.status.success(), text(&out.stderr))) {
        Ok((true, _)) => {}
        Ok((false, stderr)) => return skip(TEST, stderr.trim()),
        Err(e) => return skip(TEST, &format!("unshare: {e}")),
    }
    let out = without_kvm(&["doctor", "--check"]).output().unwrap();
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(3), "{stderr}");
    let verdict = "driftline: this host cannot run KVM guests: it lacks /dev/kvm; ";
    assert!(stderr.starts_with(verdict) && out.stdout.is_empty(), "{stderr}");
    assert_json_failure(&mut without_kvm(&["doctor", "--check", "--json"]), 3, "host-lacks");
    assert_json_failure(&mut without_kvm(&["demo", "--backend", "kvm", "--json"]), 3, "host-lacks");
    let out = without_kvm(&["doctor"]).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
}

/// The object with the error also lists the damage.
#[test]
fn a_damaged_store_is_one_object_on_stdout() {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let vmm = Vmm::run(
        &tmp,
        "a",
        &["--backend", "threads", "--mem", "64M", "--guest", "payload,ws=1M,rate=1M,burst=8"],
    );
    vmm.tell(&["checkpoint", "--store", &store]);
    drop(vmm);
    let part = |prefix: &str| {
        let mut names = std::fs::read_dir(&store).unwrap().map(|e| e.unwrap().path());
        names.find(|p| p.file_name().unwrap().to_str().unwrap().starts_with(prefix)).unwrap()
    };
    for damaged in ["pages-", "log-", "manifest"] {
        let path = part(damaged);
        let sound = std::fs::read(&path).unwrap();
        std::fs::write(&path, sound.iter().map(|byte| !byte).collect::<Vec<u8>>()).unwrap();
        let commands: &[&[&str]] = &[
            &["ls"],
            &["verify"],
            &["repair", "--dry-run"],
            &["compact"],
            &["export", "--output", &tmp.text("out")],
        ];
        for args in commands {
            let args = [&["store"], *args, &["--json", &store]].concat();
            let (code, printed, stderr) = run(&args);
            let object: Value = serde_json::from_str(&printed)
                .unwrap_or_else(|e| panic!("{damaged}: {args:?}: {e}: {printed}{stderr}"));
            let message = object["error"]["message"].as_str().unwrap_or_default();
            assert_eq!(code == Some(0), message.is_empty(), "{damaged}: {args:?}: {printed}");
            assert!(stderr.contains(message), "{damaged}: {args:?}: {printed}: {stderr}");
        }
        std::fs::write(&path, sound).unwrap();
    }
}

#[test]
fn json_failures_are_one_object_on_stdout() {
    let tmp = TestDir::new();
    let (none, store) = (tmp.text("none"), tmp.text("empty"));
    let (mut receiver, _) = receiver(&tmp, "waiting", &[]);
    receiver.await_api();
    let waiting = receiver.socket();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp:{}", listener.local_addr().unwrap());
    let cases: &[(i32, &str, &[&str])] = &[
        (1, "no-vmm", &["info", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["plan", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["top", "--once", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["balloon", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["checkpoint", "--json", "--api-sock", &none, "--store", &store]),
        (1, "no-vmm", &["checkpoint", "--json", "--api-sock", &none, "--stop"]),
        (1, "no-vmm", &["pause", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["resume", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["stop", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["stop", "--wait", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["cancel-migration", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["resolve", "--run", "--json", "--api-sock", &none]),
        (1, "refused", &["pause", "--json", "--api-sock", &waiting]),
        (1, "refused", &["resume", "--json", "--api-sock", &waiting]),
        (1, "refused", &["cancel-migration", "--json", "--api-sock", &waiting]),
        (1, "failed", &["resolve", "--run", "--json", "--api-sock", &waiting]),
        (1, "failed", &["resolve", "--run", "--json", "--state-dir", &none]),
        (1, "failed", &["receive-migration", &taken, "--json", "--state-dir", &store]),
        (
            1,
            "failed",
            &["receive-migration", "tcp:127.0.0.1:0", "--json", "--state-dir", "/proc/none"],
        ),
        (2, "usage", &["receive-migration", "nowhere", "--json"]),
        (2, "usage", &["info", "--json"]),
        (2, "usage", &["doctor", "--json", "--log", "a=b=c"]),
        (2, "usage", &["compare", "--json", "--interval", "1s", "--duration", "1s"]),
        (1, "failed", &["store", "verify", "--json", &none]),
    ];
    for (code, kind, args) in cases {
        assert_json_failure(&mut driftline(args), *code, kind);
    }
    let mut demo = driftline(&["demo", "--backend", "threads", "--json"]);
    assert_json_failure(demo.env("TMPDIR", &none), 1, "failed");
}

/// Runs `command`, which must end with `code`, print one object with an error of the code `kind` on
/// stdout, and print the same message on stderr.
fn assert_json_failure(command: &mut Command, code: i32, kind: &str) {
    let out = command.output().unwrap();
    let (printed, stderr) = (text(&out.stdout), text(&out.stderr));
    assert_eq!(out.status.code(), Some(code), "{command:?}: {stderr}");
    let object: Value =
        serde_json::from_str(&printed).unwrap_or_else(|e| panic!("{command:?}: {e}: {printed}"));
    assert_eq!(object["error"]["code"], kind, "{command:?}: {printed}");
    let message = object["error"]["message"].as_str().unwrap();
    assert!(!message.is_empty() && stderr.contains(message), "{command:?}: {message}: {stderr}");
}

#[test]
fn stopped_receiver_is_one_object_on_stdout() {
    let tmp = TestDir::new();
    let socket = tmp.text("a.sock");
    let mut args = vec!["receive-migration", "tcp:127.0.0.1:0", "--json", "--serial", "null"];
    let state = tmp.text("state");
    args.extend(["--api-sock", &socket, "--state-dir", &state]);
    let stop = std::thread::spawn({
        let socket = socket.clone();
        move || {
            wait_for("the receiver to stop", || {
                output(&["stop", "--api-sock", &socket]).status.success().then_some(())
            });
        }
    });
    assert_json_failure(&mut driftline(&args), 1, "failed");
    stop.join().unwrap();
}

/// Returns the one object that a client command for `vmm` prints with `--json`.
fn printed(vmm: &Vmm<'_>, args: &[&str]) -> Value {
    let socket = vmm.socket();
    let args = [args, &["--json", "--api-sock", &socket]].concat();
    let (code, printed, stderr) = run(&args);
    assert_eq!(code, Some(0), "{args:?}: {stderr}");
    assert_eq!(printed.lines().count(), 1, "{args:?}: {printed}");
    serde_json::from_str(&printed).unwrap()
}

#[test]
fn json_results_are_one_object_on_stdout() {
    let tmp = TestDir::new();
    let guest =
        ["--backend", "threads", "--mem", "64M", "--guest", "payload,ws=1M,rate=1M,burst=8"];
    let mut vmm = Vmm::run(&tmp, "a", &guest);
    for _ in 0..2 {
        assert_eq!(printed(&vmm, &["pause"]), json!({ "state": "paused" }));
    }
    assert_eq!(printed(&vmm, &["resume"]), json!({ "state": "running" }));
    let begin = ["checkpoint", "--store", &tmp.text("store"), "--every", "1s", "--detach"];
    let begun = printed(&vmm, &begin);
    assert_eq!(begun, json!({ "job": begun["job"], "running": true }));
    let over = printed(&vmm, &["checkpoint", "--stop"]);
    assert_eq!(over, json!({ "job": begun["job"], "running": false }));
    // A destination that sends nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (to, socket) = (format!("tcp:{}", listener.local_addr().unwrap()), vmm.socket());
    let sender = std::thread::spawn(move || {
        run(&["send-migration", &to, "--json", "--api-sock", &socket]).0
    });
    wait_for("the migration", || (vmm.state() == "migrating").then_some(()));
    assert_eq!(printed(&vmm, &["cancel-migration"]), json!({ "status": "cancelling" }));
    assert_eq!(sender.join().unwrap(), Some(4));
    let stopped = printed(&vmm, &["stop", "--wait"]);
    assert_eq!(stopped, json!({ "state": "stopped", "vmm_ended": true }));
    assert!(!vmm.is_alive());
    let (mut waiting, _) = receiver(&tmp, "waiting", &[]);
    waiting.await_api();
    let stopped = printed(&waiting, &["stop"]);
    assert_eq!(stopped, json!({ "state": "stopped", "vmm_ended": false }));
}
