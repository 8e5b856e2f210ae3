//! Owns `driftline plan`: its request, and the text of a plan.

use std::process::ExitCode;
use std::time::Duration;

use driftline_checkpoint::CadenceForecast;
use driftline_control::api::plan::{Plan, PlanRequest, PlanVerdict};
use driftline_control::jobs::WindowSummary;
use driftline_dirty_tracker::PAGE_SIZE;
use driftline_migrate::forecast::Forecast;
use hyper::Method;

use super::args::{ApiArgs, PlanArgs};
use super::client::ask;
use super::failure::Failure;
use super::output::{self, print, print_json, print_message};

/// How long the VMM may observe the guest's writes before it answers.
const SAMPLING_TIME: Duration = Duration::from_secs(5);

/// `driftline plan`.
pub(super) fn plan(args: &PlanArgs) -> Result<ExitCode, Failure> {
    let request =
        PlanRequest { downtime_ms: Some(args.downtime_ms), bandwidth_bytes_per_s: args.bandwidth };
    print_message("watching the guest for about four seconds");
    let api = &args.query.api;
    let api = ApiArgs { api_sock: api.api_sock.clone(), timeout: api.timeout + SAMPLING_TIME };
    let plan: Plan = ask(&api, Method::POST, "/v1/migration/plan", Some(&request))?;
    if args.query.json {
        print_json(&plan)?;
    } else {
        print(report(&plan))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn report(plan: &Plan) -> String {
    let (profile, migration) = (&plan.guest, &plan.migration);
    let assumed = if plan.bandwidth_assumed { ", assumed: set it with --bandwidth" } else { "" };
    let mut rows = vec![
        ("link", format!("{}{assumed}", output::bytes_per_s(plan.bandwidth_bytes_per_s))),
        ("downtime target", format!("{} ms", plan.downtime_target_ms)),
        (
            "memory",
            format!(
                "{} to send, of which {} are zeros",
                frames(profile.populated_frames),
                frames(profile.zero_frames)
            ),
        ),
    ];
    rows.extend(profile.curve.iter().map(|window| ("writes", describe_window(window))));
    rows.push(("migration", verdict(plan)));
    rows.extend(outcome_rows(migration));
    if let Some(free) = &plan.without_throttle {
        let text = match free.converges {
            true => format!("{:.0} ms, downtime {:.0} ms", free.total_time_ms, free.downtime_ms),
            false => format!("does not converge: {}", free.reason),
        };
        rows.push(("without throttle", text));
    }
    if plan.verdict == PlanVerdict::DoesNotConverge {
        rows.push(("post-copy", "not offered by this version".to_owned()));
    }
    rows.extend(plan.checkpoints.iter().map(|c| ("checkpoint", describe_cadence(c))));
    rows.push((
        "cadence",
        match plan.checkpoint_every_ms {
            Some(ms) => format!(
                "every {ms} ms is the shortest bearable interval (a store's speed is assumed)"
            ),
            None => "none of these intervals is bearable".to_owned(),
        },
    ));
    rows.extend(notes(plan).into_iter().map(|why| ("note", why)));
    format!("{}\n\n{}", headline(plan), output::table(&rows))
}

fn frames(n: u64) -> String {
    output::bytes(n.saturating_mul(PAGE_SIZE))
}

fn describe_window(window: &WindowSummary) -> String {
    let size = |frames: f64| output::bytes((frames * PAGE_SIZE as f64) as u64);
    let vcpus: Vec<String> = window.vcpu_frames.iter().map(|n| size(*n)).collect();
    let by = match vcpus.is_empty() {
        true => String::new(),
        false => format!("; by vCPU {}", vcpus.join(", ")),
    };
    format!(
        "{} in {:.0} ms ({}){by}",
        size(window.frames),
        window.window_ms,
        output::bytes_per_s(window.dirty_rate_bytes_per_s)
    )
}

fn describe_cadence(cadence: &CadenceForecast) -> String {
    format!(
        "every {:.0} ms: {}, pause about {:.1} ms ({:.1} % of the time), {} to the store{}",
        cadence.every_ms,
        frames(cadence.frames),
        cadence.pause_ms,
        cadence.pause_ms / cadence.every_ms * 100.0,
        output::bytes_per_s(cadence.store_bytes_per_s),
        if cadence.bearable { "" } else { ", too often" }
    )
}

/// Summarizes the plan in a sentence.
fn headline(plan: &Plan) -> String {
    let Forecast { converges, total_time_ms, downtime_ms, reason, .. } = &plan.migration;
    match (converges, plan.verdict) {
        (false, _) => format!("A migration would not converge: {reason}"),
        (true, PlanVerdict::ConvergesThrottled) => format!(
            "A migration would converge with throttled vCPUs: {total_time_ms:.0} ms in total, \
             {downtime_ms:.0} ms downtime"
        ),
        (true, _) => format!(
            "A migration would converge: {total_time_ms:.0} ms in total, {downtime_ms:.0} ms \
             downtime"
        ),
    }
}

fn verdict(plan: &Plan) -> String {
    match (plan.verdict, plan.migration.most_bytes_per_s) {
        (PlanVerdict::ConvergesThrottled, Some(most)) => {
            format!(
                "converges with vCPUs throttled to {} each, as they will be",
                output::bytes_per_s(most)
            )
        }
        (PlanVerdict::Converges | PlanVerdict::ConvergesThrottled, _) => "converges".to_owned(),
        (PlanVerdict::DoesNotConverge, _) if plan.throttle_possible => {
            "does not converge, even if vCPUs are throttled".to_owned()
        }
        (PlanVerdict::DoesNotConverge, _) => {
            "does not converge; the writes of each vCPU are unknown, so none can be throttled"
                .to_owned()
        }
    }
}

fn outcome_rows(migration: &Forecast) -> [(&'static str, String); 4] {
    let downtime = match migration.converges {
        true => format!("{:.0} ms", migration.downtime_ms),
        false => format!("{:.0} ms with --timeout-strategy switchover", migration.downtime_ms),
    };
    let then = if migration.converges { "the pause" } else { "no more" };
    let total = match migration.converges {
        true => format!("{:.0} ms", migration.total_time_ms),
        false => format!("cancelled after {:.0} ms", migration.total_time_ms),
    };
    [
        ("passes", format!("{}, then {then}: {}", migration.passes.len(), migration.reason)),
        ("total", total),
        ("downtime", downtime),
        ("transferred", output::bytes(migration.transferred_bytes)),
    ]
}

fn notes(plan: &Plan) -> Vec<String> {
    let mut notes = Vec::new();
    if !plan.guest.steady {
        notes.push("the guest did not write at one rate: this may be far off".to_owned());
    }
    if plan.guest.checkpointing {
        notes.push("checkpoints are being taken: their pauses are in these rates".to_owned());
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftline_control::jobs::WriteProfile;

    /// A guest that writes 256 MiB per second with `vcpus` vCPUs, whose writes are known.
    fn busy(vcpus: usize, checkpointing: bool) -> WriteProfile {
        let window = |ms: u64| {
            let frames = 65.536 * ms as f64;
            WindowSummary {
                window_ms: ms as f64,
                windows: 1,
                frames,
                least_frames: frames as u64,
                most_frames: frames as u64,
                dirty_rate_bytes_per_s: 256 << 20,
                vcpu_frames: vec![frames / vcpus as f64; vcpus],
            }
        };
        WriteProfile {
            watched_ms: 4000.0,
            memory_frames: 1 << 18,
            populated_frames: 1 << 17,
            zero_frames: 1 << 16,
            curve: [10, 250, 1500].map(window).to_vec(),
            steady: !checkpointing,
            checkpointing,
        }
    }

    fn plan_for(mib_per_s: u64, profile: WriteProfile) -> Plan {
        let bandwidth_bytes_per_s = Some(mib_per_s << 20);
        Plan::new(&PlanRequest { downtime_ms: Some(300), bandwidth_bytes_per_s }, profile)
    }

    #[test]
    fn plan_without_throttle_names_what_remains() {
        let plan = plan_for(40, busy(0, false));
        assert_eq!(plan.verdict, PlanVerdict::DoesNotConverge);
        let text = report(&plan);
        assert!(text.starts_with("A migration would not converge: the guest outruns the link"));
        for expected in [
            "so none can be throttled",
            "not offered by this version",
            "cancelled after",
            "30, then no more: the guest outruns the link",
            "switchover",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert!(text.contains("512 MiB to send, of which 256 MiB are zeros"), "{text}");
    }

    #[test]
    fn plan_names_the_throttle_only_if_needed() {
        let plan = plan_for(40, busy(2, false));
        assert_eq!(plan.verdict, PlanVerdict::ConvergesThrottled);
        let text = report(&plan);
        assert!(text.contains("throttled to 3 MiB/s each"), "{text}");
        assert!(text.contains("without throttle  does not converge"), "{text}");
        let plan = plan_for(4096, busy(2, true));
        assert_eq!((plan.verdict, plan.without_throttle.is_none()), (PlanVerdict::Converges, true));
        let text = report(&plan);
        assert!(text.starts_with("A migration would converge: "), "{text}");
        assert!(
            text.contains("did not write at one rate") && text.contains("their pauses"),
            "{text}"
        );
        assert!(!text.contains("post-copy"), "{text}");
    }
}
