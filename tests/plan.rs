//! What `driftline plan` says of a migration, beside what the migration then does.
#![allow(clippy::expect_used, reason = "a test fails by saying what it expected")]

use std::time::Duration;

use driftline_machine::testing::kvm_or_skip;
use serde_json::Value;
use tests::{
    Driftline, MigrationProxy, SOON, ScratchDir, json_of, one_at_a_time, repeats, wait_for,
};

/// A held guest reports late.
const LATER: Duration = Duration::from_secs(120);
/// Two pauses this short are the same: what a guest's stop takes on a busy host, ms.
const SHORT_MS: f64 = 10.0;

/// A guest that always does the same, and a line to move it over.
struct PlanCase {
    guest: &'static str,
    vcpus: &'static str,
    line_mib_per_s: u64,
}

/// Fewer frames from pass to pass; all of a small set each time; more than the line carries, so
/// that it is held.
const GUESTS: [PlanCase; 3] = [
    PlanCase { guest: "payload,ws=32M,rate=20M", vcpus: "1", line_mib_per_s: 60 },
    PlanCase { guest: "payload,ws=8M,rate=max", vcpus: "1", line_mib_per_s: 40 },
    PlanCase { guest: "payload,ws=64M,rate=max", vcpus: "1", line_mib_per_s: 40 },
];

/// The plan, and the report of the migration after it.
fn planned_and_made(steady: &PlanCase) -> (Value, Value) {
    let scratch = ScratchDir::new();
    let machine = ["--mem", "256M", "--vcpus", steady.vcpus];
    let mut source = Driftline::run(&scratch, "source", steady.guest, &machine);
    wait_for("a round of the guest", LATER, || {
        let reports = source.console().last_reports(1)?;
        reports.iter().all(|r| r.passes > 0).then_some(())
    });
    let bandwidth = format!("{}M", steady.line_mib_per_s);
    let plan = source.cli("plan", &["--bandwidth", &bandwidth, "--json"]);
    let said = String::from_utf8_lossy(&plan.stderr).into_owned();
    assert_eq!(plan.status.code(), Some(0), "{said}");
    let plan = json_of(&plan);

    let (destination, address) = Driftline::receive(&scratch, "destination");
    let line = MigrationProxy::steady(&address, steady.line_mib_per_s << 20);
    let sent = source.cli("send-migration", &[line.address(), "--json"]);
    let said = String::from_utf8_lossy(&sent.stderr);
    assert_eq!(sent.status.code(), Some(0), "{said}\n{}", destination.log());
    assert_eq!(source.wait_exit(SOON), 0);
    destination.console().wait_reports(1, 1, LATER);
    destination.console().assert_clean();
    (plan, json_of(&sent))
}

fn figure(of: &Value, name: &str) -> f64 {
    of[name].as_f64().expect(name)
}

#[test]
fn plan_predicts_the_first_pass_and_total_time() {
    if !kvm_or_skip("plan_predicts_the_first_pass_and_total_time") {
        return;
    }
    let _alone = one_at_a_time();
    let (plan, made) = planned_and_made(&GUESTS[0]);
    // A slow host makes a guest write less and a migration take longer, never the other way round.
    assert_eq!(plan["verdict"], "converges", "{plan}");
    let foreseen = &plan["migration"];
    let (first, then) = (&foreseen["passes"][0], &made["passes"][0]);
    let (frames, sent) = (figure(first, "frames"), figure(then, "frames"));
    assert!(frames <= sent * 1.2 && sent <= frames * 1.2, "{first} {then}");
    let total = figure(foreseen, "total_time_ms");
    assert!(total <= 3.0 * figure(&made, "total_time_ms"), "{plan} {made}");
    assert!(figure(foreseen, "downtime_ms") <= 302.0, "{plan}");
    let curve = plan["guest"]["curve"].as_array().expect("a curve");
    assert_eq!(curve.len(), 5, "{plan}");
    // 20 MiB a second, of which a slow host takes some.
    let written = figure(&curve[4], "frames");
    assert!(written > 64.0 && written <= 8192.0 * 1.1, "{plan}");
    assert_eq!(curve[4]["vcpu_frames"].as_array().map(Vec::len), Some(1));
}

#[test]
fn most_plans_are_within_a_factor_of_two() {
    let runs = repeats(0, 10);
    if runs == 0 || !kvm_or_skip("most_plans_are_within_a_factor_of_two") {
        return;
    }
    let _alone = one_at_a_time();
    let mut held = 0;
    for run in 0..runs {
        let steady = &GUESTS[run % GUESTS.len()];
        let (plan, made) = planned_and_made(steady);
        let foreseen = &plan["migration"];
        let near = |name: &str, least: f64| {
            let (said, was) = (figure(foreseen, name).max(least), figure(&made, name).max(least));
            said <= 2.0 * was && was <= 2.0 * said
        };
        let both = near("total_time_ms", 1.0) && near("downtime_ms", SHORT_MS);
        held += usize::from(both);
        println!(
            "{}: planned {:.0} ms, downtime {:.1}; made {:.0} ms, downtime {:.1} (setup {:.0}); passes {} and {}: {}",
            steady.guest,
            figure(foreseen, "total_time_ms"),
            figure(foreseen, "downtime_ms"),
            figure(&made, "total_time_ms"),
            figure(&made, "downtime_ms"),
            figure(&made, "setup_time_ms"),
            foreseen["passes"].as_array().map_or(0, Vec::len),
            made["passes"].as_array().map_or(0, |p| p.len().saturating_sub(1)),
            if both { "holds" } else { "does not hold" },
        );
    }
    assert!(held * 10 >= runs * 9, "{held} of {runs} plans held");
}
