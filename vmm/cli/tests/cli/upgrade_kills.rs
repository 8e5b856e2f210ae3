//! `driftline upgrade` while one of its two processes is killed, during a checkpoint run: the guest
//! is in one process or in none, never in two, and the run continues with it.

use std::fs;
use std::process::{Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::latest_process::{LatestProcess, is_running, taken_by_first_run};
use crate::common::{TestDir, Vmm, driftline, output, side_by_side, text, wait_for};
use driftline_machine::testing::{full, kvm_or_skip};
use rustix::process::{Pid, Signal, kill_process};

const THREADS: &[&str] = &["--backend", "threads", "--mem", "64M", "--vcpus", "2"];
const KVM: &[&str] = &["--backend", "kvm", "--mem", "64M", "--vcpus", "2"];
const GUEST: &[&str] =
    &["--memory-backing", "memfd", "--guest", "payload,ws=2M,rate=8M,report=200"];

/// The process that is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    Previous,
    Next,
}

fn only_child(pid: u32) -> Option<u32> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?.trim().parse().ok()
}

/// Replaces the process of `vmm` and kills `victim` at `after` from the start of the next process.
/// Returns the command's output, and the id of the other process.
fn upgrade_and_kill(vmm: &Vmm<'_>, victim: Victim, after: Duration) -> (Output, u32) {
    let mut upgrade = driftline(&["upgrade", "--api-sock", &vmm.socket()]);
    let upgrade = upgrade.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let next = wait_for("the next process", || only_child(upgrade.id()));
    sleep(after);
    let (killed, other) = match victim {
        Victim::Previous => (vmm.pid(), next),
        Victim::Next => (next, vmm.pid()),
    };
    // It may have ended already.
    let _ = kill_process(Pid::from_raw(killed as i32).unwrap(), Signal::KILL);
    (upgrade.wait_with_output().unwrap(), other)
}

fn guest_of_a_killed_process(machine: &[&str], victim: Victim, after: Duration) {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let vmm = Vmm::run(&tmp, "first", &[machine, GUEST].concat());
    let latest = LatestProcess::of(&vmm);
    let id = vmm.info().unwrap()["vm_id"].as_str().unwrap().to_owned();
    vmm.tell(&["checkpoint", "--store", &store, "--every", "10ms", "--detach"]);
    let await_taken = |more_than: u64| {
        wait_for("a checkpoint", || Some(taken_by_first_run(&vmm)).filter(|n| *n > more_than))
    };
    await_taken(0);
    let (said, other) = upgrade_and_kill(&vmm, victim, after);
    let stderr = text(&said.stderr);
    let is_left = wait_for("the guest's process, or its end", || match is_running(other) {
        false => Some(false),
        true => (vmm.info()?["pid"] == other).then_some(true),
    });
    println!("{victim:?} after {after:?}: {} {is_left} {stderr}", said.status);
    match victim {
        Victim::Previous if said.status.success() => assert!(is_left, "the guest had moved"),
        // The code of a guest that runs where it was.
        Victim::Next if said.status.code() == Some(4) => assert!(is_left, "{stderr}"),
        _ => {}
    }
    if is_left {
        assert_eq!(vmm.state(), "running");
        let taken = await_taken(0);
        await_taken(taken + 1);
        vmm.await_progress(2, &vmm.reports());
        vmm.tell(&["checkpoint", "--stop"]);
    }
    drop(latest);
    wait_for("the process's end", || (!is_running(other)).then_some(()));
    // A process that was killed in the hand-over leaves a record, and a restore asks the operator.
    let state = tmp.text("state");
    output(&["resolve", "--discard", "--vm", &id, "--state-dir", &state]);
    let mut restored = Vmm::start(&tmp, "second", &["restore", "--same-id", "--store", &store]);
    restored.await_api();
    restored.await_checked_pages(2, &[]);
}

/// Kills each of the processes `times` times, at even intervals of the time that an upgrade takes.
fn kills(machine: &[&str], times: u32) {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "alone", &[machine, GUEST].concat());
    let latest = LatestProcess::of(&vmm);
    let began = Instant::now();
    latest.upgrade();
    let took = began.elapsed();
    drop(latest);
    let moments = (0..times).map(|i| took * (2 * i + 1) / (2 * times));
    let cases = moments.flat_map(|after| [(Victim::Previous, after), (Victim::Next, after)]);
    let cases: Vec<_> = cases.collect();
    for some in cases.chunks(4) {
        side_by_side(some.iter().copied(), |(victim, after)| {
            guest_of_a_killed_process(machine, victim, after);
        });
    }
}

#[test]
fn killed_process_of_threads_leaves_one_guest() {
    kills(THREADS, if full() { 40 } else { 3 });
}

#[test]
fn killed_kvm_process_leaves_one_guest() {
    if kvm_or_skip("killed_kvm_process_leaves_one_guest") {
        kills(KVM, if full() { 40 } else { 1 });
    }
}
