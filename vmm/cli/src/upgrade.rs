//! `driftline upgrade`: starts the next process of a guest, and asks the guest's process to hand
//! the guest over to it.

use std::env;
use std::os::unix::net::UnixListener;
use std::path;
use std::path::Path;
use std::pin::pin;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use driftline_control::api::{Client, ClientError};
use driftline_control::model::{GuestState, InfoPage, UpgradeRequest};
use driftline_migrate::{SendReport, SendStatus};
use hyper::Method;
use rustix::fd::{AsFd, AsRawFd};
use rustix::io::{FdFlags, fcntl_setfd};

use super::args::UpgradeArgs;
use super::client::block_on;
use super::failure::Failure;
use super::interrupts::Interrupts;
use super::output::{print_json, print_message};

/// Upper bound on waiting for the end of a next process that does not have the guest.
const END_LIMIT: Duration = Duration::from_millis(200);
/// Interval between two checks of that process.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// `driftline upgrade`.
pub(super) fn upgrade(args: &UpgradeArgs) -> Result<ExitCode, Failure> {
    let client = args.query.api.client();
    let was_paused = match block_on(client.get::<InfoPage>("/v1/info"))? {
        Ok(InfoPage::Guest(info)) => info.state == GuestState::Paused,
        // The request below reports why the upgrade is refused.
        Ok(InfoPage::Arriving(_)) | Err(ClientError::Fault(_)) => false,
        Err(e) => return Err(e.into()),
    };
    // A path, which is not looked up in PATH.
    let binary = args.binary.as_ref().map_or_else(env::current_exe, path::absolute)?;
    // Only this user can enter the directory.
    let directory = tempfile::Builder::new().prefix("driftline-upgrade-").tempdir()?;
    let socket = directory.path().join("next");
    let listener = UnixListener::bind(&socket)?;
    let next = start(&binary, &listener)?;
    // The next process is the only one that listens.
    drop(listener);
    let (answer, page) = block_on(async {
        let answer = ask(&client, &UpgradeRequest { socket }).await;
        let page = match &answer {
            Err(ClientError::Fault(_)) => client.get::<InfoPage>("/v1/info").await.ok(),
            _ => None,
        };
        (answer, page)
    })?;
    match answer {
        Ok(report) => {
            conclude(args, &report, next.id())?;
            Ok(ExitCode::SUCCESS)
        }
        Err(ClientError::Fault(why)) => Err(match page {
            Some(InfoPage::Guest(info)) if info.pid != next.id() => {
                end(next);
                failure(why, info.state, was_paused)
            }
            _ => Failure::error(why),
        }),
        Err(e @ ClientError::Connect { .. }) => {
            end(next);
            Err(e.into())
        }
        Err(e) => {
            let next = format!("; process {} may still receive the guest", next.id());
            Err(Failure::from(e).followed_by(&next))
        }
    }
}

/// Asks the guest's process to hand the guest over. Ctrl-C does not end that, because the directory
/// of the socket would stay behind.
async fn ask(client: &Client, request: &UpgradeRequest) -> Result<SendReport, ClientError> {
    let mut interrupts = Interrupts::listen();
    let mut answer = pin!(client.call(Method::POST, "/v1/upgrade", Some(request)));
    loop {
        tokio::select! {
            answer = &mut answer => return answer,
            _ = interrupts.pressed() => {
                print_message("an upgrade cannot be cancelled; it ends within --timeout");
            }
        }
    }
}

/// Returns the failure of an upgrade whose guest is still in its process, in `state`. A guest that
/// ran before and is paused now could not be resumed.
fn failure(why: String, state: GuestState, was_paused: bool) -> Failure {
    match state {
        GuestState::Running => Failure::still_running(why),
        GuestState::Paused if was_paused => Failure::still_running(why),
        _ => Failure::error(why),
    }
}

fn start(binary: &Path, listener: &UnixListener) -> Result<Child, Failure> {
    let cannot = |e| Failure::error(format_args!("cannot start {}: {e}", binary.display()));
    fcntl_setfd(listener.as_fd(), FdFlags::empty())?;
    let mut command = Command::new(binary);
    command.arg("take-over").arg(listener.as_fd().as_raw_fd().to_string());
    let started = command.stdin(Stdio::null()).spawn();
    fcntl_setfd(listener.as_fd(), FdFlags::CLOEXEC)?;
    started.map_err(cannot)
}

/// Ends a process that does not have the guest. It ends by itself if it has been told so.
fn end(mut next: Child) {
    let until = Instant::now() + END_LIMIT;
    while Instant::now() < until {
        if !matches!(next.try_wait(), Ok(None)) {
            return;
        }
        sleep(CHECK_INTERVAL);
    }
    if let Err(e) = next.kill().and_then(|()| next.wait()) {
        print_message(format_args!("the next process, {}, does not end: {e}", next.id()));
    }
}

fn conclude(args: &UpgradeArgs, report: &SendReport, pid: u32) -> Result<(), Failure> {
    if report.status != SendStatus::Completed {
        let ended = Failure::error("the operator has resolved that the guest ends");
        return Err(ended.with(report));
    }
    if args.query.json {
        let mut report = serde_json::to_value(report)?;
        report["pid"] = pid.into();
        return print_json(&report);
    }
    print_message(format_args!(
        "guest {} continues in process {pid}; it was paused for {:.1} ms",
        report.vm_id, report.downtime_ms
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_left_paused_is_not_still_running() {
        let still_runs =
            |state, was_paused| failure("no".to_owned(), state, was_paused).is_still_running();
        assert!(still_runs(GuestState::Running, false));
        assert!(still_runs(GuestState::Paused, true));
        assert!(!still_runs(GuestState::Paused, false));
        assert!(!still_runs(GuestState::InDoubt, false));
    }
}
