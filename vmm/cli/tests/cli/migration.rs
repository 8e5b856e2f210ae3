//! Migration from the command line, for both kinds of guest: sent, received, cancelled, and
//! refused.

use std::fs::File;
use std::net::TcpListener;
use std::process::Stdio;

use crate::common::{
    ClosedAddress, TestDir, Vmm, driftline, fail, output, proxy_that_keeps_commit, receiver,
    side_by_side, succeed, text, wait_for,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const THREADS: &[&str] = &["--backend", "threads", "--mem", "64M", "--vcpus", "2"];
const KVM: &[&str] = &["--backend", "kvm", "--mem", "64M", "--vcpus", "2"];
/// Further ways to track a KVM guest's writes.
const MODES: [&str; 3] = ["dirty-bitmap", "dirty-bitmap-manual", "userfault-wp"];

fn moves_there_and_back(machine: &[&str]) {
    let tmp = TestDir::new();
    let guest = ["--guest", "payload,ws=16M,rate=32M,burst=32,report=200"];
    let mut first = Vmm::run(&tmp, "first", &[machine, &guest].concat());
    let id = first.info().unwrap()["vm_id"].clone();
    let before = first.await_progress(2, &[]);

    let (mut second, to) = receiver(&tmp, "second", &[]);
    let report = first.tell(&["send-migration", &to, "--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["status"], "completed", "{report}");
    for field in [
        "total_time_ms",
        "downtime_ms",
        "setup_time_ms",
        "transferred_bytes",
        "zero_frames",
        "normal_frames",
        "throughput_bytes_per_s",
    ] {
        assert!(report[field].as_f64().is_some(), "{field} in {report}");
    }
    for field in ["frames", "bytes", "time_ms", "dirty_rate_bytes_per_s"] {
        assert!(report["passes"][0][field].as_f64().is_some(), "{field} in {report}");
    }
    assert_eq!(first.wait(), Some(0), "{}", first.stderr());
    second.await_api();
    assert_eq!((&second.info().unwrap()["vm_id"], second.state()), (&id, "running".to_owned()));
    let between = second.await_progress(2, &before);

    let (mut third, to) = receiver(&tmp, "third", &[]);
    let table = second.tell(&["send-migration", &to, "--downtime-ms", "500"]);
    assert!(table.contains("\ndowntime ") && table.contains("\npasses "), "{table}");
    assert_eq!(second.wait(), Some(0));
    third.await_api();
    third.await_progress(2, &between);
    third.tell(&["stop"]);
    assert_eq!(third.wait(), Some(0));
}

#[test]
fn a_guest_of_threads_moves_twice() {
    moves_there_and_back(THREADS);
}

#[test]
fn a_kvm_guest_moves_twice() {
    if driftline_machine::testing::kvm_or_skip("a_kvm_guest_moves_twice") {
        side_by_side(["dirty-ring"].into_iter().chain(MODES), |mode| {
            moves_there_and_back(&[KVM, &["--tracking", mode]].concat());
        });
    }
}

#[test]
fn kvm_guest_survives_its_killed_vmm() {
    if !driftline_machine::testing::kvm_or_skip("kvm_guest_survives_its_killed_vmm") {
        return;
    }
    for how in [&[][..], &["--lazy"]] {
        side_by_side(["dirty-ring"].into_iter().chain(MODES), |mode| {
            killed_and_restored(mode, how);
        });
    }
}

fn killed_and_restored(mode: &str, how: &[&str]) {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let guest = ["--guest", "payload,ws=4M,rate=8M,burst=8,report=200", "--tracking", mode];
    let mut first = Vmm::run(&tmp, "first", &[KVM, &guest].concat());
    let before = first.await_progress(2, &[]);
    first.tell(&["checkpoint", "--store", &store, "--every", "50ms", "--count", "5"]);
    first.kill();
    let restore = [&["restore", "--same-id", "--store", &store], how].concat();
    let mut second = Vmm::start(&tmp, "second", &restore);
    second.await_message(" resumed from checkpoint ");
    // With userfault-wp, tracking has the memory's only userfaultfd, so all frames arrive first.
    let is_lazy = second.stderr().contains("pages follow on demand");
    assert!(!is_lazy || (mode != "userfault-wp" && !how.is_empty()), "{mode}: {}", second.stderr());
    second.await_progress(2, &before);
    assert_eq!(second.info().unwrap()["tracking"], mode);
    second.tell(&["checkpoint", "--store", &store, "--every", "20ms", "--count", "5"]);
    second.tell(&["stop"]);
    assert_eq!(second.wait(), Some(0), "{}", second.stderr());
}

#[test]
fn paused_guest_arrives_paused() {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let guest = ["--guest", "payload,ws=16M,rate=32M,burst=32,report=200"];
    let mut first = Vmm::run(&tmp, "first", &[THREADS, &guest].concat());
    let follower = std::thread::spawn({
        let (socket, store) = (first.socket(), store.clone());
        move || output(&["checkpoint", "--every", "10ms", "--store", &store, "--api-sock", &socket])
    });
    wait_for("checkpoints", || (first.info()?["checkpointing"] == true).then_some(()));
    first.tell(&["pause"]);
    let (mut second, to) = receiver(&tmp, "second", &[]);
    first.tell(&["send-migration", &to]);
    assert_eq!(first.wait(), Some(0));
    let followed = follower.join().unwrap();
    assert_eq!(followed.status.code(), Some(0), "{}", text(&followed.stderr));
    second.await_api();
    assert_eq!(second.state(), "paused");
    second.tell(&["resume"]);
    second.await_progress(2, &[]);
    second.tell(&["stop"]);
    assert_eq!(second.wait(), Some(0));
    succeed(&["store", "verify", &store]);
}

/// Returns the object of a migration that was refused before it started.
fn not_begun(out: &std::process::Output, code: i32) -> Value {
    let refused: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(code), "{refused}");
    assert_eq!((&refused["status"], &refused["phase"]), (&"failed".into(), &"waiting".into()));
    let stderr = text(&out.stderr);
    assert!(stderr.contains(refused["error"]["message"].as_str().unwrap()), "{stderr}");
    refused
}

#[test]
fn cancelled_migration_leaves_the_guest_running() {
    let tmp = TestDir::new();
    let guest = ["--backend", "threads", "--vcpus", "2", "--mem", "256M"];
    let work = "payload,ws=64M,rate=64M,fill=random,report=200";
    let guest = [&guest[..], &["--guest", work]].concat();
    let mut first = Vmm::run(&tmp, "first", &guest);
    // Once the guest has written all its pages, pass 0 takes seconds. On a busy host, a guest that
    // has just started has written little: the pass would be short, and the migration would
    // complete.
    wait_for("the guest to have written all pages", || {
        let reports = first.reports();
        (reports.len() == 2 && reports.iter().all(|report| report.passes > 0)).then_some(())
    });
    let (second, to) = receiver(&tmp, "second", &[]);
    let sender = std::thread::spawn({
        let (socket, to) = (first.socket(), to.clone());
        // So slow that the passes leave time for all of the following.
        let slow = ["--max-bandwidth", "20M", "--downtime-ms", "0"];
        move || output(&[&["send-migration", &to, "--api-sock", &socket][..], &slow].concat())
    });
    wait_for("the migration", || (first.state() == "migrating").then_some(()));
    let stderr = first.refuse(4, &["send-migration", &to]);
    assert!(stderr.contains("is being migrated already, to 127.0.0.1:"), "{stderr}");
    let out = output(&["send-migration", &to, "--json", "--api-sock", &first.socket()]);
    let refused = not_begun(&out, 4);
    assert_eq!(refused["guest"], "here", "{refused}");
    assert!(
        refused["error"]["message"].as_str().unwrap().contains("migrated already"),
        "{refused}"
    );
    let stderr = first.refuse(1, &["pause"]);
    assert!(stderr.contains("cannot pause a guest that is being migrated"), "{stderr}");
    let stderr = first.refuse(1, &["resolve", "--run"]);
    assert!(stderr.contains("no migration is in doubt"), "{stderr}");
    first.tell(&["cancel-migration"]);
    let sent = sender.join().unwrap();
    let stderr = text(&sent.stderr);
    assert_eq!(sent.status.code(), Some(4), "{stderr}");
    assert!(
        stderr.contains("cancelled") && stderr.contains("the guest continues here"),
        "{stderr}"
    );
    assert_eq!(first.state(), "running");
    first.await_progress(2, &[]);
    let stderr = first.refuse(1, &["cancel-migration"]);
    assert!(stderr.contains("no migration is under way"), "{stderr}");
    // The receiver has received the reason, and waits for the next source.
    wait_for("the receiver to wait again", || {
        (second.info()?["migration"]["phase"] == "waiting").then_some(())
    });
    let pid = second.pid();
    first.tell(&["send-migration", &to, "--timeout-s", "1", "--timeout-strategy", "switchover"]);
    assert_eq!(first.wait(), Some(0));
    assert_eq!((second.state(), second.pid()), ("running".to_owned(), pid));
    second.tell(&["stop"]);
}

#[test]
fn guest_in_doubt_waits_for_the_operator() {
    let tmp = TestDir::new();
    let (store, state) = (tmp.text("store"), tmp.text("state"));
    let guest = ["--guest", "payload,ws=4M,rate=4M,burst=8"];
    let mut first = Vmm::run(&tmp, "first", &[THREADS, &guest].concat());
    let id = first.info().unwrap()["vm_id"].as_str().unwrap().to_owned();
    first.tell(&["checkpoint", "--store", &store]);
    let (_second, to) = receiver(&tmp, "second", &[]);
    let (to, record) = proxy_that_keeps_commit(&to, tmp.path("state"));
    let sender = std::thread::spawn({
        let (socket, to) = (first.socket(), to.clone());
        move || output(&["send-migration", &to, "--api-sock", &socket])
    });
    wait_for("COMMIT", || {
        let info = first.info()?;
        (info["migration"]["phase"] == "hand-over").then_some(())
    });
    record.assert_written();
    let stderr = first.refuse(1, &["stop"]);
    assert!(stderr.contains("resolve it with `driftline resolve --discard`"), "{stderr}");
    first.signal(Signal::TERM);
    wait_for("the refusal", || {
        first.stderr().contains("this process does not end yet").then_some(())
    });
    assert_ne!(first.state(), "stopped");
    first.kill();
    sender.join().unwrap();

    let restore = ["restore", "--store", &store, "--state-dir", &state];
    let stderr = fail(1, &restore);
    assert!(stderr.contains(&format!("guest {id} may be running at ")), "{stderr}");
    assert!(stderr.contains("driftline resolve --state-dir"), "{stderr}");
    let another = "aaaaaaaa-0000-4000-8000-000000000001";
    let stderr = fail(1, &["resolve", "--state-dir", &state, "--vm", another, "--run"]);
    assert!(stderr.contains(&format!("has no record of guest {another}")), "{stderr}");
    let stderr = fail(2, &["resolve", "--state-dir", &state, "--vm", "another", "--run"]);
    assert!(stderr.contains("\"another\" is not a UUID"), "{stderr}");
    let upper = id.to_uppercase();
    let run = ["resolve", "--state-dir", &state, "--vm", &upper, "--run", "--json"];
    let resolved: Value = serde_json::from_str(&succeed(&run)).unwrap();
    let peer = to.trim_start_matches("tcp:");
    let all = json!({ "action": "run", "vm_id": id, "peers": [peer] });
    assert_eq!(resolved, all);
    let stderr = fail(1, &["resolve", "--state-dir", &state, "--discard"]);
    assert!(stderr.contains("no migration is in doubt"), "{stderr}");
    // An unreadable record may belong to this guest.
    let broken = tmp.path("state").join(format!("{id}.source.json"));
    std::fs::write(&broken, "{").unwrap();
    let stderr = fail(1, &restore);
    assert!(stderr.contains(&format!("{id}.source.json: EOF")), "{stderr}");
    assert!(stderr.contains(&format!("may say that guest {id} runs on another host")), "{stderr}");
    let stderr = fail(1, &["resolve", "--state-dir", &state, "--run"]);
    assert!(
        stderr.contains(".source.json: EOF") && stderr.contains("no migration is in doubt"),
        "{stderr}"
    );
    std::fs::remove_file(broken).unwrap();
    let mut third = Vmm::start(&tmp, "third", &["restore", "--same-id", "--store", &store]);
    third.await_api();
    third.tell(&["stop"]);
    assert_eq!(third.wait(), Some(0), "{}", third.stderr());
}

#[test]
fn second_interrupt_ends_send_migration() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(
        &tmp,
        "source",
        &[THREADS, &["--guest", "payload,ws=1M,rate=1M,burst=8"]].concat(),
    );
    let (_there, to) = receiver(&tmp, "there", &[]);
    let (to, record) = proxy_that_keeps_commit(&to, tmp.path("state"));
    let mut send = driftline(&["send-migration", &to, "--api-sock", &vmm.socket()])
        .stdout(Stdio::null())
        .stderr(File::create(tmp.path("send.err")).unwrap())
        .spawn()
        .unwrap();
    wait_for("progress", || (!tmp.read("send.err").is_empty()).then_some(()));
    wait_for("COMMIT", || (vmm.info()?["migration"]["phase"] == "hand-over").then_some(()));
    record.assert_written();
    let interrupt = |message: &str| {
        kill_process(Pid::from_child(&send), Signal::INT).unwrap();
        wait_for(message, || tmp.read("send.err").contains(message).then_some(()));
    };
    interrupt("it is too late to cancel");
    interrupt("interrupted before the migration is over");
    assert_eq!(send.wait().unwrap().code(), Some(1));
    assert_ne!(vmm.state(), "stopped");
}

#[test]
fn unreachable_destination_is_4_and_bad_address_2() {
    let tmp = TestDir::new();
    let guest = ["--guest", "payload,ws=1M,rate=1M,burst=8"];
    let mut vmm = Vmm::run(&tmp, "a", &[THREADS, &guest].concat());
    let closed = ClosedAddress::new();
    let to = format!("tcp:{}", closed.address);
    let stderr = vmm.refuse(4, &["send-migration", &to]);
    assert!(stderr.contains("cannot connect to") && stderr.contains("continues here"), "{stderr}");
    let socket = vmm.socket();
    let out = output(&["send-migration", &to, "--json", "--api-sock", &socket]);
    let failed: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(4), "{failed}");
    assert_eq!((&failed["status"], &failed["guest"]), (&"failed".into(), &"here".into()));
    assert!(failed["phase"] == "connect" && failed["error"]["message"].is_string(), "{failed}");
    let no_vmm = tmp.text("none.sock");
    let out = output(&["send-migration", &to, "--json", "--api-sock", &no_vmm]);
    let refused = not_begun(&out, 1);
    assert!(refused["guest"].is_null(), "no VMM answers: {refused}");
    let stderr = vmm.refuse(2, &["send-migration", "10.0.0.1:7001"]);
    assert!(stderr.contains("an address is tcp:HOST:PORT"), "{stderr}");
    let stderr = vmm.refuse(2, &["send-migration", "tcp:h:1", "--timeout-strategy", "postcopy"]);
    assert!(stderr.contains("not offered by this version"), "{stderr}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", taken.local_addr().unwrap());
    let stderr = fail(1, &["receive-migration", &address]);
    assert!(stderr.contains("cannot listen on tcp:127.0.0.1:"), "{stderr}");
    assert_eq!(vmm.state(), "running");
    vmm.tell(&["stop"]);
    vmm.wait();
}

