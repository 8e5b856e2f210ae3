//! Guests that outrun the line: vCPUs that write are held back, others are not, and none is once it
//! is over.
#![allow(clippy::expect_used, reason = "a test fails by saying what it expected")]

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use driftline_images::PayloadReport;
use driftline_machine::testing::kvm_or_skip;
use tests::{
    Driftline, MigrationProxy, SOON, ScratchDir, driftline, json_of, one_at_a_time, wait_for,
};

/// More than goes over the line in a second, written as fast as it can be.
const FAST: &str = "payload,ws=64M,rate=max";
const RATE: u64 = 40_000_000;
const DELAY: Duration = Duration::from_millis(1);
/// The reports of a vCPU that is held come late.
const LATER: Duration = Duration::from_secs(120);

/// A guest of `vcpus` vCPUs that has written all of its working set at least once.
fn start(scratch: &ScratchDir, guest: &str, vcpus: u32, tracking: &str) -> Driftline {
    let count = vcpus.to_string();
    let machine = ["--mem", "256M", "--vcpus", &count, "--tracking", tracking];
    let vm = Driftline::run(scratch, "source", guest, &machine);
    wait_for("a round of every vCPU", LATER, || {
        let reports = vm.console().last_reports(vcpus)?;
        reports.iter().all(|r| r.passes > 0).then_some(())
    });
    vm
}

