//! Requests and commands while a guest's disk never answers: none waits for ever, and clients that
//! leave keep no other out.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::stuck_guest::{StuckGuest, cases_or_skip, in_time, sigterm};
use crate::common::{TestDir, Vmm, attack, driftline, side_by_side, wait_for};

fn requests_fail_in_hanging_flush() {
    side_by_side([(1, "pause"), (4, "checkpoint")], |(code, request)| {
        let tmp = TestDir::new();
        let test = "requests_fail_in_hanging_flush";
        let Some(stuck) = StuckGuest::in_a_flush(&tmp, test) else { return };
        let (vmm, store) = (&stuck.vmm, tmp.text("store"));
        let to_store = ["--store", &store];
        let options: &[&str] = if request == "checkpoint" { &to_store } else { &[] };
        let refused = || vmm.refuse(code, &[&[request], options].concat());
        let stderr = in_time(request, refused);
        assert!(stderr.contains("\"disk0\""), "{stderr}");
        assert_eq!(vmm.state(), "running");
    });
}

fn run_in_hanging_flush_can_be_ended() {
    let tmp = TestDir::new();
    let test = "run_in_hanging_flush_can_be_ended";
    let Some(stuck) = StuckGuest::in_a_flush(&tmp, test) else { return };
    let (vmm, store) = (&stuck.vmm, tmp.text("store"));
    // A run whose checkpoints wait for the disk ends with the checkpoint in progress.
    vmm.tell(&["checkpoint", "--store", &store, "--every", "1ms", "--detach"]);
    let stderr = vmm.refuse(1, &["checkpoint", "--stop", "--timeout", "1s"]);
    assert!(stderr.contains("has not ended within 1s"), "{stderr}");
    in_time("the end of the run", || vmm.tell(&["checkpoint", "--stop", "--timeout", "60s"]));
    assert_eq!(vmm.state(), "running");
}

fn second_interrupt_ends_a_command_that_waits() {
    let tmp = TestDir::new();
    let test = "second_interrupt_ends_a_command_that_waits";
    let Some(stuck) = StuckGuest::in_a_flush(&tmp, test) else { return };
    let vmm = &stuck.vmm;
    let (store, socket) = (tmp.text("store"), vmm.socket());
    let run = ["checkpoint", "--store", &store, "--every", "1ms", "--api-sock", &socket];
    let mut run = driftline(&run);
    run.stdout(Stdio::null()).stderr(File::create(tmp.path("run.err")).unwrap());
    let mut run = run.spawn().unwrap();
    // The next checkpoint waits for the disk, too.
    wait_for("a failed checkpoint", || tmp.read("run.err").contains("disk0").then_some(()));
    let interrupt = |message: &str| {
        kill_process(Pid::from_child(&run), Signal::INT).unwrap();
        wait_for(message, || tmp.read("run.err").contains(message).then_some(()));
    };
    interrupt("stopping after the current checkpoint");
    in_time("the second interrupt", || interrupt("interrupted before the checkpoint run"));
    assert_eq!(run.wait().unwrap().code(), Some(1));
}

/// Sends a request and disconnects before the answer. Returns true if the server immediately
/// refuses the request because too many others are being answered.
fn leave(vmm: &Vmm<'_>, head: &str, body: &str) -> bool {
    let mut stream = UnixStream::connect(vmm.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    let length = body.len();
    // The connection may have been displaced already.
    let _ = write!(stream, "{head} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{body}");
    let mut begin = [0; 12];
    stream.read_exact(&mut begin).is_ok() && begin.ends_with(b"503")
}

/// Maximum number of threads that answer requests, plus an allowance for threads that come and go.
const ANSWERING: usize = 64 + 2 * 16 + 16;

fn abandoned_requests_keep_no_operator_out() {
    let tmp = TestDir::new();
    let test = "abandoned_requests_keep_no_operator_out";
    let Some(stuck) = StuckGuest::in_a_flush(&tmp, test) else { return };
    let vmm = &stuck.vmm;
    let before = vmm.usage().threads;
    // A watchdog whose timeout is shorter than a pause that waits for a disk.
    let began = Instant::now();
    let (mut sent, mut most, mut refused) = (0, 0, false);
    while sent < 700 || began.elapsed() < attack() {
        refused |= leave(vmm, "PATCH /vm", r#"{"state":"Paused"}"#);
        sent += 1;
        most = most.max(vmm.usage().threads);
    }
    assert!(refused, "{sent} pauses were under way simultaneously");
    assert!(most <= before + ANSWERING, "{most} threads, {before} before");
    // A request for the guest's state is answered despite the pauses.
    assert_eq!(vmm.state(), "running");
    sigterm(vmm);
    wait_for("the guest's end", || vmm.stderr().contains("a device has not").then_some(()));
    stuck.ends_with(0);
}

fn stops_that_wait_are_bounded() {
    let tmp = TestDir::new();
    let Some(stuck) = StuckGuest::in_a_flush(&tmp, "stops_that_wait_are_bounded") else { return };
    let vmm = &stuck.vmm;
    let before = vmm.usage().threads;
    // The first request waits for the flush, and the others wait for the first.
    wait_for("a refusal", || {
        let refused = leave(vmm, "POST /v1/stop", "");
        let now = vmm.usage().threads;
        assert!(now <= before + ANSWERING, "{now} threads, {before} before");
        refused.then_some(())
    });
    assert!(vmm.info().is_some(), "stops have places of their own");
    stuck.ends_with(0);
}

#[test]
fn requests_in_a_hanging_flush_end() {
    cases_or_skip(
        "requests_in_a_hanging_flush_end",
        [
            requests_fail_in_hanging_flush,
            run_in_hanging_flush_can_be_ended,
            second_interrupt_ends_a_command_that_waits,
        ],
    );
}

#[test]
fn requests_that_hang_keep_no_operator_out() {
    cases_or_skip(
        "requests_that_hang_keep_no_operator_out",
        [abandoned_requests_keep_no_operator_out, stops_that_wait_are_bounded],
    );
}
