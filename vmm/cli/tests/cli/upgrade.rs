//! `driftline upgrade`: another process continues with the guest, and no client notices.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep, spawn};
use std::time::Duration;

use crate::common::latest_process::{LatestProcess, is_running, taken_by_first_run};
use crate::common::{
    TIMEOUT, TestDir, Vmm, driftline, echo, output, side_by_side, succeed, text, wait_for,
};
use crate::metrics;
use driftline_images::PayloadMessage;
use driftline_machine::testing::{full, kvm_or_skip, most_in_upgrade, share_kib};
use parking_lot::Mutex;
use serde_json::Value;

const THREADS: &[&str] = &["--backend", "threads", "--mem", "64M", "--vcpus", "2"];
const KVM: &[&str] = &["--backend", "kvm", "--mem", "128M", "--vcpus", "2"];
const GUEST: &[&str] =
    &["--memory-backing", "memfd", "--guest", "payload,ws=16M,rate=32M,burst=32,report=200"];
/// A guest that writes each page once a second. A page that a checkpoint has missed is therefore
/// not in a checkpoint that follows soon after it.
const SLOW_GUEST: &[&str] =
    &["--memory-backing", "memfd", "--guest", "payload,ws=2M,rate=2M,burst=8,report=100"];

/// A client that keeps its connection.
struct KeptConnection(BufReader<UnixStream>);

impl KeptConnection {
    fn open(socket: &str) -> Self {
        Self::of(UnixStream::connect(socket).unwrap())
    }

    /// Takes a connection of any kind of stream socket. Reads, writes and timeouts are the same.
    fn of(stream: impl Into<OwnedFd>) -> Self {
        let stream = UnixStream::from(stream.into());
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self(BufReader::new(stream))
    }

    fn get(&mut self, path: &str) -> Value {
        serde_json::from_slice(&self.get_bytes(path)).unwrap()
    }

    fn get_bytes(&mut self, path: &str) -> Vec<u8> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
        self.0.get_mut().write_all(request.as_bytes()).unwrap();
        let mut length = 0;
        let mut status = String::new();
        self.0.read_line(&mut status).unwrap();
        assert!(status.starts_with("HTTP/1.1 200"), "{path}: {status}");
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).unwrap();
            if line == "\r\n" {
                break;
            }
            let lower = line.to_lowercase();
            if let Some(bytes) = lower.strip_prefix("content-length: ") {
                length = bytes.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).unwrap();
        body
    }
}

/// Input arrives all the time. What the guest does not take in one process waits for the next one.
#[test]
fn piped_input_reaches_the_guest_once() {
    if !kvm_or_skip("piped_input_reaches_the_guest_once") {
        return;
    }
    let tmp = TestDir::new();
    let (vmm, mut input, mut output) = echo::start(&tmp, &["--memory-backing", "memfd"]);
    let latest = LatestProcess::of(&vmm);
    let nth = |i: usize| (i % 251) as u8;
    let is_over = Arc::new(AtomicBool::new(false));
    let stop = is_over.clone();
    let writes = spawn(move || {
        let mut sent = 0;
        while !stop.load(Ordering::Relaxed) {
            let piece: Vec<u8> = (sent..sent + 100).map(nth).collect();
            input.write_all(&piece).unwrap();
            sent += piece.len();
            // A busy guest echoes a byte in 0.3 ms.
            sleep(Duration::from_millis(5));
        }
        sent
    });
    let echoed = Arc::new(Mutex::new(Vec::new()));
    let reads = echoed.clone();
    // Ends with the guest.
    spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(n @ 1..) = output.read(&mut piece) {
            reads.lock().extend_from_slice(&piece[..n]);
        }
    });
    for _ in 0..5 {
        latest.upgrade();
    }
    is_over.store(true, Ordering::Relaxed);
    wait_for("the last input to be taken", || writes.is_finished().then_some(()));
    let sent = writes.join().unwrap();
    wait_for("all echoes", || (echoed.lock().len() >= sent).then_some(()));
    vmm.tell(&["stop"]);
    assert!(echoed.lock().iter().copied().eq((0..sent).map(nth)), "lost, or in another order");
}

