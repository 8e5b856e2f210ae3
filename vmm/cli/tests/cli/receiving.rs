//! A process that receives a guest and is stopped meanwhile ends, and the guest continues at its
//! source.

use std::fs::File;
use std::process::{Child, Output, Stdio};

use crate::common::{
    TestDir, Vmm, driftline, proxy_that_ends_with_commit, proxy_that_keeps_commit, receiver,
    side_by_side, text, wait_for,
};
use driftline_machine::testing::kvm_or_skip;
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::Signal;

const GUEST: &[&str] = &[
    "--backend",
    "threads",
    "--mem",
    "64M",
    "--guest",
    "payload,ws=32M,rate=1M,fill=random,report=200",
];

/// The way in which the receiver is stopped.
#[derive(Clone, Copy, Debug)]
enum StopBy {
    Command,
    Sigterm,
}

impl StopBy {
    fn tell(self, vmm: &Vmm<'_>) {
        match self {
            Self::Command => _ = vmm.tell(&["stop"]),
            Self::Sigterm => vmm.signal(Signal::TERM),
        }
    }
}

fn send(source: &Vmm<'_>, args: &[&str]) -> Child {
    let socket = source.socket();
    driftline(&[&["send-migration"], args, &["--api-sock", &socket]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The sender reports that the destination was stopped, and the guest continues at its source.
fn assert_continues(source: &Vmm<'_>, sent: &Output, why: &str) {
    let stderr = text(&sent.stderr);
    assert_eq!(sent.status.code(), Some(4), "{stderr}");
    assert!(stderr.contains(why) && stderr.contains("the guest continues here"), "{stderr}");
    assert_eq!(source.state(), "running");
    let before = source.reports();
    source.await_progress(1, &before);
}

#[test]
fn stop_ends_a_process_that_receives_a_guest() {
    side_by_side([StopBy::Command, StopBy::Sigterm], |stop_by| {
        let tmp = TestDir::new();
        let source = Vmm::run(&tmp, "source", GUEST);
        source.await_progress(1, &[]);
        let (mut receiving, to) = receiver(&tmp, "receiving", &[]);
        // At this rate the first pass takes half a minute.
        let sending = send(&source, &[&to, "--max-bandwidth", "1M"]);
        wait_for("a part of the guest", || {
            let info = receiving.info()?;
            let migration = &info["migration"];
            let came = migration["sent_bytes"].as_u64()? > 0;
            (came && migration["phase"] == "precopy").then_some(())
        });
        stop_by.tell(&receiving);
        assert_eq!(receiving.wait(), Some(1), "{stop_by:?}: {}", receiving.stderr());
        let stderr = receiving.stderr();
        assert!(
            stderr.contains("the receiver was stopped before its guest had arrived"),
            "{stderr}"
        );
        assert!(stderr.contains("in pre-copy"), "{stderr}");
        assert_continues(&source, &sending.wait_with_output().unwrap(), "the receiver was stopped");
    });
}

#[test]
fn stop_before_commit_keeps_guest_at_source() {
    side_by_side([StopBy::Command, StopBy::Sigterm], |stop_by| {
        let tmp = TestDir::new();
        let source = Vmm::run(&tmp, "source", GUEST);
        source.await_progress(1, &[]);
        let (mut receiving, to) = receiver(&tmp, "receiving", &[]);
        // The source sends COMMIT, and the destination, which waits for it, does not receive it.
        let (to, record) = proxy_that_keeps_commit(&to, tmp.path("state"));
        let sending = send(&source, &[&to]);
        wait_for("COMMIT", || {
            let info = source.info()?;
            (info["migration"]["phase"] == "hand-over").then_some(())
        });
        wait_for("PREPARED", || {
            let info = receiving.info()?;
            (info["migration"]["phase"] == "hand-over").then_some(())
        });
        record.assert_written();
        stop_by.tell(&receiving);
        assert_eq!(receiving.wait(), Some(1), "{stop_by:?}: {}", receiving.stderr());
        let stderr = receiving.stderr();
        assert!(stderr.contains("in the hand-over"), "{stderr}");
        let why = "the destination discarded the guest";
        assert_continues(&source, &sending.wait_with_output().unwrap(), why);
    });
}

#[test]
fn stop_after_commit_ends_the_arrived_guest() {
    side_by_side([StopBy::Command, StopBy::Sigterm], |stop_by| {
        let tmp = TestDir::new();
        let mut source = Vmm::run(&tmp, "source", GUEST);
        let (mut receiving, to) = receiver(&tmp, "receiving", &[]);
        let sent = send(&source, &[&to]).wait_with_output().unwrap();
        assert!(sent.status.success(), "{}", text(&sent.stderr));
        // The receiver's main thread may not have given the guest to its API yet.
        stop_by.tell(&receiving);
        assert_eq!(receiving.wait(), Some(0), "{stop_by:?}: {}", receiving.stderr());
        assert!(receiving.stderr().contains("the guest was stopped"), "{}", receiving.stderr());
        assert_eq!(source.wait(), Some(0), "{}", source.stderr());
    });
}

/// Another process has the destination's disk when the destination takes over, and the source does
/// not receive that answer.
#[test]
fn stop_ends_a_process_whose_take_over_failed() {
    if !kvm_or_skip("stop_ends_a_process_whose_take_over_failed") {
        return;
    }
    side_by_side([StopBy::Command, StopBy::Sigterm], |stop_by| {
        let tmp = TestDir::new();
        let disk = |name: &str| {
            File::create(tmp.path(name)).unwrap().set_len(1 << 20).unwrap();
            format!("path={}", tmp.text(name))
        };
        let guest =
            ["--mem", "32M", "--guest", "payload,ws=16M,rate=1M,fill=random,report=200", "--disk"];
        let source = Vmm::run(&tmp, "source", &[&guest[..], &[&disk("own")]].concat());
        source.await_progress(1, &[]);
        let there = format!("{},id=disk0,identity=any", disk("there"));
        let (mut receiving, to) =
            receiver(&tmp, "receiving", &["--disk", &there, "--answer-timeout", "600s"]);
        let (to, record) = proxy_that_ends_with_commit(&to, tmp.path("state"));
        let mut sending = send(&source, &[&to, "--max-bandwidth", "4M"]);
        wait_for("a part of the guest", || {
            (receiving.info()?["migration"]["phase"] == "precopy").then_some(())
        });
        let thief = File::options().write(true).open(tmp.path("there")).unwrap();
        fcntl_lock(&thief, FlockOperation::NonBlockingLockExclusive).unwrap();
        wait_for("the take-over to fail", || {
            receiving.stderr().contains("waiting up to").then_some(())
        });
        record.assert_written();
        stop_by.tell(&receiving);
        assert_eq!(receiving.wait(), Some(1), "{stop_by:?}: {}", receiving.stderr());
        let stderr = receiving.stderr();
        assert!(stderr.contains("is in use by another"), "{stderr}");
        sending.kill().unwrap();
        sending.wait().unwrap();
    });
}
