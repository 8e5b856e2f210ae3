//! Owns `driftline checkpoint`: starts a run of checkpoints over the API and follows it.

use std::num::NonZeroU64;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use driftline_checkpoint::{CadenceTotals, Percentiles};
use driftline_control::api::{Client, ClientError};
use driftline_control::model::{
    CheckpointPage, CheckpointRequest, DisksPolicy, EpochLine, EpochOutcome, JobStarted,
};
use hyper::Method;
use serde_json::json;

use super::args::CheckpointArgs;
use super::client::{GuestPresence, block_on, has_ended, not_begun};
use super::failure::Failure;
use super::interrupts::Interrupts;
use super::output::{self, print, print_json, print_message};

/// How long the server may delay an answer until there is news, in ms.
const WAIT_MS: u64 = 10_000;
/// Instruction for users of `--disks=external`.
const EXTERNAL: &str = "a checkpoint of this run contains no disks: restore it only with copies of \
    the disks from its pause (driftline pause, driftline checkpoint, copy the disks or snapshot \
    their storage, driftline resume)";

/// `driftline checkpoint`.
pub(super) fn checkpoint(args: &CheckpointArgs) -> Result<ExitCode, Failure> {
    match &args.store {
        Some(store) => block_on(start_and_follow(args, store))?,
        None if args.stop => block_on(stop(args))?,
        None => block_on(status(args))?,
    }
}

/// Requests a page without reports: only the run's description and totals.
async fn page_of(client: &Client) -> Result<CheckpointPage, ClientError> {
    client.get(&format!("/v1/checkpoint?since={}", u64::MAX)).await
}

async fn stop(args: &CheckpointArgs) -> Result<ExitCode, Failure> {
    let (client, timeout) = (args.api.client().within_timeout(), args.api.timeout);
    let job = page_of(&client).await?.job;
    client.call::<()>(Method::DELETE, &format!("/v1/checkpoint?job={job}"), None::<&()>).await?;
    // Wait until the checkpoint in progress is durable, or has failed, and the store is released.
    match client.get::<()>(&format!("/v1/checkpoint/attach?job={job}")).await {
        Ok(()) => {}
        Err(ClientError::Silent { .. }) => {
            return Err(Failure::error(format_args!(
                "the checkpoint run (job {job}) has not ended within {timeout:?}: the checkpoint \
                 in progress may be waiting for its storage or a disk; --timeout waits longer"
            )));
        }
        Err(e) => return Err(e.into()),
    }
    match args.json {
        true => print_json(&json!({ "job": job, "running": false }))?,
        false => print_message(format_args!("the checkpoint run (job {job}) has ended")),
    }
    Ok(ExitCode::SUCCESS)
}

async fn status(args: &CheckpointArgs) -> Result<ExitCode, Failure> {
    let page = page_of(&args.api.client()).await?;
    if args.json {
        print_json(&page)?;
        return Ok(ExitCode::SUCCESS);
    }
    let interval = page.achieved.interval;
    let ms = |us: u64| us as f64 / 1e3;
    let state = match (page.running, page.attached) {
        (false, _) => "over",
        (true, true) => "active, ends with its client",
        (true, false) => "active, detached",
    };
    let last = match &page.last {
        None => "none yet".to_owned(),
        Some(EpochOutcome::Stored(line)) => line.report.epoch.to_string(),
        Some(EpochOutcome::Failed(why)) => format!("failed: {why}"),
    };
    print(output::table(&[
        ("state", state.to_owned()),
        ("job", page.job.to_string()),
        ("store", page.store.display().to_string()),
        (
            "interval",
            page.every_ms.map_or("one checkpoint".to_owned(), |every| format!("{every} ms")),
        ),
        (
            "achieved",
            format!("{:.1} ms p50, {:.1} ms max", ms(interval.p50_us), ms(interval.max_us)),
        ),
        ("keep", page.keep.map_or("all".to_owned(), |keep| keep.to_string())),
        ("checkpoints", format!("{}, {} failed", page.achieved.epochs, page.achieved.failed)),
        ("last", last),
    ]))?;
    Ok(ExitCode::SUCCESS)
}

