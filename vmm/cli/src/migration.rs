//! Owns the commands for a migration at its source: send, cancel, resolve.

use std::process::ExitCode;

use driftline_control::api::{Client, ClientError};
use driftline_control::model::{
    GuestLocation, GuestState, InfoPage, JobStarted, MigrationFailure, MigrationPage,
    MigrationRequest, MigrationState, ResolveRequest,
};
use driftline_migrate::{
    Address, Phase, Resolution, SendReport, SendStatus, SendTls, VcpuThrottle,
};
use hyper::Method;
use serde_json::{Value, json};

use super::args::{ApiArgs, QueryArgs, ResolveArgs, SendArgs};
use super::client::{ask, block_on, not_begun};
use super::failure::Failure;
use super::hand_overs::resolved;
use super::interrupts::Interrupts;
use super::output::{self, print, print_json, print_message};
use super::progress::{ProgressView, progress_line};

/// Interval at which progress is shown, in ms.
const UPDATE_INTERVAL_MS: u64 = 200;

/// `driftline send-migration`.
pub(super) fn send(args: &SendArgs) -> Result<ExitCode, Failure> {
    block_on(start_and_follow(args))?
}

async fn start_and_follow(args: &SendArgs) -> Result<ExitCode, Failure> {
    let client = args.query.api.client();
    // The VMM may have another working directory.
    let dir = args.tls_dir.as_ref().map(std::path::absolute).transpose()?;
    let tls = dir.map(|dir| SendTls { dir, peer: args.peer.clone() });
    let request = MigrationRequest {
        to: peer_text(&args.address),
        downtime_ms: args.downtime_ms,
        timeout_s: args.timeout_s,
        timeout_strategy: args.timeout_strategy,
        max_bandwidth_bytes_per_s: args.max_bandwidth,
        connections: args.connections,
        compression: args.compress,
        verify: args.verify,
        copy_disks: args.copy_disks.clone().unwrap_or_default(),
        throttle: !args.no_throttle,
        tls,
        insecure: args.insecure,
        local: args.local,
    };
    if args.insecure && args.address.may_leave_host() {
        let to = &args.address;
        print_message(format_args!(
            "insecure: every host on the way to {to} can read and change the guest"
        ));
    }
    let JobStarted { job } = match client.call(Method::POST, "/v1/migration", Some(&request)).await
    {
        Ok(begun) => begun,
        Err(e) => {
            let refused = not_begun(&client, e).await;
            let guest = refused.is_still_running().then_some(GuestLocation::Here);
            return Err(refused.with(&outcome("failed", Phase::Waiting, guest)));
        }
    };
    let mut view = ProgressView::new(progress_line);
    let mut interrupts = Interrupts::listen();
    let page = loop {
        let page = next_page(&client, job, &mut interrupts).await?;
        if matches!(page.state, MigrationState::Completed | MigrationState::Failed) {
            break page;
        }
        view.show(&page.progress);
    };
    drop(view);
    conclude(args, page)
}

/// Returns the destination as a request names it: a TCP address without its kind, unless its host
/// has the name of another kind.
fn peer_text(address: &Address) -> String {
    match address {
        Address::Tcp(short) if short.parse().as_ref() == Ok(address) => short.clone(),
        other => other.to_string(),
    }
}

/// Returns the migration's current state. The first Ctrl-C cancels the migration; its outcome is
/// still returned. The second one ends the wait: a migration in doubt cannot be cancelled, and may
/// last.
async fn next_page(
    client: &Client,
    job: u64,
    interrupts: &mut Interrupts,
) -> Result<MigrationPage, Failure> {
    let path = format!("/v1/migration?job={job}&wait_ms={UPDATE_INTERVAL_MS}");
    let is_first = tokio::select! {
        page = client.get(&path) => return page.map_err(lost_contact),
        is_first = interrupts.pressed() => is_first,
    };
    if !is_first {
        return Err(Failure::error(format_args!(
            "interrupted before the migration is over: `driftline info --api-sock {}` shows it",
            client.socket().display()
        )));
    }
    let cancel = format!("/v1/migration?job={job}");
    match client.call::<()>(Method::DELETE, &cancel, None::<&()>).await {
        Ok(()) => print_message("cancelling"),
        Err(ClientError::Fault(why)) => print_message(why),
        Err(e) => return Err(lost_contact(e)),
    }
    client.get(&path).await.map_err(lost_contact)
}

fn lost_contact(e: ClientError) -> Failure {
    Failure::from(e)
        .followed_by("; look for the guest at the destination, or in this host's hand-over records")
}

