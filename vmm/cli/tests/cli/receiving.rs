//! A process that receives a guest and is stopped meanwhile ends, and the guest continues at its
//! source.

use std::fs::File;
use std::process::{Child, Output, Stdio};

use crate::common::{
    Place, Vmm, driftline, proxy_that_ends_with_commit, proxy_that_keeps_commit, receiver, text,
    wait_for,
};
use driftline_machine::testing::kvm_or_skip;
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::{Pid, Signal, kill_process};

const GUEST: &[&str] =
    &["--backend", "threads", "--mem", "64M", "--guest", "payload,ws=32M,rate=1M,fill=random"];

/// The way in which the receiver is stopped.
#[derive(Clone, Copy, Debug)]
enum How {
    Command,
    Sigterm,
}

impl How {
    fn tell(self, vmm: &Vmm<'_>) {
        match self {
            Self::Command => _ = vmm.tell(&["stop"]),
            Self::Sigterm => {
                kill_process(Pid::from_raw(vmm.pid() as i32).unwrap(), Signal::TERM).unwrap();
            }
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
fn goes_on(source: &Vmm<'_>, sent: &Output, why: &str) {
    let said = text(&sent.stderr);
    assert_eq!(sent.status.code(), Some(4), "{said}");
    assert!(said.contains(why) && said.contains("the guest continues here"), "{said}");
    assert_eq!(source.state(), "running");
    let before = source.reports();
    source.await_progress(1, &before);
}

#[test]
fn stop_ends_a_process_that_receives_a_guest() {
    for how in [How::Command, How::Sigterm] {
        let place = Place::new();
        let source = Vmm::run(&place, "source", GUEST);
        source.await_progress(1, &[]);
        let (mut receiving, to) = receiver(&place, "receiving", &[]);
        // At this rate the first pass takes half a minute.
        let sending = send(&source, &[&to, "--max-bandwidth", "1M"]);
        wait_for("a part of the guest", || {
            let info = receiving.info()?;
            let migration = &info["migration"];
            let came = migration["sent_bytes"].as_u64()? > 0;
            (came && migration["phase"] == "precopy").then_some(())
        });
        how.tell(&receiving);
        assert_eq!(receiving.wait(), Some(1), "{how:?}: {}", receiving.said());
        let said = receiving.said();
        assert!(said.contains("the receiver was stopped before its guest had arrived"), "{said}");
        assert!(said.contains("in precopy"), "{said}");
        goes_on(&source, &sending.wait_with_output().unwrap(), "the receiver was stopped");
    }
}

#[test]
fn stop_before_commit_keeps_guest_at_source() {
    for how in [How::Command, How::Sigterm] {
        let place = Place::new();
        let source = Vmm::run(&place, "source", GUEST);
        source.await_progress(1, &[]);
        let (mut receiving, to) = receiver(&place, "receiving", &[]);
        // The source sends COMMIT, and the destination, which waits for it, does not receive it.
        let to = proxy_that_keeps_commit(&to, place.path("state"));
        let sending = send(&source, &[&to]);
        wait_for("COMMIT", || {
            let info = source.info()?;
            (info["migration"]["phase"] == "hand-over").then_some(())
        });
        wait_for("PREPARED", || {
            let info = receiving.info()?;
            (info["migration"]["phase"] == "hand-over").then_some(())
        });
        how.tell(&receiving);
        assert_eq!(receiving.wait(), Some(1), "{how:?}: {}", receiving.said());
        let said = receiving.said();
        assert!(said.contains("in the hand-over"), "{said}");
        let why = "the destination discarded the guest";
        goes_on(&source, &sending.wait_with_output().unwrap(), why);
    }
}

#[test]
fn stop_after_commit_ends_the_arrived_guest() {
    for how in [How::Command, How::Sigterm] {
        let place = Place::new();
        let mut source = Vmm::run(&place, "source", GUEST);
        let (mut receiving, to) = receiver(&place, "receiving", &[]);
        let sent = send(&source, &[&to]).wait_with_output().unwrap();
        assert!(sent.status.success(), "{}", text(&sent.stderr));
        // The receiver's main thread may not have come that far yet.
        how.tell(&receiving);
        assert_eq!(receiving.wait(), Some(0), "{how:?}: {}", receiving.said());
        assert!(receiving.said().contains("the guest was stopped"), "{}", receiving.said());
        assert_eq!(source.wait(), Some(0), "{}", source.said());
    }
}

/// Another process has the destination's disk when the destination takes over, and the source does
/// not receive that answer.
#[test]
fn stop_ends_a_process_whose_take_over_failed() {
    if !kvm_or_skip("stop_ends_a_process_whose_take_over_failed") {
        return;
    }
    for how in [How::Command, How::Sigterm] {
        let place = Place::new();
        let disk = |name: &str| {
            File::create(place.path(name)).unwrap().set_len(1 << 20).unwrap();
            format!("path={}", place.text(name))
        };
        let guest = ["--mem", "32M", "--guest", "payload,ws=16M,rate=1M,fill=random", "--disk"];
        let source = Vmm::run(&place, "source", &[&guest[..], &[&disk("own")]].concat());
        source.await_progress(1, &[]);
        let there = format!("{},id=disk0,identity=any", disk("there"));
        let (mut receiving, to) =
            receiver(&place, "receiving", &["--disk", &there, "--linger", "600s"]);
        let to = proxy_that_ends_with_commit(&to, place.path("state"));
        let mut sending = send(&source, &[&to, "--max-bandwidth", "4M"]);
        wait_for("a part of the guest", || {
            (receiving.info()?["migration"]["phase"] == "precopy").then_some(())
        });
        let thief = File::options().write(true).open(place.path("there")).unwrap();
        fcntl_lock(&thief, FlockOperation::NonBlockingLockExclusive).unwrap();
        wait_for("the take-over to fail", || {
            receiving.said().contains("staying up to").then_some(())
        });
        how.tell(&receiving);
        assert_eq!(receiving.wait(), Some(1), "{how:?}: {}", receiving.said());
        let said = receiving.said();
        assert!(said.contains("is in use by another"), "{said}");
        sending.kill().unwrap();
        sending.wait().unwrap();
    }
}
