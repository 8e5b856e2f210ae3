//! Clients that open connections to the API and send nothing, or send slowly, cannot keep an
//! operator from being answered, and their cost is bounded.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::common::{TestDir, Vmm, attack, wait_for};

const GUEST: &[&str] =
    &["--backend", "threads", "--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8"];
/// Allowance beside connections: the operator's own, and threads that are ending.
const SLACK: usize = 16;

fn client(of: &Vmm<'_>, says: &str) -> UnixStream {
    let mut stream = UnixStream::connect(of.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    // The connection may have been displaced already.
    let _ = stream.write_all(says.as_bytes());
    stream
}

/// Opens connections for the duration of an attack, at least `least` of them, and sends one of
/// `says` on each. Returns the last `least` connections.
fn flood(of: &Vmm<'_>, least: usize, says: &[&str]) -> VecDeque<UnixStream> {
    let began = Instant::now();
    let mut open = VecDeque::new();
    for n in 0.. {
        if n >= least && began.elapsed() >= attack() {
            break;
        }
        open.push_back(client(of, says[n % says.len()]));
        if open.len() > least {
            open.pop_front();
        }
    }
    open
}

#[test]
fn silent_clients_keep_no_operator_out() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "vmm", GUEST);
    let before = vmm.usage();
    let says = [
        "",
        "GET /v1/info HTT",
        "PATCH /vm HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        "GET /version HTTP/1.1\r\nHost: x\r\n\r\n",
    ];
    let held_open = flood(&vmm, 400, &says);
    // Connections are accepted in order, so the last one has been accepted.
    assert_eq!(vmm.state(), "running");
    vmm.tell(&["pause"]);
    vmm.tell(&["resume"]);
    let now = vmm.usage();
    assert!(now.files <= before.files + 64 + SLACK, "{now:?}, {before:?} before");
    assert!(now.threads <= before.threads + SLACK, "{now:?}, {before:?} before");
    assert!(now.resident_kib <= before.resident_kib + (32 << 10), "{now:?}, {before:?} before");
    drop(held_open);
    wait_for("files as before", || (vmm.usage().files <= before.files).then_some(()));
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0), "{}", vmm.stderr());
}

#[test]
fn clients_that_read_nothing_are_displaced() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "vmm", GUEST);
    let files = vmm.usage().files;
    // More answers than fit into a socket's buffers.
    let many = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(500);
    let held_open = flood(&vmm, 160, &[&many]);
    assert_eq!(vmm.state(), "running");
    wait_for("room", || (vmm.usage().files <= files + 64 + SLACK).then_some(()));
    drop(held_open);
    wait_for("files as before", || (vmm.usage().files <= files).then_some(()));
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0), "{}", vmm.stderr());
}

#[test]
fn a_slow_client_is_answered_while_others_are() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "vmm", GUEST);
    let request = "GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let (first, rest) = request.split_at(9);
    let mut slow = client(&vmm, first);
    let _others: Vec<UnixStream> = (0..32).map(|_| client(&vmm, "")).collect();
    assert_eq!(vmm.state(), "running");
    slow.write_all(rest.as_bytes()).unwrap();
    let mut answer = String::new();
    slow.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0), "{}", vmm.stderr());
}

#[test]
fn requests_that_wait_leave_room_for_an_operator() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "vmm", GUEST);
    let store = tmp.text("store");
    let checkpoints = ["checkpoint", "--store", &store, "--every", "1s", "--detach"];
    vmm.tell(&checkpoints);
    let attach = "GET /v1/checkpoint/attach HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut waiting: Vec<UnixStream> = (0..64).map(|_| client(&vmm, attach)).collect();
    let mut refused = wait_for("a refusal", || {
        let mut more = client(&vmm, attach);
        more.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let mut begin = [0; 12];
        match more.read_exact(&mut begin) {
            Ok(()) => Some(String::from_utf8(begin.to_vec()).unwrap()),
            // The request waits: the server has not read all of the others yet.
            Err(_) => {
                waiting.push(more);
                None
            }
        }
    });
    refused.truncate(12);
    assert_eq!(refused, "HTTP/1.1 503");
    assert_eq!(vmm.state(), "running");
    vmm.tell(&["pause"]);
    vmm.tell(&["resume"]);
    vmm.tell(&["checkpoint", "--stop"]);
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0), "{}", vmm.stderr());
}

/// Returns whether the server now refuses one more request of the waiting class.
fn is_full(of: &Vmm<'_>) -> bool {
    let mut more = client(of, "GET /v1/checkpoint?wait_ms=1 HTTP/1.1\r\nHost: x\r\n\r\n");
    let mut begin = [0; 12];
    more.read_exact(&mut begin).unwrap();
    begin.ends_with(b"503")
}

#[test]
fn requests_that_wait_end_with_their_clients() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "vmm", GUEST);
    let store = tmp.text("store");
    vmm.tell(&["checkpoint", "--store", &store, "--every", "1s", "--detach"]);
    for attach in [
        "GET /v1/checkpoint/attach HTTP/1.1\r\nHost: x\r\n\r\n",
        "HEAD /v1/checkpoint/attach HTTP/1.1\r\nHost: x\r\n\r\n",
        // The byte after the request hides the end of the connection from a server that reads no
        // further.
        "GET /v1/checkpoint/attach HTTP/1.1\r\nHost: x\r\n\r\nX",
    ] {
        let mut waiting: Vec<UnixStream> = (0..64).map(|_| client(&vmm, attach)).collect();
        wait_for("a refusal", || {
            let full = is_full(&vmm);
            // Connections that the server had not read yet may have been displaced.
            waiting.extend((!full).then(|| client(&vmm, attach)));
            full.then_some(())
        });
        drop(waiting);
        wait_for("room", || (!is_full(&vmm)).then_some(()));
    }
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0), "{}", vmm.stderr());
}
