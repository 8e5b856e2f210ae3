//! A VMM that does not answer, and one that is to end: no client waits forever.

use std::fs::rename;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::common::{TestDir, Vmm, driftline, receiver, request, text, wait_for};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::Signal;
use serde_json::Value;

const GUEST: &[&str] =
    &["--backend", "threads", "--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8"];
/// Longer than any command here takes, including its limit of one second.
const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn every_command_gives_up_a_silent_vmm() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "stopped", GUEST);
    vmm.signal(Signal::STOP);
    let store = tmp.text("store");
    let commands = [
        &["info"][..],
        &["balloon"],
        &["pause"],
        &["resume"],
        &["stop"],
        &["stop", "--wait"],
        &["checkpoint", "--store", &store],
        &["checkpoint", "--stop"],
        &["checkpoint", "--status"],
        &["send-migration", "tcp:127.0.0.1:1"],
        &["cancel-migration"],
        &["plan"],
        &["top", "--once"],
        &["resolve", "--run"],
    ];
    let give_up = |command: &[&str]| {
        let began = Instant::now();
        let stderr = vmm.refuse(1, &[command, &["--timeout", "1s"]].concat());
        assert!(began.elapsed() < LIMIT, "{command:?} took {:?}", began.elapsed());
        // A plan takes five seconds in addition.
        let limit = if command == ["plan"] { "in 6s" } else { "in 1s" };
        assert!(
            stderr.contains("has not answered") && stderr.contains(limit),
            "{command:?}: {stderr}"
        );
        assert!(stderr.contains("--timeout"), "{command:?}: {stderr}");
    };
    std::thread::scope(|threads| {
        for command in commands {
            let give_up = &give_up;
            threads.spawn(move || give_up(command));
        }
    });
    vmm.signal(Signal::CONT);
}

/// Starts a checkpoint run of `vmm` and follows it, as a client whose output goes to `stdout`.
fn follow(vmm: &Vmm<'_>, store: &str, stdout: Stdio) -> Child {
    let run = ["checkpoint", "--store", store, "--every", "1ms", "--keep", "2", "--json"];
    let socket = vmm.socket();
    let all = [&run[..], &["--timeout", "1s", "--api-sock", &socket]].concat();
    driftline(&all).stdout(stdout).stderr(Stdio::null()).spawn().unwrap()
}

/// Returns the page of the checkpoint run.
fn run_of(vmm: &Vmm<'_>) -> Option<Value> {
    let path = format!("/v1/checkpoint?since={}", u64::MAX);
    let page = driftline_machine::testing::get(Path::new(&vmm.socket()), &path)?;
    serde_json::from_str(&page).ok()
}

fn await_checkpoints(vmm: &Vmm<'_>, checkpoints: u64) {
    wait_for("checkpoints", || {
        let taken = run_of(vmm)?["achieved"]["taken"].as_u64()?;
        (taken >= checkpoints).then_some(())
    });
}

#[test]
fn run_whose_client_blocks_can_be_ended() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "guest", GUEST);
    let (store, pipe) = (tmp.text("store"), std::io::pipe().unwrap());
    let mut client = follow(&vmm, &store, pipe.1.into());
    // More than fits into a pipe: the client waits for its reader.
    await_checkpoints(&vmm, 1000);
    assert_eq!(vmm.state(), "running");
    vmm.tell(&["checkpoint", "--stop"]);
    assert_eq!(run_of(&vmm).unwrap()["running"], false);
    // The next run can use the store.
    vmm.tell(&["checkpoint", "--store", &store]);
    drop(pipe.0);
    client.wait().unwrap();
}

#[test]
fn run_ends_with_a_client_that_gives_up() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "guest", GUEST);
    let mut client = follow(&vmm, &tmp.text("store"), Stdio::null());
    await_checkpoints(&vmm, 1);
    vmm.signal(Signal::STOP);
    let began = Instant::now();
    assert_eq!(client.wait().unwrap().code(), Some(1));
    assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
    vmm.signal(Signal::CONT);
    wait_for("the end of the run", || (run_of(&vmm)?["running"] == false).then_some(()));
    assert_eq!(vmm.state(), "running");
}

/// A guest whose memory takes `send-migration --max-bandwidth 1M` about eight seconds to send.
const SLOW_TO_SEND: &[&str] =
    &["--backend", "threads", "--mem", "32M", "--guest", "payload,ws=8M,rate=32M,report=200"];

