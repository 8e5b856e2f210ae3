//! The program as `firecracker`: its arguments, exit codes and messages are Firecracker's.

mod args;
mod fault;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use driftline_control::firecracker::{
    IMITATED_VERSION, MetricsConfig, MicroVm, Operation, config_file_operations, config_file_text,
};
use driftline_format::SNAPSHOT_VERSION;
use driftline_machine::socket::{ListeningSocket, SocketError};
use driftline_machine::{exit, fatal_signals};
use driftline_store::{SnapshotState, StoreError};
use rustix::process::Signal;
use serde_json::Value;

use super::bounded_file::{MAX_CONFIG_FILE, read_bounded};
use super::failure::Failure;
use super::serve::{MetricsFile, ServeEnd, ServeOptions, ServeResult, StartTimes, serve_api};
use super::version::version;
use super::{firecracker_log, log};
use args::{FirecrackerArgs, FirecrackerCommand, help, parse};
use fault::{
    ApiServerFault, BuildFromJsonFault, FATAL_CODES, FirecrackerFault, RunWithoutApiFault,
    SnapshotVersionFault, exiting, hung_up, report,
};

/// The name by which the program is called.
const NAME: &str = "firecracker";

/// Returns the arguments if the program was started as `firecracker ...` or as
/// `driftline firecracker ...`.
pub(super) fn invoked(line: impl IntoIterator<Item = OsString>) -> Option<Vec<OsString>> {
    let mut line = line.into_iter();
    let program = line.next()?;
    if Path::new(&program).file_name() == Some(OsStr::new(NAME)) {
        return Some(line.collect());
    }
    (line.next()? == NAME).then(|| line.collect())
}

/// Does what the arguments ask for. Returns the process's exit code.
pub(super) fn main(line: Vec<OsString>) -> ExitCode {
    log::start_as_firecracker();
    let done = match parse(line) {
        Ok(FirecrackerCommand::Help) => {
            print(&format!("Firecracker v{IMITATED_VERSION}\n\n{}", help()))
        }
        // Clients take the second word of the first line.
        Ok(FirecrackerCommand::Version) => print(&format!("Firecracker v{IMITATED_VERSION}\n")),
        Ok(FirecrackerCommand::SnapshotVersion) => print(&format_version(SNAPSHOT_VERSION)),
        Ok(FirecrackerCommand::DescribeSnapshot(path)) => describe_snapshot(&path),
        Ok(FirecrackerCommand::Serve(args)) => serve(*args),
        Err(fault) => Err(fault),
    };
    done.unwrap_or_else(|fault| report(&fault))
}

fn print(text: &str) -> Result<ExitCode, FirecrackerFault> {
    let printed = writeln!(io::stdout(), "{text}");
    let failed = |e| FirecrackerFault::Driftline(format!("cannot write to standard output: {e}"));
    printed.map(|()| ExitCode::SUCCESS).map_err(failed)
}

/// Returns a version of the snapshots' format in Firecracker's form, which has three numbers.
fn format_version(version: u16) -> String {
    format!("v{version}.0.0")
}

/// Prints the version of the format of a snapshot's state file.
fn describe_snapshot(path: &Path) -> Result<ExitCode, FirecrackerFault> {
    let version = SnapshotState::format_version(path).map_err(|e| {
        FirecrackerFault::PrintSnapshotDataFormat(match e {
            StoreError::Io { cause, .. } => SnapshotVersionFault::OpenSnapshot(cause.to_string()),
            e => SnapshotVersionFault::SnapshotVersion(e.to_string()),
        })
    })?;
    print(&format_version(version))
}

