//! A VMM that does not answer, and one that is told to end: no client waits for ever.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::{Place, Vmm, receiver};
use rustix::process::{Pid, Signal, kill_process};

const GUEST: &[&str] = &["--backend", "threads", "--mem", "32M", "--guest", "payload,ws=1M"];
/// More than any command takes here, its limit of a second included.
const LIMIT: Duration = Duration::from_secs(30);

fn signal(vmm: &Vmm<'_>, signal: Signal) {
    kill_process(Pid::from_raw(vmm.pid() as i32).unwrap(), signal).unwrap();
}

#[test]
fn every_command_ends_where_nobody_answers() {
    let place = Place::new();
    let vmm = Vmm::run(&place, "stopped", GUEST);
    signal(&vmm, Signal::STOP);
    let store = place.text("store");
    for command in [
        &["info"][..],
        &["balloon"],
        &["pause"],
        &["resume"],
        &["stop"],
        &["stop", "--wait"],
        &["checkpoint", "--store", &store],
        &["send-migration", "tcp:127.0.0.1:1"],
        &["cancel-migration"],
        &["plan"],
        &["top", "--once"],
        &["resolve", "--run"],
    ] {
        let began = Instant::now();
        let said = vmm.refuse(1, &[command, &["--timeout", "1s"]].concat());
        assert!(began.elapsed() < LIMIT, "{command:?} took {:?}", began.elapsed());
        assert!(said.contains("has not answered") && said.contains("in 1s"), "{command:?}: {said}");
        assert!(said.contains("--timeout"), "{command:?}: {said}");
    }
    signal(&vmm, Signal::CONT);
}

#[test]
fn stop_waits_for_the_process_if_asked() {
    let place = Place::new();
    let mut vmm = Vmm::run(&place, "guest", GUEST);
    vmm.tell(&["stop", "--wait"]);
    assert!(!vmm.is_alive());
}

#[test]
fn stop_ends_a_process_that_waits_for_a_guest() {
    let place = Place::new();
    let (mut waiting, _) = receiver(&place, "waiting", &[]);
    waiting.await_api();
    waiting.tell(&["stop", "--wait"]);
    assert!(!waiting.is_alive());
}

/// What a request is answered.
fn ask(vmm: &Vmm<'_>, request: &str) -> String {
    let mut stream = UnixStream::connect(vmm.socket()).unwrap();
    let request = format!("{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn unknown_parameters_of_requests_are_refused() {
    let place = Place::new();
    let vmm = Vmm::run(&place, "guest", GUEST);
    for (request, unknown) in [
        ("DELETE /migration?jbo=3", "jbo"),
        ("GET /migration?jbo=3", "jbo"),
        ("DELETE /checkpoint?jbo=3", "jbo"),
        ("GET /checkpoint?wait=3", "wait"),
        ("GET /dirty/watch?watch=1&wait=3", "wait"),
        ("GET /info?verbose=1", "verbose"),
        ("POST /stop?force=1", "force"),
    ] {
        let answer = ask(&vmm, request);
        assert!(
            answer.starts_with("HTTP/1.1 400") && answer.contains(unknown),
            "{request}: {answer}"
        );
    }
    assert_eq!(vmm.state(), "running");
    assert!(ask(&vmm, "GET /info").starts_with("HTTP/1.1 200"));
}

#[test]
fn pause_and_resume_are_idempotent() {
    let place = Place::new();
    let vmm = Vmm::run(&place, "guest", GUEST);
    for (command, state) in [("pause", "paused"), ("resume", "running")] {
        (0..2).for_each(|_| drop(vmm.tell(&[command])));
        assert_eq!(vmm.state(), state);
    }
}