#[test]
fn migration_of_a_stopped_vmm_is_given_up() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "source", SLOW_TO_SEND);
    vmm.await_progress(1, &[]);
    let (_there, to) = receiver(&tmp, "there", &[]);
    let send = ["send-migration", &to, "--max-bandwidth", "1M", "--timeout", "1s", "--json"];
    let sender = driftline(&[&send[..], &["--api-sock", &vmm.socket()]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for("the first pass", || (vmm.info()?["migration"]["phase"] == "precopy").then_some(()));
    vmm.signal(Signal::STOP);
    let began = Instant::now();
    let out = sender.wait_with_output().unwrap();
    let stderr = text(&out.stderr);
    assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
    assert_eq!(out.status.code(), Some(1), "the guest may be on either host: {stderr}");
    assert!(stderr.contains("has not answered GET /v1/migration in 1.2s"), "{stderr}");
    assert!(stderr.contains("; look for the guest at the destination"), "{stderr}");
    let failure: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(failure["error"]["code"], "no-answer", "{failure}");
    vmm.signal(Signal::CONT);
}

#[test]
fn wanted_waits_outlast_the_timeout() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "source", SLOW_TO_SEND);
    vmm.await_progress(1, &[]);
    // Each request has to be answered within it, on a busy host, too.
    let limit = Duration::from_secs(3);
    let outlasts = |command: &[&str]| {
        let began = Instant::now();
        let printed = vmm.tell(&[command, &["--timeout", "3s"]].concat());
        assert!(began.elapsed() > limit, "{command:?} took {:?} only", began.elapsed());
        printed
    };
    let store = tmp.text("store");
    std::thread::scope(|scope| {
        scope.spawn(|| outlasts(&["top", "--once", "--interval", "5s"]));
        let taken = outlasts(&["checkpoint", "--store", &store, "--every", "5s", "--count", "2"]);
        assert_eq!(taken.lines().count(), 2, "{taken}");
    });
    let (_there, to) = receiver(&tmp, "there", &[]);
    let send = ["send-migration", &to, "--max-bandwidth", "1M", "--json"];
    // The migration switches over after five seconds, whatever its progress.
    let end = ["--timeout-s", "5", "--timeout-strategy", "switchover"];
    let sent = outlasts(&[&send[..], &end].concat());
    let report: Value = serde_json::from_str(&sent).unwrap();
    assert_eq!(report["status"], "completed", "{report}");
    assert_eq!(vmm.wait(), Some(0));
}

fn unix_socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
}

/// Connects to a socket on which no process accepts, until no further connection fits into its
/// backlog.
fn fill(path: &str) -> Vec<OwnedFd> {
    let address = SocketAddrUnix::new(path).unwrap();
    let mut waiting = Vec::new();
    loop {
        let fd = unix_socket();
        match connect(&fd, &address) {
            Ok(()) => waiting.push(fd),
            Err(e) => {
                assert_eq!(e, Errno::AGAIN);
                return waiting;
            }
        }
    }
}

/// The client of a run finds another socket, on which no process accepts, at the path of the VMM's.
#[test]
fn vmm_that_accepts_nothing_has_not_ended() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "guest", GUEST);
    let (path, full, store) = (tmp.text("path"), tmp.text("full"), tmp.text("store"));
    symlink(vmm.socket(), &path).unwrap();
    let listener = unix_socket();
    bind(&listener, &SocketAddrUnix::new(&full).unwrap()).unwrap();
    listen(&listener, 1).unwrap();
    let _waiting = fill(&full);
    let run = ["checkpoint", "--store", &store, "--every", "10ms", "--keep", "2"];
    let client = driftline(&[&run[..], &["--api-sock", &path]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    await_checkpoints(&vmm, 3);
    symlink(&full, tmp.path("next")).unwrap();
    rename(tmp.path("next"), &path).unwrap();
    let out = client.wait_with_output().unwrap();
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&format!("the VMM on {path} does not answer: ")), "{stderr}");
    assert!(stderr.contains("; the last durable checkpoint is "), "{stderr}");
}

#[test]
fn stopped_vmm_does_not_hold_up_another_start() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "stopped", GUEST);
    vmm.signal(Signal::STOP);
    let waiting = fill(&vmm.socket());
    let path = vmm.socket();
    let args = [&["run"], GUEST, &["--api-sock", &path]].concat();
    let mut other = driftline(&args).stderr(Stdio::piped()).spawn().unwrap();
    let ended = wait_for("the end of another", || other.try_wait().unwrap());
    let mut stderr = String::new();
    other.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(ended.code(), Some(1), "{stderr}");
    assert!(stderr.contains("is in use: another process listens there; stop that one"), "{stderr}");
    drop(waiting);
    vmm.signal(Signal::CONT);
    wait_for("an answer of the first", || vmm.info());
}

#[test]
fn stop_ends_a_waiting_receiver() {
    let tmp = TestDir::new();
    let (mut waiting, _) = receiver(&tmp, "waiting", &[]);
    waiting.await_api();
    waiting.tell(&["stop", "--wait"]);
    assert!(!waiting.is_alive());
}

#[test]
fn unknown_parameters_of_requests_are_refused() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "guest", GUEST);
    for (method, path, unknown) in [
        ("DELETE", "/v1/migration?jbo=3", "jbo"),
        ("GET", "/v1/migration?jbo=3", "jbo"),
        ("DELETE", "/v1/checkpoint?jbo=3", "jbo"),
        ("GET", "/v1/checkpoint?wait=3", "wait"),
        ("GET", "/v1/dirty/watch?watch=1&wait=3", "wait"),
        ("GET", "/v1/info?verbose=1", "verbose"),
        ("POST", "/v1/stop?force=1", "force"),
    ] {
        let answer = request(&vmm.socket(), method, path, "");
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains(unknown), "{path}: {answer}");
    }
    assert_eq!(vmm.state(), "running");
    assert!(request(&vmm.socket(), "GET", "/v1/info", "").starts_with("HTTP/1.1 200"));
}