async fn start_and_follow(args: &CheckpointArgs, store: &Path) -> Result<ExitCode, Failure> {
    let client = args.api.client();
    let request = CheckpointRequest {
        store: std::path::absolute(store)?,
        every_ms: args.every.and_then(|every| NonZeroU64::new(millis(every))),
        count: args.count,
        max_pause_ms: args.max_pause.map(millis),
        keep: args.keep,
        direct_io: args.direct_io,
        attached: !args.detach,
        new_store: args.new_store,
        disks: Some(args.disks),
    };
    if args.disks == DisksPolicy::External {
        print_message(EXTERNAL);
    }
    let job = start(args, &client, &request).await?;
    if args.detach {
        match args.json {
            true => print_json(&json!({ "job": job, "running": true }))?,
            false => print_message(format_args!("the checkpoint run (job {job}) stays active")),
        }
        return Ok(ExitCode::SUCCESS);
    }
    // The connection stays open for as long as this process exists, whatever it waits for.
    let attached = client.clone().with_timeout(Duration::MAX);
    tokio::spawn(async move {
        let _ = attached.get::<()>(&format!("/v1/checkpoint/attach?job={job}")).await;
    });
    follow(args, &client, job).await
}

/// Starts the run and returns its number. If another run is active, the failure says how to end it.
async fn start(
    args: &CheckpointArgs,
    client: &Client,
    request: &CheckpointRequest,
) -> Result<u64, Failure> {
    match client.call(Method::POST, "/v1/checkpoint", Some(request)).await {
        Ok(JobStarted { job }) => Ok(job),
        Err(ClientError::Fault(why)) => {
            let active = page_of(client).await.is_ok_and(|page| page.running);
            let how = match active {
                true => format!(
                    "; end it with: driftline checkpoint --stop --api-sock {}",
                    args.api.api_sock.display()
                ),
                false => String::new(),
            };
            Err(not_begun(client, ClientError::Fault(why + &how)).await)
        }
        Err(e) => Err(not_begun(client, e).await),
    }
}

/// Prints the run's reports until it is over.
async fn follow(args: &CheckpointArgs, client: &Client, job: u64) -> Result<ExitCode, Failure> {
    let (mut since, mut failed, mut last) = (0, None, None);
    let mut interrupts = Interrupts::listen();
    let (guest_ended, achieved) = loop {
        let page = match next_page(client, job, since, &mut interrupts).await {
            Ok(Some(page)) => page,
            Ok(None) => {
                return Err(Failure::error(format_args!(
                    "interrupted before the checkpoint run (job {job}) has ended: `driftline \
                     checkpoint --status --api-sock {}` shows it",
                    args.api.api_sock.display()
                )));
            }
            Err(e) => return Err(lost(client, e, last).await),
        };
        for outcome in &page.epochs {
            if let EpochOutcome::Stored(line) = outcome {
                last = Some(line.report.epoch);
            }
            match outcome {
                EpochOutcome::Stored(line) if args.json => print_json(line)?,
                EpochOutcome::Stored(line) => print(describe(line))?,
                EpochOutcome::Failed(why) => {
                    print_message(why);
                    failed = Some(why.clone());
                }
            }
        }
        since = page.next;
        if !page.running {
            break (page.guest_ended, page.achieved);
        }
    };
    if args.every.is_some() {
        match args.json {
            true => print_json(&json!({ "achieved": achieved }))?,
            false => print_message(summary(&achieved)),
        }
    }
    match (failed, args.count) {
        (Some(why), _) => Err(verdict(client, &why).await),
        (None, Some(count)) if guest_ended && since < count => Err(Failure::error(format_args!(
            "the guest has ended after {since} of {count} checkpoints"
        ))),
        (None, _) => Ok(ExitCode::SUCCESS),
    }
}

/// Returns the failure for a missing answer about the run, of which checkpoint `last` is durable.
/// It says whether the VMM has ended, does not answer, or has not answered properly.
async fn lost(client: &Client, e: ClientError, last: Option<u64>) -> Failure {
    let durable = match last {
        Some(last) => format!("; the last durable checkpoint is {last}"),
        None => "; it has reported no durable checkpoint of this run".to_owned(),
    };
    let why = match &e {
        ClientError::Connect { cause, .. } => format!("does not answer: {cause}"),
        ClientError::Broken { cause, .. } => format!("did not answer properly: {cause}"),
        ClientError::Silent { .. } => return Failure::from(e).followed_by(&durable),
        ClientError::Fault(_) => return e.into(),
    };
    let socket = client.socket().display();
    let message = match has_ended(client).await {
        true => format!("the VMM on {socket} has ended{durable}"),
        false => format!("the VMM on {socket} {why}{durable}"),
    };
    Failure::from(e).with_message(message)
}

