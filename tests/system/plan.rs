//! Compares the forecast of `driftline plan` with the migration that follows.

use std::time::Duration;

use driftline_machine::testing::kvm_or_skip;
use serde_json::Value;
use tests::{Driftline, MigrationProxy, SOON, ScratchDir, json_of, one_at_a_time, repeats};

/// Time limit for reports of a throttled guest.
const REPORT_LIMIT: Duration = Duration::from_secs(120);
/// Downtimes below this count as equal, ms: pausing a guest takes this long on a busy host.
const SHORT_MS: f64 = 10.0;

/// A guest with a constant load, and the rate of the link over which it moves.
struct PlanCase {
    guest: &'static str,
    vcpus: &'static str,
    link_mib_per_s: u64,
}

/// A guest that writes less than the link carries, a guest that rewrites a small working set in
/// each pass, and a guest that writes more than the link carries, so that it is throttled.
const CASES: [PlanCase; 3] = [
    PlanCase { guest: "payload,ws=32M,rate=20M", vcpus: "1", link_mib_per_s: 60 },
    PlanCase { guest: "payload,ws=8M,rate=max", vcpus: "1", link_mib_per_s: 40 },
    PlanCase { guest: "payload,ws=64M,rate=max", vcpus: "1", link_mib_per_s: 40 },
];

/// Returns the plan, and the report of the migration that follows.
fn plan_and_migrate(case: &PlanCase) -> (Value, Value) {
    let scratch = ScratchDir::new();
    let machine = ["--mem", "256M", "--vcpus", case.vcpus];
    let mut source = Driftline::run(&scratch, "source", case.guest, &machine);
    source.console().wait_first_pass(1, REPORT_LIMIT);
    let bandwidth = format!("{}M", case.link_mib_per_s);
    let plan = source.cli("plan", &["--bandwidth", &bandwidth, "--json"]);
    let stderr = String::from_utf8_lossy(&plan.stderr).into_owned();
    assert_eq!(plan.status.code(), Some(0), "{stderr}");
    let plan = json_of(&plan);

    let (destination, address) = Driftline::receive(&scratch, "destination");
    let link = MigrationProxy::steady(&address, case.link_mib_per_s << 20);
    let sent = source.cli("send-migration", &[link.address(), "--json"]);
    let stderr = String::from_utf8_lossy(&sent.stderr);
    assert_eq!(sent.status.code(), Some(0), "{stderr}\n{}", destination.log());
    assert_eq!(source.wait_exit(SOON), 0);
    destination.console().wait_reports(1, 1, REPORT_LIMIT);
    destination.console().assert_clean();
    (plan, json_of(&sent))
}

fn figure(report: &Value, name: &str) -> f64 {
    report[name].as_f64().expect(name)
}

#[test]
fn plan_predicts_the_first_pass_and_total_time() {
    if !kvm_or_skip("plan_predicts_the_first_pass_and_total_time") {
        return;
    }
    let (plan, measured) = plan_and_migrate(&CASES[0]);
    // On a slow host the guest writes less and the migration takes longer; never the opposite.
    assert_eq!(plan["verdict"], "converges", "{plan}");
    let forecast = &plan["migration"];
    let (first, then) = (&forecast["passes"][0], &measured["passes"][0]);
    let (frames, sent) = (figure(first, "frames"), figure(then, "frames"));
    assert!(frames <= sent * 1.2 && sent <= frames * 1.2, "{first} {then}");
    let total = figure(forecast, "total_time_ms");
    assert!(total <= 3.0 * figure(&measured, "total_time_ms"), "{plan} {measured}");
    assert!(figure(forecast, "downtime_ms") <= 302.0, "{plan}");
    let curve = plan["guest"]["curve"].as_array().expect("a curve");
    assert_eq!(curve.len(), 5, "{plan}");
    // The guest writes at most 20 MiB/s, and less on a slow host.
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
    let mut accurate = 0;
    for run in 0..runs {
        let case = &CASES[run % CASES.len()];
        let (plan, measured) = plan_and_migrate(case);
        let forecast = &plan["migration"];
        let near = |name: &str, least: f64| {
            let planned = figure(forecast, name).max(least);
            let found = figure(&measured, name).max(least);
            planned <= 2.0 * found && found <= 2.0 * planned
        };
        let both = near("total_time_ms", 1.0) && near("downtime_ms", SHORT_MS);
        accurate += usize::from(both);
        println!(
            "{}: planned {:.0} ms, downtime {:.1}; made {:.0} ms, downtime {:.1} (setup {:.0}); \
             passes {} and {}: {}",
            case.guest,
            figure(forecast, "total_time_ms"),
            figure(forecast, "downtime_ms"),
            figure(&measured, "total_time_ms"),
            figure(&measured, "downtime_ms"),
            figure(&measured, "setup_time_ms"),
            forecast["passes"].as_array().map_or(0, Vec::len),
            measured["passes"].as_array().map_or(0, |p| p.len().saturating_sub(1)),
            if both { "accurate" } else { "not accurate" },
        );
    }
    assert!(accurate * 10 >= runs * 9, "{accurate} of {runs} plans are accurate");
}
