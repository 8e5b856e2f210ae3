//! Owns the log of this process: its filter, its format and its place, and the sentences for the
//! operator, which share its way to stderr.

use std::env::{self, VarError};
use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, OnceLock};

use driftline_machine::log::{LogOutput, set_outputs};
use serde_json::json;
use tracing::Level;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use super::args::{LogArgs, LogFormat};
use super::failure::Failure;

/// The variable that has the filter where no option does.
const FILTER_VARIABLE: &str = "RUST_LOG";
/// What is logged unless told otherwise.
const DEFAULT_FILTER: &str = "warn";

/// The log of this process, once it is known.
static LOG: OnceLock<Log> = OnceLock::new();

struct Log {
    format: LogFormat,
    stderr: Arc<LogOutput>,
    /// Has the log, and the sentences too, which stderr has in any case.
    file: Option<Arc<LogOutput>>,
}

/// Starts the log as `args` say. Escape sequences are for terminals, unless `NO_COLOR` is set.
pub(super) fn start(args: &LogArgs) -> Result<(), Failure> {
    let filter = filter(args)?;
    let dropped_line = match args.log_format {
        LogFormat::Text => |n| text_line(Level::WARN, &dropped(n)),
        LogFormat::Json => |n| json_line(Level::WARN, &dropped(n)),
    };
    let stderr = LogOutput::new(|line| io::stderr().write_all(line), dropped_line);
    let file = match &args.log_file {
        None => None,
        Some(path) => {
            let file = OpenOptions::new().create(true).append(true).open(path).map_err(|e| {
                Failure::error(format_args!("cannot open --log-file {}: {e}", path.display()))
            })?;
            Some(LogOutput::new(move |line| (&file).write_all(line), dropped_line))
        }
    };
    set_outputs(file.iter().cloned().chain([stderr.clone()]).collect());
    let output = file.clone().unwrap_or_else(|| stderr.clone());
    let no_color = env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    let ansi = file.is_none() && io::stderr().is_terminal() && !no_color;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(ansi);
    let log = log.with_writer(move || OutputWriter(output.clone()));
    match args.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    let _ = LOG.set(Log { format: args.log_format, stderr, file });
    Ok(())
}

/// What `--log` says, else more with each `-v`, else what `RUST_LOG` says, else warnings.
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
            "{from}: '{filter}' is not a log filter ({e}); use one such as debug or driftline_machine=trace,info"
        ))
    })
}

/// A sentence for the operator: on stderr, and in the log's file if there is one.
pub(super) fn sentence(level: Level, words: &str) {
    let plain = || format!("driftline: {words}\n").into_bytes();
    let Some(log) = LOG.get() else {
        // There is nowhere to say that stderr is closed.
        let _ = io::stderr().write_all(&plain());
        return;
    };
    let logged = match log.format {
        LogFormat::Text => text_line(level, words),
        LogFormat::Json => json_line(level, words),
    };
    match (&log.file, log.format) {
        (Some(file), _) => {
            file.line(&logged);
            log.stderr.line(&plain());
        }
        (None, LogFormat::Json) => log.stderr.line(&logged),
        (None, LogFormat::Text) => log.stderr.line(&plain()),
    }
}

fn dropped(lines: u64) -> String {
    format!("{lines} log lines were dropped: what reads the log does not keep up")
}

fn text_line(level: Level, words: &str) -> Vec<u8> {
    format!("{} {level:>5} driftline: {words}\n", now()).into_bytes()
}

fn json_line(level: Level, words: &str) -> Vec<u8> {
    let line = json!({
        "timestamp": now(),
        "level": level.as_str(),
        "fields": { "message": words },
        "target": "driftline",
    });
    format!("{line}\n").into_bytes()
}

/// The time as events have it.
fn now() -> String {
    let mut now = String::new();
    // A line without its time is better than none.
    let _ = SystemTime.format_time(&mut Writer::new(&mut now));
    now
}

/// An output as the subscriber writes to it: each event whole.
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