#[test]
fn a_waiting_receiver_answers_and_can_be_interrupted() {
    let tmp = TestDir::new();
    let (mut vmm, _) = receiver(&tmp, "a", &[]);
    let stderr = vmm.refuse(1, &["pause"]);
    assert!(stderr.contains("there is no guest yet: waiting for a migration"), "{stderr}");
    let stderr = vmm.tell(&["info"]);
    assert!(stderr.contains("receiving") && stderr.contains("waiting for a migration"), "{stderr}");
    let info: Value = serde_json::from_str(&vmm.tell(&["info", "--json"])).unwrap();
    assert_eq!(info["state"], "receiving", "{info}");
    assert_eq!(info["migration"]["phase"], "waiting", "{info}");
    vmm.signal(Signal::INT);
    assert_eq!(vmm.wait(), Some(1));
    assert!(vmm.stderr().contains("stopped by SIGINT before a guest arrived"), "{}", vmm.stderr());
    assert!(!tmp.path("a.sock").exists());
}

#[test]
fn demo_runs_without_kvm() {
    let out = output(&["demo", "--backend", "threads"]);
    let (table, stderr) = (text(&out.stdout), text(&out.stderr));
    assert_eq!(out.status.code(), Some(0), "{stderr}");
    let first = table.lines().next().unwrap();
    assert!(first.contains("on host threads"), "{first}");
    assert!(table.contains("\nerrors found         0\n"), "{table}");
}