/// Ends the clients of a test when dropped, also by a panic: a scope waits for its threads.
struct ClientsEnd<'t>(&'t AtomicBool);

impl Drop for ClientsEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns the numbers of blocks that the guest has reported, in order.
fn blocks(tmp: &TestDir) -> Vec<u64> {
    let reported = |line: &str| match PayloadMessage::parse(line) {
        Some(PayloadMessage::Io(io)) => Some(io.blocks),
        _ => None,
    };
    let console = fs::read_to_string(tmp.path("first.serial")).unwrap();
    console.lines().filter_map(reported).collect()
}

/// Starts `guest` and replaces its process `times` times, while clients ask over connections that
/// they keep, and over new ones.
fn upgrades(tmp: &TestDir, guest: &[&str], times: u32) {
    let vmm = Vmm::run(tmp, "first", guest);
    let latest = LatestProcess::of(&vmm);
    let id = vmm.info().unwrap()["vm_id"].clone();
    let before = vmm.await_progress(2, &[]);
    let mut idle = KeptConnection::open(&vmm.socket());
    latest.upgrade();
    let usage = latest.usage();
    let is_over = AtomicBool::new(false);
    let asks = |connection: &mut KeptConnection| {
        assert_eq!(connection.get("/v1/info")["vm_id"], id);
        sleep(Duration::from_millis(1));
    };
    scope(|scope| {
        let end = ClientsEnd(&is_over);
        let keeps = || {
            let mut kept = KeptConnection::open(&vmm.socket());
            while !is_over.load(Ordering::Relaxed) {
                asks(&mut kept);
            }
        };
        let renews = || {
            while !is_over.load(Ordering::Relaxed) {
                asks(&mut KeptConnection::open(&vmm.socket()));
            }
        };
        let clients = [scope.spawn(keeps), scope.spawn(renews)];
        let reports: Vec<Value> = (0..times).map(|_| latest.upgrade()).collect();
        drop(end);
        clients.into_iter().for_each(|client| client.join().unwrap());
        println!("{}", reports.last().unwrap());
    });
    assert_eq!(idle.get("/v1/info")["pid"], latest.pid(), "the next process serves the connection");
    vmm.await_progress(2, &before);
    for _ in 0..2 {
        // The first later report may count blocks from before the last upgrade. There is none if
        // the guest uses no disk.
        let Some(before) = blocks(tmp).pop() else { break };
        wait_for("more blocks of the disk", || (*blocks(tmp).last()? > before).then_some(()));
    }
    latest.await_usage(usage);
    // It waits for the process that has the guest, not for the one that has bound the socket.
    let last = latest.pid();
    vmm.tell(&["stop", "--wait"]);
    assert!(!is_running(last));
    wait_for("the socket's end", || (!fs::exists(vmm.socket()).unwrap()).then_some(()));
}

#[test]
fn guest_of_threads_outlives_its_processes() {
    upgrades(&TestDir::new(), &[THREADS, GUEST].concat(), if full() { 1000 } else { 5 });
}

#[test]
fn kvm_guest_outlives_its_processes() {
    if !kvm_or_skip("kvm_guest_outlives_its_processes") {
        return;
    }
    let tmp = TestDir::new();
    let disk = format!("path={}", tmp.text("disk"));
    fs::File::create(tmp.path("disk")).unwrap().set_len(1 << 20).unwrap();
    let spec = format!("{},io=5", GUEST[3]);
    let guest = ["--memory-backing", "memfd", "--guest", &spec, "--disk", &disk];
    upgrades(&tmp, &[KVM, &guest].concat(), if full() { 1000 } else { 10 });
    let blocks = blocks(&tmp);
    assert!(blocks.is_sorted() && !blocks.is_empty(), "{blocks:?}");
}

#[test]
fn untracked_guest_outlives_its_processes() {
    if kvm_or_skip("untracked_guest_outlives_its_processes") {
        let guest = [KVM, GUEST, &["--tracking", "none"]].concat();
        upgrades(&TestDir::new(), &guest, 2);
    }
}

