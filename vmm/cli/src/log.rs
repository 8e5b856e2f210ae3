//! Owns the log of this process: its filter, format and destination. Also prints the messages for
//! the operator, which use the same output to stderr.
//!
//! A process that serves Firecracker's API has the log of `firecracker_log` as well, or instead.

use std::env::{self, VarError};
use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, OnceLock};

use driftline_machine::log::{LogOutput, set_outputs};
use serde_json::json;
use tracing::{Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, registry};

use super::args::{LogArgs, LogFormat};
use super::colour;
use super::failure::Failure;
use super::firecracker_log::{self, InitialLog, dropped_message};

/// The environment variable with the filter, used if no option gives one.
const FILTER_VARIABLE: &str = "RUST_LOG";
/// The default filter.
const DEFAULT_FILTER: &str = "warn";

/// The log of this process, once it is started.
static LOG: OnceLock<ProcessLog> = OnceLock::new();

enum ProcessLog {
    /// Driftline's.
    Own {
        format: LogFormat,
        stderr: Arc<LogOutput>,
        /// Receives the log, and also the messages, which always go to stderr as well.
        file: Option<Arc<LogOutput>>,
    },
    /// Only the one that a client of Firecracker's API configures.
    Firecracker,
}

/// The logs of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Logs {
    /// Driftline's.
    Own,
    /// Driftline's, and the one that a client of Firecracker's API configures.
    OwnAndClients,
}

/// Starts the log as configured by `args`. Escape sequences are used only on a terminal, and not if
/// `NO_COLOR` is set.
pub(super) fn start(args: &LogArgs, logs: Logs) -> Result<(), Failure> {
    let filter = filter(args)?;
    let dropped_line = match args.log_format {
        LogFormat::Text => |n| text_line(Level::WARN, &dropped_message(n)),
        LogFormat::Json => |n| json_line(Level::WARN, &dropped_message(n)),
    };
    let stderr = LogOutput::new(|line: &[u8]| io::stderr().write_all(line), dropped_line);
    let file = match &args.log_file {
        None => None,
        Some(path) => {
            let file = OpenOptions::new().create(true).append(true).open(path).map_err(|e| {
                Failure::error(format_args!("cannot open --log-file {}: {e}", path.display()))
            })?;
            Some(LogOutput::new(move |line: &[u8]| (&file).write_all(line), dropped_line))
        }
    };
    let output = file.clone().unwrap_or_else(|| stderr.clone());
    let ansi = file.is_none() && io::stderr().is_terminal() && !colour::is_refused();
    let mut outputs: Vec<_> = file.iter().cloned().chain([stderr.clone()]).collect();
    match logs {
        Logs::Own => registry().with(filter).with(layer(output, args.log_format, ansi)).init(),
        Logs::OwnAndClients => {
            let (clients, lines) = firecracker_log::create(InitialLog::Silent);
            outputs.push(clients);
            let own = layer(output, args.log_format, ansi).with_filter(filter);
            registry().with(own).with(lines).init();
        }
    }
    set_outputs(outputs);
    let _ = LOG.set(ProcessLog::Own { format: args.log_format, stderr, file });
    Ok(())
}

/// Starts the log of a process that is called `firecracker`.
pub(super) fn start_as_firecracker() {
    let (output, lines) = firecracker_log::create(InitialLog::Stdout);
    set_outputs(vec![output]);
    registry().with(lines).init();
    let _ = LOG.set(ProcessLog::Firecracker);
}

/// Returns what writes Driftline's log to `output`.
fn layer<S: Subscriber + for<'a> LookupSpan<'a>>(
    output: Arc<LogOutput>,
    format: LogFormat,
    ansi: bool,
) -> Box<dyn Layer<S> + Send + Sync> {
    let layer = fmt::layer().with_ansi(ansi);
    let layer = layer.with_writer(move || OutputWriter(output.clone()));
    match format {
        LogFormat::Text => layer.boxed(),
        LogFormat::Json => layer.json().boxed(),
    }
}

/// Returns the filter: from `--log`, otherwise from the number of `-v`, otherwise from `RUST_LOG`,
/// otherwise warnings.
fn filter(args: &LogArgs) -> Result<EnvFilter, Failure> {
    let (filter, from) = match (&args.log, args.verbose) {
        (Some(filter), _) => (filter.clone(), "--log"),
        (None, 0) => match env::var(FILTER_VARIABLE) {
            Ok(filter) if !filter.is_empty() => (filter, FILTER_VARIABLE),
            Ok(_) | Err(VarError::NotPresent) => (DEFAULT_FILTER.to_owned(), FILTER_VARIABLE),
            Err(e @ VarError::NotUnicode(_)) => {
                return Err(Failure::usage(format_args!("{FILTER_VARIABLE}: {e}")));
            }
        },
        (None, n) => {
            let level = ["info", "debug"].get(usize::from(n) - 1).unwrap_or(&"trace");
            ((*level).to_owned(), "-v")
        }
    };
    EnvFilter::try_new(&filter).map_err(|e| {
        Failure::usage(format_args!(
            "{from}: '{filter}' is not a log filter ({e}); use one such as debug or \
             driftline_machine=trace,info"
        ))
    })
}

/// Prints a message for the operator: on stderr, and in the log file if there is one, or in the log
/// that a client configures if there is no other.
pub(super) fn message(level: Level, message: &str) {
    firecracker_log::message(level, message);
    let plain = || format!("driftline: {message}\n").into_bytes();
    match LOG.get() {
        // If stderr is closed, there is no place to report that.
        None => _ = io::stderr().write_all(&plain()),
        Some(ProcessLog::Firecracker) => {}
        Some(ProcessLog::Own { format, stderr, file }) => {
            let logged = match format {
                LogFormat::Text => text_line(level, message),
                LogFormat::Json => json_line(level, message),
            };
            match (file, format) {
                (Some(file), _) => {
                    file.line(&logged);
                    stderr.line(&plain());
                }
                (None, LogFormat::Json) => stderr.line(&logged),
                (None, LogFormat::Text) => stderr.line(&plain()),
            }
        }
    }
}

fn text_line(level: Level, message: &str) -> Vec<u8> {
    format!("{} {level:>5} driftline: {message}\n", now()).into_bytes()
}

fn json_line(level: Level, message: &str) -> Vec<u8> {
    let line = json!({
        "timestamp": now(),
        "level": level.as_str(),
        "fields": { "message": message },
        "target": "driftline",
    });
    format!("{line}\n").into_bytes()
}

/// Returns the time in the format of log events.
fn now() -> String {
    let mut now = String::new();
    // A line without its time is better than no line.
    let _ = SystemTime.format_time(&mut Writer::new(&mut now));
    now
}

/// An output for the subscriber, which writes each event with one call.
struct OutputWriter(Arc<LogOutput>);

impl Write for OutputWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.line(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
