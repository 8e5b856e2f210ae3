//! Pausing, resuming and ending a machine, and what a machine leaves behind.

use std::process::Stdio;
use std::time::{Duration, Instant};

use driftline_guest::testing::threads;
use driftline_guest::{DirtyLog, GuestError, HandOver, Lifecycle, NextHost, RunState, Stateful};
use driftline_machine::config::MachineConfig;
use driftline_machine::testing::run_in_child;
use driftline_machine::vm::{EndReason, Vm};

use crate::harness::*;

#[test]
fn paused_guest_does_not_run_and_resumes_unharmed() {
    if !kvm_or_skip("paused_guest_does_not_run_and_resumes_unharmed") {
        return;
    }
    let console = SerialLog::new();
    let config = MachineConfig { vcpus: 2, ..payload("payload,ws=8M,rate=max") };
    let machine = launch(config, &console);
    assert_eq!(machine.run_state(), RunState::Paused);
    assert_eq!(machine.pause().unwrap(), RunState::Paused, "pausing twice is once");
    machine.resume().unwrap();
    assert!(matches!(machine.resume(), Err(GuestError::State { .. })));
    for _ in 0..200 {
        assert_eq!(machine.pause().unwrap(), RunState::Running);
        let before = machine.info().vcpu;
        std::thread::sleep(Duration::from_micros(200));
        assert_eq!(machine.info().vcpu, before, "a paused vCPU does not exit");
        machine.resume().unwrap();
    }
    // The guest never ends by itself: even on a slow host, all pauses interrupt its work.
    let already = console.reports().len();
    console.wait_for("report after the pauses", |_| console.reports().len() > already + 2);
    machine.stop("it has shown enough");
    assert_eq!(machine.run_state(), RunState::Stopped);
    assert!(matches!(machine.pause(), Err(GuestError::State { .. })));
    assert!(machine.info().vcpu.iter().all(|v| v.exits > 0));
    drop(machine);
    console.assert_no_errors();
}

#[test]
fn stopped_guest_reports_the_reason() {
    if !kvm_or_skip("stopped_guest_reports_the_reason") {
        return;
    }
    let machine = launch(payload("payload,ws=1M"), &SerialLog::new());
    machine.resume().unwrap();
    assert_eq!(machine.wait_end(Some(Duration::from_millis(20))), None);
    machine.stop("the test is over");
    let end = Some(EndReason::Stopped("the test is over".to_owned()));
    assert_eq!(machine.wait_end(None), end);
    machine.stop("again");
    assert_eq!(machine.wait_end(None), end, "the first reason stays");
    assert!(machine.save_state().is_err());
}

#[test]
fn released_guest_runs_only_after_acquire() {
    if !kvm_or_skip("released_guest_runs_only_after_acquire") {
        return;
    }
    let machine = launch(payload("payload,ws=1M"), &SerialLog::new());
    machine.resume().unwrap();
    assert!(machine.release(NextHost::Another).is_err(), "it runs");
    assert!(machine.detach(NextHost::Another).is_err(), "it runs");
    machine.pause().unwrap();
    machine.release(NextHost::Another).unwrap();
    let e = machine.resume().unwrap_err().to_string();
    assert!(e.contains("released"), "{e}");
    assert!(machine.detach(NextHost::Another).unwrap().is_empty());
    machine.acquire().unwrap();
    machine.resume().unwrap();
    machine.pause().unwrap();
    // The operator ends it between the release and the hand-over: then no host owns it.
    machine.release(NextHost::Another).unwrap();
    machine.stop("the operator has ended it");
    let e = machine.detach(NextHost::Another).unwrap_err().to_string();
    assert!(e.contains("detach"), "{e}");
    machine.acquire().unwrap_err();
}

#[test]
fn fifty_machines_leave_nothing_behind() {
    const CHILD: &str = "FIFTY_MACHINES";
    if !kvm_or_skip("fifty_machines_leave_nothing_behind") {
        return;
    }
    let threads = || {
        let kinds = ["vcpu", "supervisor", "collector", "serial"];
        threads(|name| kinds.iter().any(|kind| name.starts_with(kind))).len()
    };
    // A thread that has been joined may be listed for another moment.
    let held = || {
        let end = Instant::now() + LONG;
        while threads() > 0 {
            assert!(Instant::now() < end, "{} threads of machines are left", threads());
            std::thread::sleep(Duration::from_millis(1));
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let kvm_maps = maps.lines().filter(|l| l.contains("kvm-vcpu")).count();
        (std::fs::read_dir("/proc/self/fd").unwrap().count(), kvm_maps)
    };
    // Runs in its own process, so that machines of other tests are not counted.
    if std::env::var_os(CHILD).is_none() {
        let name = "lifecycle::fifty_machines_leave_nothing_behind";
        return run_in_child(name, CHILD, "1", Stdio::null());
    }
    let modes = crate::tracking::modes();
    let one = |i: u32| {
        let tracking = modes[i as usize % modes.len()];
        let config = MachineConfig { vcpus: 2, tracking, ..payload("payload,ws=1M") };
        let machine = boot(config, &silent()).unwrap();
        if !i.is_multiple_of(3) {
            let _subscription = machine.subscribe("test").unwrap();
            machine.resume().unwrap();
        }
        if i % 3 > 1 {
            machine.pause().unwrap();
        }
    };
    one(0);
    let before = held();
    (1..=50).for_each(one);
    assert_eq!(held(), before, "file descriptors, mapped vCPUs");
}