#[test]
fn both_processes_have_one_guests_memory() {
    if !kvm_or_skip("both_processes_have_one_guests_memory") {
        return;
    }
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "first", &[KVM, GUEST, &["--prefault"]].concat());
    let _latest = LatestProcess::of(&vmm);
    // The next process maps only the pages that its guest touches.
    let own_kib = share_kib(vmm.pid()).unwrap();
    assert!(own_kib > 128 << 10, "{own_kib} KiB are less than the guest's memory");
    let command = driftline(&["upgrade", "--api-sock", &vmm.socket()]);
    let (upgraded, most_kib) = most_in_upgrade(vmm.pid(), command).unwrap();
    assert!(upgraded.status.success(), "{}", text(&upgraded.stderr));
    let most_kib = most_kib.expect("both processes were there");
    println!("{own_kib} KiB before, at most {most_kib} KiB together");
    assert!(most_kib < own_kib + (32 << 10), "{most_kib} KiB, and {own_kib} KiB before");
}

/// A collector of metrics scrapes all the time over one connection.
#[test]
fn collector_keeps_its_connection() {
    let tmp = TestDir::new();
    let listens = ["--metrics-listen", "127.0.0.1:0"];
    let vmm = Vmm::run(&tmp, "first", &[THREADS, GUEST, &listens].concat());
    let latest = LatestProcess::of(&vmm);
    let mut collector = KeptConnection::of(TcpStream::connect(metrics::address(&vmm)).unwrap());
    let (is_over, started) = (AtomicBool::new(false), Mutex::new(BTreeSet::new()));
    scope(|scope| {
        let end = ClientsEnd(&is_over);
        let scrapes = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let page = text(&collector.get_bytes("/metrics"));
                let line = page.lines().find(|line| line.starts_with("process_start_time_seconds"));
                started.lock().insert(line.unwrap().to_owned());
            }
        });
        let await_answers_of = |processes| {
            wait_for("the latest process's answer", || {
                (scrapes.is_finished() || started.lock().len() >= processes).then_some(())
            });
        };
        await_answers_of(1);
        for processes in 2..5 {
            latest.upgrade();
            await_answers_of(processes);
        }
        drop(end);
        scrapes.join().unwrap();
    });
}

