//! Why the process ends with an error, the report of it, and Firecracker's exit codes.

use std::io::{self, Write};
use std::process::ExitCode;

use driftline_machine::fatal_signals::FatalCodes;
use rustix::process::Signal;

use crate::firecracker_log::SEVERAL_LINES;

/// The exit codes that differ from those of `driftline`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum FirecrackerExit {
    Generic = 1,
    /// A thread has made a forbidden system call.
    BadSyscall = 148,
    SigBus = 149,
    SigSegv = 150,
    SigXfsz = 151,
    /// The value of an argument that configures the process is wrong.
    BadConfiguration = 152,
    Arguments = 153,
    SigXcpu = 154,
    /// The process was ended by SIGHUP.
    HangUp = 156,
    SigIll = 157,
}

/// Why the process ends with an error. `Debug` is part of the report, so the names are
/// Firecracker's.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum FirecrackerFault {
    #[error("Arguments parsing error: {0} \n\nFor more information try --help.")]
    ParseArguments(#[from] ArgumentFault),
    #[error("Invalid value for logger level: {0}.Possible values: [Error, Warning, Info, Debug]")]
    InvalidLogLevel(LevelFilterFromStrError),
    #[error("When printing Snapshot Data format: {0}")]
    PrintSnapshotDataFormat(SnapshotVersionFault),
    #[error("Could not initialize logger: Failed to open target file: {0}")]
    LoggerInitialization(String),
    #[error(
        "Could not initialize metrics: Cannot initialize the metrics system due to bad user input: \
         {0}"
    )]
    MetricsInitialization(String),
    #[error("RunWithApiError error: {0}")]
    RunWithApi(#[from] ApiServerFault),
    #[error("RunWithoutApiError error: {0}")]
    RunWithoutApiError(RunWithoutApiFault),
    /// A part of Driftline failed that Firecracker does not have.
    #[error("{0}")]
    Driftline(String),
}

/// The text of `--level` is not the name of a level.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
#[error("Failed to parse string to level filter: {0}")]
pub(super) struct LevelFilterFromStrError(pub(super) String);

/// Why the version of a snapshot's state file cannot be printed.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum SnapshotVersionFault {
    #[error("Unable to open snapshot state file: {0}")]
    OpenSnapshot(String),
    #[error("Invalid data format version of snapshot file: {0}")]
    SnapshotVersion(String),
}

/// What is wrong with the arguments.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum ArgumentFault {
    #[error("Argument '{1}' cannot be used together with argument '{0}'.")]
    ForbiddenArgument(&'static str, &'static str),
    #[error("Argument '{0}' required, but not found.")]
    MissingArgument(&'static str),
    #[error("The argument '{0}' requires a value, but none was supplied.")]
    MissingValue(&'static str),
    #[error("Found argument '{0}' which wasn't expected, or isn't valid in this context.")]
    UnexpectedArgument(String),
    #[error("The argument '{0}' was provided more than once.")]
    DuplicateArgument(&'static str),
    /// Firecracker panics.
    #[error("{0}")]
    InvalidValue(String),
    /// Firecracker honours the argument.
    #[error("The argument '{0}' is not honoured: {1}.")]
    RefusedArgument(&'static str, &'static str),
}

/// Why the API cannot be served.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum ApiServerFault {
    #[error("Failed to open the API socket at: {0}. Check that it is not already used.")]
    FailedToBindSocket(String),
    #[error("Failed to bind and run the HTTP server: {0}")]
    FailedToBindAndRunHttpServer(String),
    #[error("Failed to build MicroVM from Json: {0}")]
    BuildFromJson(BuildFromJsonFault),
}

/// Why a process without an API has no guest.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum RunWithoutApiFault {
    #[error("Failed to build MicroVM from Json: {0}")]
    BuildMicroVMFromJson(BuildFromJsonFault),
}

/// Why the guest of a configuration file does not run.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum BuildFromJsonFault {
    #[error("Configuration for VMM from one single json failed: {0}")]
    ParseFromJson(String),
    #[error("Could not Start MicroVM from one single json: {0}")]
    StartMicroVM(String),
}

impl FirecrackerFault {
    fn exit(&self) -> FirecrackerExit {
        match self {
            Self::ParseArguments(_) => FirecrackerExit::Arguments,
            Self::InvalidLogLevel(_) => FirecrackerExit::BadConfiguration,
            Self::LoggerInitialization(_)
            | Self::MetricsInitialization(_)
            | Self::PrintSnapshotDataFormat(_)
            | Self::RunWithApi(_)
            | Self::RunWithoutApiError(_)
            | Self::Driftline(_) => FirecrackerExit::Generic,
        }
    }
}

/// The exit codes of the signals that end the process immediately.
pub(super) static FATAL_CODES: FatalCodes = &[
    (Signal::SYS.as_raw(), FirecrackerExit::BadSyscall as u8),
    (Signal::BUS.as_raw(), FirecrackerExit::SigBus as u8),
    (Signal::SEGV.as_raw(), FirecrackerExit::SigSegv as u8),
    (Signal::XFSZ.as_raw(), FirecrackerExit::SigXfsz as u8),
    (Signal::XCPU.as_raw(), FirecrackerExit::SigXcpu as u8),
    (Signal::ILL.as_raw(), FirecrackerExit::SigIll as u8),
];

/// Reports the end by SIGHUP as Firecracker does. Returns the exit code.
pub(super) fn hung_up() -> i32 {
    // 0 is the code of a signal that a process sends.
    tracing::error!("Shutting down VM after intercepting signal 1, code 0.");
    (FirecrackerExit::HangUp as u8).into()
}

/// Reports a fault as Firecracker does: in the log, and its value on stderr. Returns the exit code.
pub(super) fn report(fault: &FirecrackerFault) -> ExitCode {
    match fault {
        // Firecracker's text has three lines.
        FirecrackerFault::ParseArguments(_) => {
            tracing::error!(target: SEVERAL_LINES, "{fault}");
        }
        _ => tracing::error!("{fault}"),
    }
    // If stderr is closed, the exit code still reports the failure.
    let _ = writeln!(io::stderr(), "Error: {fault:?}");
    exiting(fault.exit() as u8)
}

/// Logs the end of the process with an exit code, and returns it.
pub(super) fn exiting(code: u8) -> ExitCode {
    match code {
        0 => tracing::info!("Firecracker exiting successfully. exit_code=0"),
        code => tracing::error!("Firecracker exiting with error. exit_code={code}"),
    }
    ExitCode::from(code)
}
