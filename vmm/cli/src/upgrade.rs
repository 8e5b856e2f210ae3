//! `driftline upgrade`: starts the next process of a guest, and asks the guest's process to hand
//! the guest over to it.

use std::env;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use driftline_control::api::ClientError;
use driftline_control::model::UpgradeRequest;
use driftline_migrate::SendReport;
use hyper::Method;
use rustix::fd::{AsFd, AsRawFd};
use rustix::io::{FdFlags, fcntl_setfd};

use super::args::UpgradeArgs;
use super::client::block_on;
use super::failure::Failure;
use super::output::{print_json, print_message};

/// Upper bound on waiting for the end of a next process that has not got the guest.
const END_LIMIT: Duration = Duration::from_millis(200);
/// Interval between two looks at that process.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// `driftline upgrade`.
pub(super) fn upgrade(args: &UpgradeArgs) -> Result<ExitCode, Failure> {
    let binary = args.binary.clone().map_or_else(env::current_exe, Ok)?;
    // Only this user can enter the directory.
    let directory = tempfile::Builder::new().prefix("driftline-upgrade-").tempdir()?;
    let socket = directory.path().join("next");
    let listener = UnixListener::bind(&socket)?;
    let next = start(&binary, &listener)?;
    // The next process is the only one that listens.
    drop(listener);
    let client = args.query.api.client();
    let request = UpgradeRequest { socket };
    let answer = block_on(async {
        client.call::<SendReport>(Method::POST, "/v1/upgrade", Some(&request)).await
    })?;
    match answer {
        Ok(report) => {
            conclude(args, &report, next.id())?;
            Ok(ExitCode::SUCCESS)
        }
        // The guest stays, or was not asked for.
        Err(ClientError::Fault(why)) => {
            end(next);
            Err(Failure::still_running(why))
        }
        Err(e @ ClientError::Connect { .. }) => {
            end(next);
            Err(e.into())
        }
        Err(e) => {
            let next = format!("; process {} may get the guest yet", next.id());
            Err(Failure::from(e).followed_by(&next))
        }
    }
}

fn start(binary: &Path, listener: &UnixListener) -> Result<Child, Failure> {
    let cannot = |e| Failure::error(format_args!("cannot start {}: {e}", binary.display()));
    fcntl_setfd(listener.as_fd(), FdFlags::empty())?;
    let mut command = Command::new(binary);
    command.arg("take-over").arg(listener.as_fd().as_raw_fd().to_string());
    // A signal to the group of this command is not for the guest.
    let started = command.stdin(Stdio::null()).process_group(0).spawn();
    fcntl_setfd(listener.as_fd(), FdFlags::CLOEXEC)?;
    started.map_err(cannot)
}

/// Ends a process that has not got the guest. It ends by itself if it knows that.
fn end(mut next: Child) {
    let until = Instant::now() + END_LIMIT;
    while Instant::now() < until {
        if !matches!(next.try_wait(), Ok(None)) {
            return;
        }
        sleep(LOOK_INTERVAL);
    }
    if let Err(e) = next.kill().and_then(|()| next.wait()) {
        print_message(format_args!("the next process, {}, does not end: {e}", next.id()));
    }
}

fn conclude(args: &UpgradeArgs, report: &SendReport, pid: u32) -> Result<(), Failure> {
    if args.query.json {
        let mut report = serde_json::to_value(report)?;
        report["pid"] = pid.into();
        return print_json(&report);
    }
    print_message(format_args!(
        "guest {} continues in process {pid}; it stood for {:.1} ms",
        report.vm_id, report.downtime_ms
    ));
    Ok(())
}
