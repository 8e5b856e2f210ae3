//! An upgrade while one of its two processes is killed, or the next one hangs, during a checkpoint
//! run: the guest is in one process or in none, never in two, and the run continues with it.

use std::fs::File;
use std::process::{Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::latest_process::{LatestProcess, is_running, taken_by_first_run};
use crate::common::proxied_upgrade::ProxiedUpgrade;
use crate::common::upgrade_proxy::{StepAction, Then, UpgradeStep};
use crate::common::{TestDir, Vmm, driftline, output, side_by_side, text, wait_for};
use driftline_machine::testing::{full, kvm_or_skip, only_child};
use rustix::process::{Pid, Signal, kill_process};

const THREADS: &[&str] = &["--backend", "threads", "--mem", "64M", "--vcpus", "2"];
const KVM: &[&str] = &["--backend", "kvm", "--mem", "64M", "--vcpus", "2"];
const GUEST: &[&str] =
    &["--memory-backing", "memfd", "--guest", "payload,ws=2M,rate=8M,burst=8,report=200"];
/// Default limit on a request. Those that wait during an upgrade must not reach it.
const CLIENT_LIMIT: Duration = Duration::from_secs(30);
/// Cases at the same time.
const AT_ONCE: usize = 4;

/// The process that is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    Previous,
    Next,
}

/// A guest with a checkpoint run, whose process is about to be replaced.
struct Upgraded<'p> {
    tmp: &'p TestDir,
    vmm: Vmm<'p>,
    vm_id: String,
}

impl<'p> Upgraded<'p> {
    fn start(tmp: &'p TestDir, machine: &[&str]) -> Self {
        let disk = format!("path={}", tmp.text("disk"));
        let disk: &[&str] = if machine == KVM { &["--disk", &disk] } else { &[] };
        File::create(tmp.path("disk")).unwrap().set_len(1 << 20).unwrap();
        let vmm = Vmm::run(tmp, "first", &[machine, GUEST, disk].concat());
        let vm_id = vmm.info().unwrap()["vm_id"].as_str().unwrap().to_owned();
        let store = tmp.text("store");
        vmm.tell(&["checkpoint", "--store", &store, "--every", "10ms", "--detach"]);
        let upgraded = Self { tmp, vmm, vm_id };
        upgraded.await_taken(0);
        upgraded
    }

    fn await_taken(&self, more_than: u64) -> u64 {
        wait_for("a checkpoint", || Some(taken_by_first_run(&self.vmm)).filter(|n| *n > more_than))
    }

    /// Waits until `process` has the guest, or has ended. Returns whether it has the guest.
    fn has_guest(&self, process: u32) -> bool {
        wait_for("the guest's process, or its end", || match is_running(process) {
            false => Some(false),
            true => (self.vmm.info()?["pid"] == process).then_some(true),
        })
    }

    /// Checks that the guest and its checkpoint run continue.
    fn assert_continues(&self) {
        assert_eq!(self.vmm.state(), "running");
        let taken = self.await_taken(0);
        self.await_taken(taken + 1);
        self.vmm.await_progress(2, &self.vmm.reports());
    }

    /// Ends `process`, and checks that the store's latest checkpoint restores.
    fn assert_restores(self, process: u32, has_guest: bool) {
        if has_guest {
            self.vmm.tell(&["checkpoint", "--stop"]);
        }
        drop(LatestProcess::of(&self.vmm));
        wait_for("the process's end", || (!is_running(process)).then_some(()));
        // A process that was killed in the hand-over leaves a record, and a restore asks the
        // operator.
        let (state, store) = (self.tmp.text("state"), self.tmp.text("store"));
        output(&["resolve", "--discard", "--vm", &self.vm_id, "--state-dir", &state]);
        let restore = ["restore", "--same-id", "--store", &store];
        let mut restored = Vmm::start(self.tmp, "second", &restore);
        restored.await_api();
        restored.await_checked_pages(2, &[]);
    }
}

fn signal(process: u32, signal: Signal) {
    // It may have ended already.
    let _ = kill_process(Pid::from_raw(process as i32).unwrap(), signal);
}

/// Replaces the process of `guest` through a proxy with the action that `plan` returns for the next
/// process.
fn upgrade(guest: &Upgraded<'_>, plan: impl FnOnce(u32) -> Option<StepAction>) -> ProxiedUpgrade {
    ProxiedUpgrade::make(guest.tmp, &guest.vmm, 0, plan)
}

/// Returns the messages of an upgrade: the first and the last one of each name.
fn steps(machine: &[&str]) -> Vec<UpgradeStep> {
    let tmp = TestDir::new();
    let guest = Upgraded::start(&tmp, machine);
    let ProxiedUpgrade { next, proxy, answer } = upgrade(&guest, |_| None);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(guest.has_guest(next.0.id()));
    let all = proxy.steps();
    let named = |name: &str| all.iter().any(|step| step.name == name);
    for name in ["descriptors", "answer", "MEMORY", "STATE", "COMMIT", "RUNNING", "serving"] {
        assert!(named(name), "{name} is not in {all:?}");
    }
    assert_eq!(named("FILES"), machine == KVM, "{all:?}");
    let is_last = |step: &UpgradeStep| {
        let next = UpgradeStep { nth: step.nth + 1, ..*step };
        !all.contains(&next)
    };
    all.iter().copied().filter(|step| step.nth == 0 || is_last(step)).collect()
}

/// Returns the steps up to COMMIT: if the next process does not get that, the guest stays.
fn until_commit(steps: &[UpgradeStep]) -> &[UpgradeStep] {
    let commit = steps.iter().position(|step| step.name == "COMMIT").unwrap();
    &steps[..=commit]
}

