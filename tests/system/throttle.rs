//! Guests that write faster than the link carries: vCPUs that write are throttled, others are not,
//! and no vCPU is throttled after the migration.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use driftline_machine::testing::kvm_or_skip;
use serde_json::Value;
use tests::{Driftline, MigrationProxy, SOON, ScratchDir, driftline, json_of, wait_for};

/// A guest that writes more in a second than the link carries, and leaves the host some time.
const FAST: &str = "payload,ws=16M,rate=256M";
/// A link over which a pass takes more than a second, so that also a guest that gets little of the
/// processors writes all of its working set meanwhile.
const RATE: u64 = 12_000_000;
const DELAY: Duration = Duration::from_millis(1);
/// A rate at which no pass ends within a test, and the connection still carries something.
const ALMOST_NOTHING: u64 = 64 << 10;
/// Time limit for reports of a throttled vCPU.
const REPORT_LIMIT: Duration = Duration::from_secs(120);

/// Starts a guest and waits until each vCPU has written its part of the working set once.
fn start(scratch: &ScratchDir, guest: &str, vcpus: u32, tracking: &str) -> Driftline {
    let count = vcpus.to_string();
    let machine = ["--mem", "256M", "--vcpus", &count, "--tracking", tracking];
    let vm = Driftline::run(scratch, "source", guest, &machine);
    vm.console().wait_first_pass(vcpus, REPORT_LIMIT);
    vm
}