/// `send-migration` beside the test.
fn begin(source: &Driftline, line: &MigrationProxy) -> Child {
    Command::new(driftline())
        .args(["send-migration", line.address(), "--json", "--api-sock", source.socket()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("driftline starts")
}

/// How long each vCPU has been held so far, ms.
fn held_ms(vm: &Driftline) -> Option<Vec<u64>> {
    vm.info()?["vcpu"].as_array()?.iter().map(|v| v["held_ms"].as_u64()).collect()
}

/// What `figure` of a vCPU became between two of its reports, per ms.
fn per_ms(from: &PayloadReport, to: &PayloadReport, figure: impl Fn(&PayloadReport) -> u64) -> f64 {
    (figure(to) - figure(from)) as f64 / (to.t_ms - from.t_ms) as f64
}

/// The last report of each vCPU now, and after two more of each.
fn two_reports(vm: &Driftline, vcpus: u32) -> (Vec<PayloadReport>, Vec<PayloadReport>) {
    let from = vm.console().last_reports(vcpus).expect("all have reported");
    (from, vm.console().wait_reports(vcpus, 2, LATER))
}

#[test]
fn only_a_throttled_guest_converges_on_slow_link() {
    if !kvm_or_skip("only_a_throttled_guest_converges_on_slow_link") {
        return;
    }
    let _alone = one_at_a_time();
    let scratch = ScratchDir::new();
    let mut source = start(&scratch, FAST, 1, "dirty-ring");
    let (refused, address) = Driftline::receive(&scratch, "refused");
    let line = MigrationProxy::slow(&address, DELAY, RATE);
    let limit = ["--timeout-s", "6"];
    let sent = source.cli(
        "send-migration",
        &[&[line.address(), "--json", "--no-throttle"], &limit[..]].concat(),
    );
    let said = String::from_utf8_lossy(&sent.stderr);
    assert_eq!(sent.status.code(), Some(4), "{said}");
    assert!(said.contains("its vCPUs were not throttled, as asked"), "{said}");
    assert_eq!(held_ms(&source), Some(vec![0]));
    source.console().wait_reports(1, 1, SOON);
    refused.wait_for_another();

    let (destination, address) = Driftline::receive(&scratch, "destination");
    let line = MigrationProxy::slow(&address, DELAY, RATE);
    let sent = source.cli("send-migration", &[line.address(), "--json"]);
    let said = String::from_utf8_lossy(&sent.stderr);
    assert_eq!(sent.status.code(), Some(0), "{said}\n{}", destination.log());
    let report = json_of(&sent);
    let reason = report["converged"].as_str().expect("a reason");
    // All of a short pass may fall into holds.
    let fits = ["within the downtime target", "wrote nothing"];
    assert!(fits.iter().any(|fits| reason.contains(fits)), "{report}");
    let vcpu = &report["throttle"][0];
    let figure = |name: &str| vcpu[name].as_f64().expect("a figure");
    assert!(figure("held_ms") > 100.0 && figure("held_percent") > 1.0, "{report}");
    assert!(figure("most_bytes_per_s") < RATE as f64, "{report}");
    // Two passes of all that it writes, before it is held; then fewer and fewer.
    let frames: Vec<u64> = report["passes"]
        .as_array()
        .expect("passes")
        .iter()
        .filter_map(|p| p["frames"].as_u64())
        .collect();
    let (whole, last) = (64 << 20 >> 12, frames[frames.len() - 1]);
    assert!(frames.iter().filter(|f| **f > whole * 9 / 10).count() >= 2, "{report}");
    assert!(last < whole / 4, "{report}");
    assert_eq!(source.wait_exit(SOON), 0);
    // A throttle does not travel.
    destination.console().wait_reports(1, 2, SOON);
    destination.console().assert_clean();
    assert_eq!(held_ms(&destination), Some(vec![0]));
}

#[test]
fn only_writing_vcpu_is_throttled_until_cancel() {
    if !kvm_or_skip("only_writing_vcpu_is_throttled_until_cancel") {
        return;
    }
    let _alone = one_at_a_time();
    let scratch = ScratchDir::new();
    // The second one reads what it has written once.
    let source = start(&scratch, "payload,ws=64M,rate=max,writers=1", 2, "dirty-ring");
    let (destination, address) = Driftline::receive(&scratch, "destination");
    // Passes long enough for all that follows.
    let line = MigrationProxy::slow(&address, DELAY, RATE / 6);
    let mut sending = begin(&source, &line);
    let (from, to) = two_reports(&source, 2);
    let before = per_ms(&from[1], &to[1], |r| r.passes * 1000);
    wait_for("a hold", LATER, || (held_ms(&source)?[0] > 1000).then_some(()));
    let (from, to) = two_reports(&source, 2);
    let during = per_ms(&from[1], &to[1], |r| r.passes * 1000);
    let writes_held = per_ms(&from[0], &to[0], |r| r.pages);
    let held = held_ms(&source).expect("it answers");
    assert!(held[1] * 20 <= held[0], "the reader is not held: {held:?} ms");
    assert!(during * 3.0 >= before, "the reader's rounds: {before} a second, then {during}");
    assert_eq!(source.state().as_deref(), Some("migrating"), "all this was in precopy");

    assert!(source.cli("cancel-migration", &[]).status.success());
    wait_for("end of send-migration", SOON, || sending.try_wait().expect("our child"));
    destination.wait_for_another();
    let held = held_ms(&source);
    let (from, to) = two_reports(&source, 2);
    assert_eq!(held_ms(&source), held, "nobody is held any more");
    let writes_free = per_ms(&from[0], &to[0], |r| r.pages);
    assert!(writes_free > 4.0 * writes_held, "{writes_held} pages a ms held, {writes_free} free");
    source.console().assert_clean();
}

#[test]
fn guest_without_rings_is_not_throttled() {
    if !kvm_or_skip("guest_without_rings_is_not_throttled") {
        return;
    }
    let _alone = one_at_a_time();
    let scratch = ScratchDir::new();
    let source = start(&scratch, FAST, 1, "dirty-bitmap");
    let (destination, address) = Driftline::receive(&scratch, "destination");
    let line = MigrationProxy::slow(&address, DELAY, RATE);
    let sent = source.cli("send-migration", &[line.address(), "--json", "--timeout-s", "5"]);
    let said = String::from_utf8_lossy(&sent.stderr);
    assert_eq!(sent.status.code(), Some(4), "{said}");
    assert!(
        said.contains("none of its vCPUs was throttled: which of them write is not known"),
        "{said}"
    );
    assert_eq!(held_ms(&source), Some(vec![0]));
    destination.wait_for_another();
    source.console().wait_reports(1, 1, SOON);
    source.console().assert_clean();
}