/// Serves the API for a guest that is configured over it.
fn serve(args: FirecrackerArgs) -> Result<ExitCode, FirecrackerFault> {
    let driftline = |e: Failure| FirecrackerFault::Driftline(e.message().to_owned());
    firecracker_log::set_id(&args.id);
    // Also for an end that does not wait for the guest.
    exit::set_end_by_signal(end_by_signal);
    fatal_signals::install(&args.id, FATAL_CODES).map_err(|e| {
        FirecrackerFault::Driftline(format!("Failed to register signal handlers: {e}"))
    })?;
    let opened = firecracker_log::configure(&args.log);
    opened.map_err(|e| FirecrackerFault::LoggerInitialization(e.to_string()))?;
    tracing::info!("Running Firecracker v{IMITATED_VERSION}, imitated by Driftline {}", version());
    let metrics = args.metrics_path.as_ref().map(|path| open_metrics(path)).transpose()?;
    let mut vm = MicroVm::new(args.id.clone(), "Firecracker", args.mmds_limit);
    if let Some(path) = &args.metadata {
        let metadata = read_metadata(path, args.mmds_limit)?;
        vm.set_metadata(metadata).map_err(|e| driftline(e.into()))?;
    }
    let from_file = |fault| match args.no_api {
        false => FirecrackerFault::RunWithApi(ApiServerFault::BuildFromJson(fault)),
        true => {
            let fault = RunWithoutApiFault::BuildMicroVMFromJson(fault);
            FirecrackerFault::RunWithoutApiError(fault)
        }
    };
    let first = args.config_file.as_deref().map(|path| operations(path, from_file)).transpose()?;
    // After all checks of the arguments: the socket stays when the process ends, as Firecracker's
    // does.
    let api = if args.no_api { None } else { Some(bind_api(&args.api_sock)?) };
    let options = ServeOptions {
        id: args.id,
        vm,
        api,
        first: first.unwrap_or_default(),
        seccomp: !args.no_seccomp,
        payload_limit: args.payload_limit,
        has_boot_timer: args.boot_timer,
        metrics,
        start_times: StartTimes {
            wall_us: args.start_time_us,
            cpu_us: args.start_time_cpu_us,
            parent_cpu_us: args.parent_cpu_time_us,
        }
        .prepare(),
    };
    let ServeEnd { result, signal } = serve_api(options);
    if let Some(signal) = signal {
        end_by_signal(signal);
    }
    match result.map_err(driftline)? {
        ServeResult::Ended(code) => Ok(exiting(code)),
        ServeResult::Refused { fault, starts } => {
            let text = config_file_text(&fault);
            Err(from_file(match starts {
                true => BuildFromJsonFault::StartMicroVM(text),
                false => BuildFromJsonFault::ParseFromJson(text),
            }))
        }
    }
}

/// Ends the process by the signal that has asked for it: clients of Firecracker see it killed by
/// that signal, or the exit code for SIGHUP.
fn end_by_signal(signal: i32) -> ! {
    if signal == Signal::HUP.as_raw() {
        let code = hung_up();
        driftline_machine::log::flush();
        std::process::exit(code)
    }
    driftline_machine::log::flush();
    driftline_machine::signals::end_by(signal)
}

/// Listens for the API's clients.
fn bind_api(path: &Path) -> Result<(PathBuf, ListeningSocket), FirecrackerFault> {
    let socket = ListeningSocket::bind_new(path).map_err(|e| match e {
        SocketError::Exists(path) => ApiServerFault::FailedToBindSocket(path.display().to_string()),
        e => ApiServerFault::FailedToBindAndRunHttpServer(e.to_string()),
    })?;
    tracing::info!("Listening on API socket ({path:?}).");
    Ok((path.to_owned(), socket))
}

/// Returns the requests of the file of `--config-file`. Firecracker panics if it cannot read it.
fn operations(
    path: &Path,
    refused: impl FnOnce(BuildFromJsonFault) -> FirecrackerFault,
) -> Result<Vec<Operation>, FirecrackerFault> {
    let json = read_bounded(path, MAX_CONFIG_FILE).map_err(|e| {
        let path = path.display();
        FirecrackerFault::Driftline(format!("the configuration in {path} cannot be read: {e}"))
    })?;
    let operations = config_file_operations(&json, |path| read_bounded(path, MAX_CONFIG_FILE));
    operations.map_err(|e| refused(BuildFromJsonFault::ParseFromJson(e.to_string())))
}

/// Reads the first content of the metadata store, which has at most `limit` bytes; the file may
/// have more, for white space. Firecracker panics if it cannot.
fn read_metadata(path: &Path, limit: usize) -> Result<Value, FirecrackerFault> {
    let failed = |why: String| {
        let path = path.display();
        FirecrackerFault::Driftline(format!("the metadata in {path} cannot be read: {why}"))
    };
    let limit = (limit as u64).saturating_mul(2).max(MAX_CONFIG_FILE);
    let content = read_bounded(path, limit).map_err(|e| failed(e.to_string()))?;
    serde_json::from_slice(&content).map_err(|e| failed(e.to_string()))
}

/// Opens the metrics' file of the arguments.
fn open_metrics(path: &Path) -> Result<MetricsFile, FirecrackerFault> {
    let config = MetricsConfig { metrics_path: path.into(), emit_id: false, properties: None };
    let opened = MetricsFile::open(&config);
    opened.map_err(|e| FirecrackerFault::MetricsInitialization(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_called_by_either_name() {
        let invoked = |line: &[&str]| invoked(line.iter().map(OsString::from));
        assert_eq!(invoked(&["/firecracker", "--id", "a"]), Some(vec!["--id".into(), "a".into()]));
        assert_eq!(invoked(&["firecracker"]), Some(vec![]));
        assert_eq!(invoked(&["driftline", "firecracker", "--help"]), Some(vec!["--help".into()]));
        assert_eq!(invoked(&["driftline", "run", "firecracker"]), None);
        assert_eq!(invoked(&["driftline"]), None);
        assert_eq!(invoked(&["my-firecracker", "x"]), None);
        assert_eq!(invoked(&[]), None);
    }
}