/// Returns the reports from `since` on. The first Ctrl-C stops the run; its last reports are still
/// returned. The second one ends the wait for them, which stuck storage can prolong: returns
/// `None`.
async fn next_page(
    client: &Client,
    job: u64,
    since: u64,
    interrupts: &mut Interrupts,
) -> Result<Option<CheckpointPage>, ClientError> {
    let path = format!("/v1/checkpoint?job={job}&since={since}&wait_ms={WAIT_MS}");
    loop {
        let is_first = tokio::select! {
            page = client.get(&path) => return page.map(Some),
            is_first = interrupts.pressed() => is_first,
        };
        if !is_first {
            return Ok(None);
        }
        print_message("stopping after the current checkpoint");
        let stop = format!("/v1/checkpoint?job={job}");
        match client.call::<()>(Method::DELETE, &stop, None::<&()>).await {
            // The run may have ended by itself at this moment.
            Ok(()) | Err(ClientError::Fault(_)) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Returns a failure with exit code 4 if the guest is still here, otherwise 1.
async fn verdict(client: &Client, why: &str) -> Failure {
    let presence = GuestPresence::ask(client).await;
    let state = match &presence {
        GuestPresence::Here(state) => {
            format!("not every checkpoint was stored (the guest is {})", state.name())
        }
        GuestPresence::InDoubt { .. } => "not every checkpoint was stored".to_owned(),
        GuestPresence::Ended => "the guest has ended".to_owned(),
        GuestPresence::Unknown => "the VMM does not report the state of the guest".to_owned(),
    };
    presence.failure(format_args!("{state}; the last failure: {why}"))
}

fn describe(line: &EpochLine) -> String {
    let disks = match line.report.disk_blocks {
        0 => String::new(),
        blocks => format!(" and {} of disks", output::count(blocks, "block")),
    };
    let copied_after = match line.report.copied_after_frames {
        0 => String::new(),
        pages => format!(" ({pages} copied after it)"),
    };
    let late = match (line.late_ms, line.skipped) {
        _ if line.early => ", early".to_owned(),
        (0..10, 0) => String::new(),
        (late, 0) => format!(", started {late} ms late"),
        (late, skipped) => {
            let skipped = output::count(skipped, "interval");
            format!(", started {late} ms late; {skipped} skipped")
        }
    };
    format!(
        "checkpoint {}: {}{disks}, pause {:.2} ms{copied_after}, durable after {:.1} ms, {}{late}",
        line.report.epoch,
        output::count(line.report.frames, "page"),
        line.report.pause_us as f64 / 1e3,
        line.report.write_ms,
        output::bytes(line.report.written_bytes),
    )
}

/// Formats a run's counts in one line, then its pauses, intervals and times until durable in a line
/// each.
fn summary(achieved: &CadenceTotals) -> String {
    let CadenceTotals { epochs, failed, early, skipped, pause, interval, write } = *achieved;
    let line = |name: &str, s: Percentiles| {
        let [p50, p90, p99, max] =
            [s.p50_us, s.p90_us, s.p99_us, s.max_us].map(|us| us as f64 / 1e3);
        format!(
            "\n  {name:9} p50 {p50:8.2} ms   p90 {p90:8.2} ms   p99 {p99:8.2} ms   max {max:8.2} ms"
        )
    };
    let lines = [line("pause", pause), line("interval", interval), line("durable", write)].concat();
    let (epochs, skipped) =
        (output::count(epochs, "checkpoint"), output::count(skipped, "interval"));
    format!("{epochs}, {failed} failed, {early} early, {skipped} skipped{lines}")
}

fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use driftline_checkpoint::EpochReport;

    use super::*;

    #[test]
    fn late_checkpoint_names_skipped_intervals() {
        let line = |late_ms, skipped, early| {
            describe(&EpochLine {
                report: EpochReport {
                    epoch: 4,
                    frames: 2,
                    disk_blocks: 0,
                    pause_us: 1_500,
                    copied_after_frames: 0,
                    waits: 0,
                    waited_us: 0,
                    write_ms: 2.0,
                    written_bytes: 8_192,
                    durable: true,
                },
                late_ms,
                early,
                skipped,
            })
        };
        let begin = "checkpoint 4: 2 pages, pause 1.50 ms, durable after 2.0 ms, 8 KiB";
        assert_eq!(line(9, 0, false), begin);
        assert_eq!(line(103, 0, false), format!("{begin}, started 103 ms late"));
        let one = format!("{begin}, started 103 ms late; 1 interval skipped");
        assert_eq!(line(103, 1, false), one);
        assert_eq!(line(0, 0, true), format!("{begin}, early"));
    }
}