/// Replaces the process `times` times during a checkpoint run that a client follows. The run has
/// one full checkpoint, and its last one holds what the guest has written.
fn checkpoints_continue(machine: &[&str], times: u32) {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let vmm = Vmm::run(&tmp, "first", &[machine, SLOW_GUEST].concat());
    let run = ["checkpoint", "--every", "20ms", "--json", "--store", &store, "--api-sock"];
    let mut run = driftline(&[&run[..], &[&vmm.socket()]].concat());
    let run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let latest = LatestProcess::of(&vmm);
    let before = vmm.await_progress(2, &[]);
    let taken = || taken_by_first_run(&vmm);
    for _ in 0..times {
        let before = wait_for("a checkpoint", || {
            vmm.info().filter(|info| info["checkpointing"] == true)?;
            Some(taken()).filter(|taken| *taken > 0)
        });
        latest.upgrade();
        wait_for("two more checkpoints", || (taken() >= before + 2).then_some(()));
    }
    vmm.tell(&["checkpoint", "--stop"]);
    let run = run.wait_with_output().unwrap();
    assert!(run.status.success(), "{}", text(&run.stderr));
    let lines: Vec<Value> =
        text(&run.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (achieved, lines) = lines.split_last().unwrap();
    let numbers: Vec<u64> = lines.iter().map(|l| l["checkpoint"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>(), "none is missing");
    let achieved = &achieved["achieved"];
    assert_eq!((&achieved["taken"], &achieved["failed"]), (&numbers.len().into(), &0.into()));
    drop(latest);
    let listing: Value =
        serde_json::from_str(&succeed(&["store", "ls", "--json", &store])).unwrap();
    let all = listing["checkpoints"].as_array().unwrap();
    let full = all.iter().filter(|one| one["full"] == true).count();
    assert_eq!((all.len(), full), (numbers.len(), 1), "the chain has not begun again");
    let mut restored = Vmm::start(&tmp, "second", &["restore", "--same-id", "--store", &store]);
    restored.await_api();
    restored.await_checked_pages(2, &before);
}

#[test]
fn checkpoints_of_threads_continue() {
    checkpoints_continue(THREADS, if full() { 50 } else { 3 });
}

#[test]
fn checkpoints_continue_in_every_tracking_mode() {
    if !kvm_or_skip("checkpoints_continue_in_every_tracking_mode") {
        return;
    }
    let modes = ["dirty-ring", "dirty-bitmap", "dirty-bitmap-manual", "userfault-wp"];
    side_by_side(modes, |mode| {
        checkpoints_continue(&[KVM, &["--tracking", mode]].concat(), if full() { 50 } else { 2 });
    });
}

/// The next process refuses the guest's state after the run was suspended.
#[test]
fn checkpoint_run_stays_if_the_guest_does() {
    if !kvm_or_skip("checkpoint_run_stays_if_the_guest_does") {
        return;
    }
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let mut command = driftline(&[&["run"], KVM, GUEST].concat());
    command.env("DRIFTLINE_TEST_LATER_STATE", "must");
    let mut vmm = Vmm::start_by(&tmp, "first", command);
    vmm.await_api();
    vmm.tell(&["checkpoint", "--store", &store, "--every", "10ms", "--detach"]);
    let taken = || taken_by_first_run(&vmm);
    for _ in 0..3 {
        let before = taken();
        let said = vmm.refuse(4, &["upgrade"]);
        assert!(said.contains("unknown section 32752, \"later state\""), "{said}");
        wait_for("two more checkpoints", || (taken() >= before + 2).then_some(()));
    }
    vmm.tell(&["checkpoint", "--stop"]);
    let listing: Value =
        serde_json::from_str(&succeed(&["store", "ls", "--json", &store])).unwrap();
    let all = listing["checkpoints"].as_array().unwrap();
    assert_eq!(all.iter().filter(|one| one["full"] == true).count(), 1);
}

/// Upgrades a guest to a later version of the program, to that again, and back. A process with
/// `DRIFTLINE_TEST_LATER_STATE` acts as the later version. The way back succeeds, or is refused for
/// the given reason.
fn later_version_and_back(change: &'static str, refusal: Option<&str>) {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, change, &[KVM, GUEST].concat());
    let latest = LatestProcess::of(&vmm);
    let upgrade = |version: Option<&str>| {
        let before = latest.pid();
        let mut upgrade = driftline(&["upgrade", "--json", "--api-sock", &vmm.socket()]);
        upgrade.envs(version.map(|change| ("DRIFTLINE_TEST_LATER_STATE", change)));
        let out = upgrade.output().unwrap();
        (out.status.code(), text(&out.stderr), latest.pid() != before)
    };
    for version in [Some(change), Some(change), None] {
        let (code, said, is_replaced) = upgrade(version);
        match refusal.filter(|_| version.is_none()) {
            None => assert!(code == Some(0) && is_replaced, "{version:?}: {said}"),
            Some(why) => {
                assert!(code == Some(4) && !is_replaced, "{said}");
                assert!(said.contains(why), "{said}");
            }
        }
        vmm.await_progress(2, &vmm.reports());
    }
}

#[test]
fn later_state_is_refused_by_name() {
    if !kvm_or_skip("later_state_is_refused_by_name") {
        return;
    }
    let cases = [
        // A section that an earlier version skips.
        ("may", None),
        // A section that it must understand.
        ("must", Some("unknown section 32752, \"later state\" (instance 0)")),
        // A section with another version. The later program reads both versions.
        ("serial", Some("serial port (instance 0) cannot be used on this host: it has version 2")),
    ];
    side_by_side(cases, |(change, refusal)| later_version_and_back(change, refusal));
}

#[test]
fn guest_stays_if_the_next_process_fails() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "first", &[THREADS, GUEST].concat());
    let program = |name: &str, script: &str| {
        fs::write(tmp.path(name), format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(tmp.path(name), fs::Permissions::from_mode(0o700)).unwrap();
        tmp.text(name)
    };
    let none = vmm.refuse(1, &["upgrade", "--binary", "/none"]);
    assert!(none.contains("cannot start /none"), "{none}");
    let ends = program("ends", "exit 1");
    let said = vmm.refuse(4, &["upgrade", "--binary", &ends]);
    assert!(said.contains("offering the guest to the process at"), "{said}");
    // Of another service, whose manager would end the guest with its main process.
    let mut other = driftline(&["upgrade", "--api-sock", &vmm.socket()]);
    let other = other.env("NOTIFY_SOCKET", "@another").output().unwrap();
    let said = text(&other.stderr);
    assert_eq!(other.status.code(), Some(4), "{said}");
    assert!(said.contains("the next process refuses: it is not of the same service"), "{said}");
    // A log filter that the next process alone has.
    let real = env!("CARGO_BIN_EXE_driftline");
    let unlogged = program("unlogged", &format!("RUST_LOG== exec {real} take-over $2"));
    let said = vmm.refuse(4, &["upgrade", "--binary", &unlogged]);
    assert!(said.contains("the next process refuses: ") && said.contains("RUST_LOG"), "{said}");
    if full() {
        let hangs = program("hangs", "sleep 100");
        vmm.refuse(4, &["upgrade", "--binary", &hangs]);
    }
    assert_eq!(vmm.info().unwrap()["pid"], vmm.pid());
    vmm.await_progress(2, &vmm.reports());
    let other = tmp.path("other");
    if fs::hard_link(real, &other).is_err() {
        fs::copy(real, &other).unwrap();
    }
    vmm.tell(&["upgrade", "--binary", &tmp.text("other")]);
    let latest = LatestProcess::of(&vmm);
    assert_eq!(fs::read_link(format!("/proc/{}/exe", latest.pid())).unwrap(), other);
    vmm.await_progress(2, &vmm.reports());
}

#[test]
fn process_that_cannot_be_replaced_says_why() {
    let tmp = TestDir::new();
    let private = ["--guest", "payload,ws=4M,rate=1M,burst=8,report=200"];
    let vmm = Vmm::run(&tmp, "private", &[THREADS, &private].concat());
    let said = vmm.refuse(4, &["upgrade"]);
    assert!(said.contains("start the guest with --memory-backing memfd"), "{said}");
    let vmm = Vmm::run(&tmp, "shadow", &[THREADS, GUEST, &["--shadow", "compare"]].concat());
    let said = vmm.refuse(4, &["upgrade"]);
    assert!(said.contains("verifies the guest's tracking (--shadow)"), "{said}");
    let out = output(&["upgrade", "--api-sock", &tmp.text("none")]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
}

#[test]
fn service_manager_follows_the_next_process() {
    let tmp = TestDir::new();
    let address = tmp.text("notify");
    let socket = UnixDatagram::bind(&address).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let receive = || {
        let mut message = [0; 256];
        let n = socket.recv(&mut message).unwrap();
        text(&message[..n])
    };
    let mut command = driftline(&[&["run"], THREADS, GUEST].concat());
    command.env("NOTIFY_SOCKET", &address);
    let mut vmm = Vmm::start_by(&tmp, "first", command);
    vmm.await_api();
    assert!(receive().starts_with("READY=1\n"));
    let mut upgrade = driftline(&["upgrade", "--api-sock", &vmm.socket()]);
    let upgraded = upgrade.env("NOTIFY_SOCKET", &address).output().unwrap();
    assert!(upgraded.status.success(), "{}", text(&upgraded.stderr));
    let latest = LatestProcess::of(&vmm);
    let main = format!("MAINPID={}\nREADY=1\n", latest.pid());
    assert!(receive().starts_with(&main));
    wait_for("the first process's end", || {
        (!fs::exists(format!("/proc/{}/fd/0", vmm.pid())).unwrap()).then_some(())
    });
    vmm.tell(&["stop"]);
    assert_eq!(receive(), "STOPPING=1\n", "of the next process alone");
}