fn conclude(args: &SendArgs, page: MigrationPage) -> Result<ExitCode, Failure> {
    match (page.report, page.failure) {
        (Some(report), _) => match report.status {
            SendStatus::Completed if args.query.json => {
                print_json(&report)?;
                Ok(ExitCode::SUCCESS)
            }
            SendStatus::Completed => {
                print(report_table(&report))?;
                Ok(ExitCode::SUCCESS)
            }
            SendStatus::ResolvedDiscarded => {
                let ended = Failure::error("the operator has resolved that the guest here ends");
                Err(ended.with(&report))
            }
        },
        (None, Some(failure)) => {
            let MigrationFailure { message, cancelled, phase, guest } = failure;
            let status = if cancelled { "cancelled" } else { "failed" };
            let failure = match guest {
                GuestLocation::Here => Failure::still_running(message),
                GuestLocation::PausedHere | GuestLocation::Ended => Failure::error(message),
            };
            Err(failure.with(&outcome(status, phase, Some(guest))))
        }
        (None, None) => Err(Failure::error("the migration has ended without an outcome")),
    }
}

/// Returns the fields that `--json` prints beside the error of a migration that failed or was not
/// started. `guest` is null if no process answered.
fn outcome(status: &str, phase: Phase, guest: Option<GuestLocation>) -> Value {
    json!({ "status": status, "phase": phase, "guest": guest })
}

fn report_table(report: &SendReport) -> String {
    let mut lines = vec![
        ("guest", report.vm_id.to_string()),
        ("total", format!("{:.1} ms", report.total_time_ms)),
        ("downtime", format!("{:.1} ms", report.downtime_ms)),
        ("setup", format!("{:.1} ms", report.setup_time_ms)),
        ("passes", report.passes.len().to_string()),
        ("transferred", output::bytes(report.transferred_bytes)),
        ("throughput", output::bytes_per_s(report.throughput_bytes_per_s)),
        ("pages", format!("{} and {} of zeros", report.normal_frames, report.zero_frames)),
        ("throttled", throttle_summary(&report.throttle)),
        ("ended because", report.converged.clone()),
    ];
    if report.shared_memory_bytes > 0 {
        let handed_over = output::bytes(report.shared_memory_bytes);
        lines.push(("memory", format!("{handed_over} handed over as it is, nothing copied")));
    }
    if report.disk_bytes > 0 || report.disk_zero_bytes > 0 {
        let (sent, zeros) =
            (output::bytes(report.disk_bytes), output::bytes(report.disk_zero_bytes));
        lines.push((
            "disks",
            format!("{sent} and {zeros} of zeros; their files here are out of date"),
        ));
    }
    output::table(&lines)
}

/// Says, after a migration, which vCPUs were throttled and for how long.
fn throttle_summary(vcpus: &[VcpuThrottle]) -> String {
    let throttled = |v: &VcpuThrottle| format!("vCPU {} for {:.0} ms", v.vcpu, v.throttled_ms);
    let throttled: Vec<String> =
        vcpus.iter().filter(|v| v.throttled_ms > 0.0).map(throttled).collect();
    match throttled.is_empty() {
        true => "none".to_owned(),
        false => throttled.join(", "),
    }
}

/// `driftline cancel-migration`.
pub(super) fn cancel(args: &QueryArgs) -> Result<ExitCode, Failure> {
    ask::<()>(&args.api, Method::DELETE, "/v1/migration", None::<&()>)?;
    match args.json {
        true => print_json(&json!({ "status": "cancelling" }))?,
        false => print_message("the migration is being cancelled"),
    }
    Ok(ExitCode::SUCCESS)
}

/// `driftline resolve`.
pub(super) fn resolve(args: &ResolveArgs) -> Result<ExitCode, Failure> {
    let (api, dir) = (args.api_sock.as_ref(), args.state_dir.as_ref());
    let api = match (api, dir) {
        (Some(api_sock), _) => ApiArgs { api_sock: api_sock.clone(), timeout: args.timeout },
        (None, Some(dir)) => return super::hand_overs::resolve(dir, args),
        // clap requires one of the two.
        (None, None) => return Err(Failure::error("neither --api-sock nor --state-dir was given")),
    };
    let info: InfoPage = ask(&api, Method::GET, "/v1/info", None::<&()>)?;
    let vm_id = match info {
        InfoPage::Guest(info) if info.state == GuestState::InDoubt => info.vm_id,
        _ => return Err(Failure::error("no migration is in doubt")),
    };
    let page: MigrationPage = ask(&api, Method::GET, "/v1/migration", None::<&()>)?;
    let action = if args.action.run {
        print_message(format_args!(
            "run: the guest continues here. You assert that {} does not run it and never will; if \
             it does, the guest runs twice",
            page.to
        ));
        Resolution::Run
    } else {
        print_message(format_args!(
            "discard: the guest here ends. If {} does not run it, it is lost",
            page.to
        ));
        Resolution::Discard
    };
    ask::<()>(&api, Method::POST, "/v1/migration/resolve", Some(&ResolveRequest { action }))?;
    if args.json {
        print_json(&resolved(action, vm_id, &[&page.to]))?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_names_the_same_destination() {
        for (given, named) in [
            ("tcp:10.0.0.2:7001", "10.0.0.2:7001"),
            ("tcp:unix:7001", "tcp:unix:7001"),
            ("tcp:fd:7001", "tcp:fd:7001"),
            ("unix:7001", "unix:7001"),
        ] {
            let address: Address = given.parse().unwrap();
            assert_eq!(peer_text(&address), named);
            assert_eq!(named.parse(), Ok(address));
        }
    }
}