/// Starts `send-migration` without waiting for its end.
fn send_in_background(source: &Driftline, link: &MigrationProxy) -> Child {
    Command::new(driftline())
        .args(["send-migration", link.address(), "--json", "--api-sock", source.socket()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("driftline starts")
}

/// Returns for how long each vCPU has been throttled so far, ms.
fn throttled_ms(vm: &Driftline) -> Option<Vec<u64>> {
    vm.info()?["vcpu"].as_array()?.iter().map(|v| v["throttled_ms"].as_u64()).collect()
}

#[test]
fn only_a_throttled_guest_converges_on_slow_link() {
    if !kvm_or_skip("only_a_throttled_guest_converges_on_slow_link") {
        return;
    }
    let scratch = ScratchDir::new();
    let mut source = start(&scratch, FAST, 1, "dirty-ring");
    let (refused, address) = Driftline::receive(&scratch, "refused");
    let link = MigrationProxy::slow(&address, DELAY, RATE);
    let limit = ["--timeout-s", "8"];
    let sent = source.cli(
        "send-migration",
        &[&[link.address(), "--json", "--no-throttle"], &limit[..]].concat(),
    );
    let stderr = String::from_utf8_lossy(&sent.stderr);
    assert_eq!(sent.status.code(), Some(4), "{stderr}");
    assert!(stderr.contains("its vCPUs were not throttled (--no-throttle)"), "{stderr}");
    assert_eq!(throttled_ms(&source), Some(vec![0]));
    source.console().wait_reports(1, 1, SOON);
    refused.wait_for_another();

    let (destination, address) = Driftline::receive(&scratch, "destination");
    let link = MigrationProxy::slow(&address, DELAY, RATE);
    let sent = source.cli("send-migration", &[link.address(), "--json"]);
    let stderr = String::from_utf8_lossy(&sent.stderr);
    assert_eq!(sent.status.code(), Some(0), "{stderr}\n{}", destination.log());
    let report = json_of(&sent);
    let reason = report["converged"].as_str().expect("a reason");
    // vCPUs may be stopped for all of a short pass.
    let fits = ["within the downtime target", "wrote nothing"];
    assert!(fits.iter().any(|fits| reason.contains(fits)), "{report}");
    let vcpu = &report["throttle"][0];
    let figure = |name: &str| vcpu[name].as_f64().expect("a figure");
    assert!(figure("throttled_ms") > 100.0 && figure("throttled_percent") > 1.0, "{report}");
    assert!(figure("most_bytes_per_s") < RATE as f64, "{report}");
    // Two passes send the whole working set before the throttle starts; later passes send less.
    let frames: Vec<u64> = report["passes"]
        .as_array()
        .expect("passes")
        .iter()
        .filter_map(|p| p["frames"].as_u64())
        .collect();
    let (whole, last) = (16 << 20 >> 12, frames[frames.len() - 1]);
    assert!(frames.iter().filter(|f| **f > whole * 9 / 10).count() >= 2, "{report}");
    assert!(last < whole / 2, "{report}");
    assert_eq!(source.wait_exit(SOON), 0);
    // The guest is not throttled at the destination.
    destination.console().wait_reports(1, 2, SOON);
    destination.console().assert_clean();
    assert_eq!(throttled_ms(&destination), Some(vec![0]));
}

#[test]
fn only_writing_vcpu_is_throttled_until_cancel() {
    if !kvm_or_skip("only_writing_vcpu_is_throttled_until_cancel") {
        return;
    }
    let scratch = ScratchDir::new();
    // The second vCPU writes its share once and then only reads it. On a busy host a guest that
    // reports often writes nothing for seconds while it prints, and converges unthrottled.
    let spec = "payload,ws=32M,rate=256M,writers=1,report=1000";
    let source = start(&scratch, spec, 2, "dirty-ring");
    let (destination, address) = Driftline::receive(&scratch, "destination");
    let link = MigrationProxy::slow(&address, DELAY, RATE);
    let mut send_command = send_in_background(&source, &link);
    let throttled_for = |ms: u64| (throttled_ms(&source)?[0] > ms).then_some(());
    wait_for("a throttled vCPU", REPORT_LIMIT, || throttled_for(0));
    // A throttled guest converges within seconds: this keeps the migration in pre-copy.
    link.set_rate(ALMOST_NOTHING);
    wait_for("a vCPU that was throttled for long", REPORT_LIMIT, || throttled_for(300));
    // Not by reports: a guest that writes all the time queues them, and old ones come first.
    let reader = source.console().last_reports(2).expect("both have reported")[1];
    let shown = source.cli("top", &["--once", "--json", "--interval", "500ms"]);
    let shown = json_of(&shown);
    let figure = |of: &Value| of.as_f64().expect("a figure");
    let writes_throttled =
        figure(&shown["vcpu"][0]["dirtied_frames"]) / figure(&shown["window_ms"]);
    let throttled = throttled_ms(&source).expect("it answers");
    assert!(throttled[1] * 20 <= throttled[0], "the reader is not throttled: {throttled:?} ms");
    wait_for("a round of the reader", REPORT_LIMIT, || {
        (source.console().last_reports(2)?[1].passes > reader.passes).then_some(())
    });
    assert_eq!(source.state().as_deref(), Some("migrating"), "the migration is still in pre-copy");

    assert!(source.cli("cancel-migration", &[]).status.success());
    link.set_rate(RATE);
    wait_for("end of send-migration", SOON, || send_command.try_wait().expect("our child"));
    destination.wait_for_another();
    let throttled = throttled_ms(&source);
    wait_for("a guest at its full rate", REPORT_LIMIT, || {
        let from = source.console().last_reports(2)?[0];
        let to = source.console().wait_reports(2, 2, REPORT_LIMIT)[0];
        let writes = (to.pages - from.pages) as f64 / (to.t_ms - from.t_ms) as f64;
        (writes > 4.0 * writes_throttled).then_some(())
    });
    assert_eq!(throttled_ms(&source), throttled, "no vCPU is throttled any more");
    source.console().assert_clean();
}

#[test]
fn guest_without_rings_is_not_throttled() {
    if !kvm_or_skip("guest_without_rings_is_not_throttled") {
        return;
    }
    let scratch = ScratchDir::new();
    let source = start(&scratch, FAST, 1, "dirty-bitmap");
    let (destination, address) = Driftline::receive(&scratch, "destination");
    let link = MigrationProxy::slow(&address, DELAY, RATE);
    let sent = source.cli("send-migration", &[link.address(), "--json", "--timeout-s", "8"]);
    let stderr = String::from_utf8_lossy(&sent.stderr);
    assert_eq!(sent.status.code(), Some(4), "{stderr}");
    assert!(
        stderr.contains("none of its vCPUs was throttled: which of them write is not known"),
        "{stderr}"
    );
    assert_eq!(throttled_ms(&source), Some(vec![0]));
    destination.wait_for_another();
    source.console().wait_reports(1, 1, SOON);
    source.console().assert_clean();
}