/// Kills `victim` before `step` is passed on. The other process has the guest if `stays`.
fn killed_at(machine: &[&str], victim: Victim, step: UpgradeStep, stays: bool) {
    let tmp = TestDir::new();
    let guest = Upgraded::start(&tmp, machine);
    let previous = guest.vmm.pid();
    let ProxiedUpgrade { next, proxy, answer } = upgrade(&guest, |next| {
        let killed = if victim == Victim::Next { next } else { previous };
        let act = Box::new(move || signal(killed, Signal::KILL));
        Some(StepAction { at: step, act, then: Then::End })
    });
    let other = if victim == Victim::Next { previous } else { next.0.id() };
    let has_guest = guest.has_guest(other);
    println!("{victim:?} at {step:?}: {has_guest} {answer}");
    assert!(proxy.has_acted(), "{step:?} did not come");
    assert_eq!(has_guest, stays, "{victim:?} at {step:?}: {answer}");
    if has_guest {
        guest.assert_continues();
    }
    guest.assert_restores(other, has_guest);
}

/// Stops the next process before it gets `step`. The guest and its run must stay, and the next
/// process must end when it runs again.
fn hangs_at(machine: &[&str], step: UpgradeStep) {
    let tmp = TestDir::new();
    let guest = Upgraded::start(&tmp, machine);
    let previous = guest.vmm.pid();
    let began = Instant::now();
    let ProxiedUpgrade { mut next, proxy, answer } = upgrade(&guest, |next| {
        let act = Box::new(move || signal(next, Signal::STOP));
        Some(StepAction { at: step, act, then: Then::Pass })
    });
    let took = began.elapsed();
    println!("hangs at {step:?}: {answer} after {took:?}");
    assert!(took < CLIENT_LIMIT, "{step:?}: other requests have waited for {took:?}");
    assert!(proxy.has_acted(), "{step:?} did not come");
    assert!(answer.starts_with("HTTP/1.1 400"), "{step:?}: {answer}");
    assert!(guest.has_guest(previous), "{step:?}");
    guest.assert_continues();
    signal(next.0.id(), Signal::CONT);
    let ended = wait_for("the next process's end", || next.0.try_wait().unwrap());
    assert_eq!(ended.code(), Some(1), "{step:?}");
    guest.assert_continues();
    guest.assert_restores(previous, true);
}

/// Kills each of the processes at each step in the long form, otherwise one of them at some.
fn kills_at_steps(machine: &[&str], every: usize) {
    let steps = steps(machine);
    let before = until_commit(&steps).len();
    let all = steps.iter().enumerate().flat_map(|(number, step)| {
        let is_before = number < before;
        [(Victim::Previous, *step, !is_before), (Victim::Next, *step, is_before)]
    });
    let cases: Vec<_> = all.step_by(if full() { 1 } else { every }).collect();
    for some in cases.chunks(AT_ONCE) {
        side_by_side(some.iter().copied(), |(victim, step, stays)| {
            killed_at(machine, victim, step, stays);
        });
    }
}

#[test]
fn kill_at_any_step_leaves_one_threads_guest() {
    // An odd number, so that both are killed.
    kills_at_steps(THREADS, 5);
}

#[test]
fn kill_at_any_step_leaves_one_kvm_guest() {
    if kvm_or_skip("kill_at_any_step_leaves_one_kvm_guest") {
        kills_at_steps(KVM, 15);
    }
}

#[test]
fn guest_stays_if_the_next_process_hangs() {
    let steps = steps(THREADS);
    let last = |name: &str| *steps.iter().rfind(|step| step.to_next && step.name == name).unwrap();
    let cases = match full() {
        true => until_commit(&steps).to_vec(),
        // In the pause, whose limit is the shortest.
        false => vec![last("STATE_END")],
    };
    for some in cases.chunks(AT_ONCE) {
        side_by_side(some.iter().copied(), |step| hangs_at(THREADS, step));
    }
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
    signal(killed, Signal::KILL);
    (upgrade.wait_with_output().unwrap(), other)
}

fn killed_after(machine: &[&str], victim: Victim, after: Duration) {
    let tmp = TestDir::new();
    let guest = Upgraded::start(&tmp, machine);
    let (said, other) = upgrade_and_kill(&guest.vmm, victim, after);
    let stderr = text(&said.stderr);
    let has_guest = guest.has_guest(other);
    println!("{victim:?} after {after:?}: {} {has_guest} {stderr}", said.status);
    match victim {
        Victim::Previous if said.status.success() => assert!(has_guest, "the guest had moved"),
        // The code of a guest that runs where it was.
        Victim::Next if said.status.code() == Some(4) => assert!(has_guest, "{stderr}"),
        _ => {}
    }
    if has_guest {
        guest.assert_continues();
    }
    guest.assert_restores(other, has_guest);
}

/// Kills each of the processes at even intervals of the time that an upgrade takes: also between
/// two messages, and while the checkpoint run and the clients' connections move.
fn kills_at_moments(machine: &[&str]) {
    let times = if full() { 40 } else { 1 };
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
    for some in cases.chunks(AT_ONCE) {
        side_by_side(some.iter().copied(), |(victim, after)| killed_after(machine, victim, after));
    }
}

#[test]
fn kill_at_any_moment_leaves_one_guest() {
    kills_at_moments(THREADS);
    if full() && kvm_or_skip("kill_at_any_moment_leaves_one_guest") {
        kills_at_moments(KVM);
    }
}
