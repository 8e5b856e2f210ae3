//! The program as `firecracker`: its arguments, exit codes and messages are Firecracker's.

mod args;
mod fault;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use driftline_control::firecracker::{
    IMITATED_VERSION, MetricsConfig, MicroVm, config_file_operations, config_file_text,
};
use driftline_machine::socket::{ListeningSocket, SocketError};
use driftline_machine::{exit, fatal_signals};
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

use super::failure::Failure;
use super::serve::{MetricsFile, ServeEnd, ServeOptions, ServeResult, serve_api};
use super::version::version;
use super::{firecracker_log, log};
use args::{FirecrackerArgs, FirecrackerCommand, help, parse};
use fault::{ApiServerFault, BuildFromJsonFault, FATAL_CODES, FirecrackerFault, hung_up, report};

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
    let start_up_us = start_up_us(&args);
    let metrics = args.metrics_path.as_ref().map(|path| open_metrics(path)).transpose()?;
    let mut vm = MicroVm::new(args.id.clone(), "Firecracker", args.mmds_limit);
    if let Some(path) = &args.metadata {
        vm.set_metadata(read_metadata(path)?).map_err(|e| driftline(e.into()))?;
    }
    let file = args.config_file.as_deref().map(read_config_file).transpose()?;
    // After all checks of the arguments: the socket stays behind, as Firecracker's does.
    let api = if args.no_api { None } else { Some(bind_api(&args.api_sock)?) };
    let has_api = api.is_some();
    let from_file = |fault| match has_api {
        true => FirecrackerFault::RunWithApi(ApiServerFault::BuildFromJson(fault)),
        false => FirecrackerFault::RunWithoutApi(fault),
    };
    let first = match &file {
        None => Vec::new(),
        Some(json) => config_file_operations(json)
            .map_err(|e| from_file(BuildFromJsonFault::ParseFromJson(e.to_string())))?,
    };
    let options = ServeOptions {
        id: args.id,
        vm,
        api,
        first,
        seccomp: !args.no_seccomp,
        payload_limit: args.payload_limit,
        has_boot_timer: args.boot_timer,
        metrics,
        start_up_us,
    };
    let ServeEnd { result, signal } = serve_api(options);
    match signal {
        None => {
            let code = match result.map_err(driftline)? {
                ServeResult::Ended(code) => code,
                ServeResult::Refused { fault, starts } => {
                    let text = config_file_text(&fault);
                    return Err(from_file(match starts {
                        true => BuildFromJsonFault::StartMicroVM(text),
                        false => BuildFromJsonFault::ParseFromJson(text),
                    }));
                }
            };
            tracing::info!("Firecracker exiting successfully. exit_code=0");
            Ok(code)
        }
        Some(signal) => end_by_signal(signal),
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

/// Reads the file of `--config-file`. Firecracker panics if it cannot.
fn read_config_file(path: &Path) -> Result<Vec<u8>, FirecrackerFault> {
    fs::read(path).map_err(|e| {
        let path = path.display();
        FirecrackerFault::Driftline(format!("the configuration in {path} cannot be read: {e}"))
    })
}

/// Reads the first content of the metadata store. Firecracker panics if it cannot.
fn read_metadata(path: &Path) -> Result<Value, FirecrackerFault> {
    let failed = |why: String| {
        let path = path.display();
        FirecrackerFault::Driftline(format!("the metadata in {path} cannot be read: {why}"))
    };
    let content = fs::read(path).map_err(|e| failed(e.to_string()))?;
    serde_json::from_slice(&content).map_err(|e| failed(e.to_string()))
}

/// Opens the metrics' file of the arguments.
fn open_metrics(path: &Path) -> Result<MetricsFile, FirecrackerFault> {
    let config = MetricsConfig { metrics_path: path.into(), emit_id: false, properties: None };
    let opened = MetricsFile::open(&config);
    opened.map_err(|e| FirecrackerFault::MetricsInitialization(e.to_string()))
}

/// Returns how long the start-up took since the times that the starter measured, in microseconds:
/// wall-clock time and processor time. Logs both.
fn start_up_us(args: &FirecrackerArgs) -> (Option<u64>, Option<u64>) {
    let now_us = |clock| {
        let now = clock_gettime(clock);
        u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000
            + u64::try_from(now.tv_nsec).unwrap_or(0) / 1000
    };
    let wall_us = args.start_time_us.map(|start| {
        let us = now_us(ClockId::Monotonic).saturating_sub(start);
        tracing::info!("start-up took {us} us");
        us
    });
    let cpu_us = args.start_time_cpu_us.map(|start| {
        let own_us = now_us(ClockId::ProcessCPUTime).saturating_sub(start);
        let us = own_us.saturating_add(args.parent_cpu_time_us.unwrap_or(0));
        tracing::info!("start-up took {us} us of processor time");
        us
    });
    (wall_us, cpu_us)
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
