//! The log that a client of Firecracker's API configures: its lines, its filter and its
//! destination.
//!
//! ```text
//! 2026-11-24T18:19:40.123456789 [web-1:main:INFO:src/serve/mod.rs:104] API socket /run/fc.sock
//! ```
//!
//! A process named `firecracker` has no other log, and writes it to stdout until it is told a file.
//! In `driftline serve` this log is silent until `PUT /logger`. The lines pass through the queue of
//! a [`LogOutput`], so that a reader that has stopped does not stop the threads that log. A FIFO is
//! opened and written without waiting: lines that it does not take are dropped and counted
//! ([`LineFile`]).

use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::thread;
use std::time::SystemTime;

use driftline_control::firecracker::{LoggerConfig, LoggerLevel};
use driftline_machine::log::LogOutput;
use driftline_machine::{fatal_signals, local_time_ns};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter, Layer};

use super::line_file::LineFile;

/// The id of an instance that has no other.
pub(super) const DEFAULT_ID: &str = "anonymous-instance";

/// The log of this process, once it is created.
static LOG: OnceLock<FirecrackerLog> = OnceLock::new();

/// What a process writes before a client configures the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InitialLog {
    /// Nothing.
    Silent,
    /// Lines from this level on, to stdout.
    Stdout,
}

struct FirecrackerLog {
    /// Id of the instance, once it is known.
    id: OnceLock<String>,
    settings: RwLock<LogSettings>,
    target: Arc<LogTarget>,
    output: Arc<LogOutput>,
}

/// What is logged, and in which form.
#[derive(PartialEq, Eq, Debug)]
struct LogSettings {
    level: LevelFilter,
    /// Beginning of the paths of the modules that log.
    module: Option<String>,
    has_level: bool,
    has_origin: bool,
}

/// Where the lines go.
struct LogTarget {
    /// `None` for stdout.
    file: Mutex<Option<Arc<LineFile>>>,
    /// Number of lines that could not be written.
    missed: AtomicU64,
}

impl LogTarget {
    /// Writes a line. It may wait for a regular file or for stdout. Meanwhile it holds no lock that
    /// a thread which changes the target needs.
    fn write(&self, line: &[u8]) -> io::Result<()> {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let written = match file {
            Some(file) => file.write_line(line),
            None => io::stdout().write_all(line),
        };
        written.inspect_err(|_| _ = self.missed.fetch_add(1, Ordering::Relaxed))
    }
}

impl LogSettings {
    fn admits(&self, level: Level, module: Option<&str>) -> bool {
        let is_of_module = match (&self.module, module) {
            (Some(prefix), Some(module)) => module.starts_with(prefix.as_str()),
            (Some(_), None) => false,
            (None, _) => true,
        };
        level <= self.level && is_of_module
    }

    /// Changes what `config` names. An absent level is the default one, as in Firecracker.
    fn change(&mut self, config: &LoggerConfig) {
        self.level = config.level.map_or(LevelFilter::INFO, filter_of);
        self.has_level = config.show_level.unwrap_or(self.has_level);
        self.has_origin = config.show_log_origin.unwrap_or(self.has_origin);
        if let Some(module) = &config.module {
            self.module = Some(module.clone());
        }
    }

    /// Returns a line with its end.
    fn line(&self, time: SystemTime, id: &str, origin: &LineOrigin<'_>, message: &str) -> String {
        let thread = thread::current();
        let thread = thread.name().unwrap_or("-");
        let mut line = format!("{} [{id}:{thread}", local_time_ns(time));
        // Writing to a string does not fail.
        if self.has_level {
            let _ = write!(line, ":{}", origin.level);
        }
        if self.has_origin {
            let number = origin.line.map_or_else(|| "?".to_owned(), |line| line.to_string());
            let _ = write!(line, ":{}:{number}", origin.file.unwrap_or("?"));
        }
        line.push_str("] ");
        for c in message.chars() {
            match c {
                '\n' | '\t' => line.push(c),
                // A control sequence must not reach a terminal that shows the log.
                c if c.is_control() => line.extend(c.escape_default()),
                c => line.push(c),
            }
        }
        line.push('\n');
        line
    }
}

/// Where a line comes from.
struct LineOrigin<'a> {
    level: Level,
    file: Option<&'a str>,
    line: Option<u32>,
}

fn filter_of(level: LoggerLevel) -> LevelFilter {
    match level {
        LoggerLevel::Off => LevelFilter::OFF,
        LoggerLevel::Error => LevelFilter::ERROR,
        LoggerLevel::Warn => LevelFilter::WARN,
        LoggerLevel::Info => LevelFilter::INFO,
        LoggerLevel::Debug => LevelFilter::DEBUG,
        LoggerLevel::Trace => LevelFilter::TRACE,
    }
}

impl FirecrackerLog {
    fn new(initial: InitialLog) -> Self {
        let target = Arc::new(LogTarget { file: Mutex::default(), missed: AtomicU64::new(0) });
        let written = target.clone();
        let output = LogOutput::new(move |line| written.write(line), dropped_line);
        let level = match initial {
            InitialLog::Silent => LevelFilter::OFF,
            InitialLog::Stdout => LevelFilter::INFO,
        };
        let settings = LogSettings { level, module: None, has_level: false, has_origin: false };
        Self { id: OnceLock::new(), settings: RwLock::new(settings), target, output }
    }

    fn read<T>(&self, what: impl FnOnce(&LogSettings) -> T) -> T {
        what(&self.settings.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write_line(&self, origin: &LineOrigin<'_>, message: &str) {
        let id = self.id.get().map_or(DEFAULT_ID, String::as_str);
        let line = self.read(|settings| settings.line(SystemTime::now(), id, origin, message));
        self.output.line(line.as_bytes());
    }
}

/// Returns the line that reports lines which found the queue full.
fn dropped_line(lines: u64) -> Vec<u8> {
    if let Some(log) = LOG.get() {
        log.target.missed.fetch_add(lines, Ordering::Relaxed);
    }
    let why = format!("{lines} log lines were dropped: what reads the log does not keep up");
    let settings =
        LogSettings { level: LevelFilter::WARN, module: None, has_level: false, has_origin: false };
    let id = LOG.get().and_then(|log| log.id.get()).map_or(DEFAULT_ID, String::as_str);
    let origin = LineOrigin { level: Level::WARN, file: None, line: None };
    settings.line(SystemTime::now(), id, &origin, &why).into_bytes()
}

/// Creates the log. Returns its output, and its part of the subscriber of all events. Only the
/// first call takes effect.
pub(super) fn create<S>(initial: InitialLog) -> (Arc<LogOutput>, impl Layer<S> + Send + Sync)
where
    S: Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    // The C library reads the time zone's file now: most threads may not open files later.
    let _ = local_time_ns(SystemTime::now());
    let log = LOG.get_or_init(|| FirecrackerLog::new(initial));
    (log.output.clone(), LineLayer(log).with_filter(LineFilter(log)))
}

/// Names the instance in all further lines. Only the first call takes effect.
pub(super) fn set_id(id: &str) {
    if let Some(log) = LOG.get() {
        let _ = log.id.set(id.to_owned());
    }
}

/// Changes the log as `PUT /logger` does.
///
/// # Errors
///
/// The file cannot be opened. Nothing changes then.
pub(super) fn configure(config: &LoggerConfig) -> io::Result<()> {
    let Some(log) = LOG.get() else { return Ok(()) };
    let file = config.log_path.as_deref().map(LineFile::open).transpose()?;
    let mut settings = log.settings.write().unwrap_or_else(PoisonError::into_inner);
    settings.change(config);
    let is_off = settings.level == LevelFilter::OFF;
    drop(settings);
    if let Some(file) = file {
        *log.target.file.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(file));
    }
    tracing::callsite::rebuild_interest_cache();
    // A signal's handler cannot use the queue.
    let file = log.target.file.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let stdout = io::stdout();
    let last = file.as_ref().map_or_else(|| stdout.as_fd(), |file| file.as_fd());
    fatal_signals::log_to((!is_off).then_some(last))
}

/// Writes a message for the operator, if its level is logged.
pub(super) fn message(level: Level, text: &str) {
    if let Some(log) = LOG.get()
        && log.read(|settings| settings.admits(level, Some(module_path!())))
    {
        log.write_line(&LineOrigin { level, file: Some(file!()), line: Some(line!()) }, text);
    }
}

/// Returns the number of lines that were not written so far.
pub(super) fn missed_lines() -> u64 {
    LOG.get().map_or(0, |log| log.target.missed.load(Ordering::Relaxed))
}

/// Decides which events become lines.
struct LineFilter(&'static FirecrackerLog);

impl<S: Subscriber> Filter<S> for LineFilter {
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        let (level, module) = (*metadata.level(), metadata.module_path());
        metadata.is_event() && self.0.read(|settings| settings.admits(level, module))
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.0.read(|settings| settings.level))
    }
}

/// Turns events into lines.
struct LineLayer(&'static FirecrackerLog);

impl<S: Subscriber> Layer<S> for LineLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let mut text = EventText::default();
        event.record(&mut text);
        let EventText { mut message, fields } = text;
        message.push_str(&fields);
        let (level, file, line) = (*metadata.level(), metadata.file(), metadata.line());
        self.0.write_line(&LineOrigin { level, file, line }, &message);
    }
}

/// The text of an event.
#[derive(Default)]
struct EventText {
    message: String,
    /// The other fields, each after a space.
    fields: String,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    fn config(json: &str) -> LoggerConfig {
        serde_json::from_str(json).unwrap()
    }

    fn silent() -> LogSettings {
        LogSettings { level: LevelFilter::OFF, module: None, has_level: false, has_origin: false }
    }

    #[test]
    fn line_has_firecrackers_form() {
        let time = UNIX_EPOCH + Duration::new(1_790_000_000, 5);
        let origin = LineOrigin { level: Level::WARN, file: Some("src/a.rs"), line: Some(7) };
        let own = thread::current().name().unwrap().to_owned();
        let at = local_time_ns(time);
        for (json, head) in [
            ("{}", format!("{at} [web-1:{own}] ")),
            (r#"{"show_level": true}"#, format!("{at} [web-1:{own}:WARN] ")),
            (r#"{"show_log_origin": true}"#, format!("{at} [web-1:{own}:src/a.rs:7] ")),
            (
                r#"{"show_level": true, "show_log_origin": true}"#,
                format!("{at} [web-1:{own}:WARN:src/a.rs:7] "),
            ),
        ] {
            let mut settings = silent();
            settings.change(&config(json));
            let line = settings.line(time, "web-1", &origin, "a\x1b[2J\nb");
            assert_eq!(line, format!("{head}a\\u{{1b}}[2J\nb\n"), "{json}");
        }
    }

    #[test]
    fn absent_level_is_info_and_others_stay() {
        let mut settings = silent();
        let all = r#"{"level": "Debug", "module": "a::b", "show_level": true}"#;
        settings.change(&config(all));
        settings.change(&config("{}"));
        let module = Some("a::b".to_owned());
        let level = LevelFilter::INFO;
        assert_eq!(settings, LogSettings { level, module, has_level: true, has_origin: false });
        assert!(settings.admits(Level::INFO, Some("a::b::c")));
        assert!(!settings.admits(Level::INFO, Some("a::c")));
        assert!(!settings.admits(Level::INFO, None));
        assert!(!settings.admits(Level::DEBUG, Some("a::b")));
        settings.change(&config(r#"{"level": "OFF"}"#));
        assert!(!settings.admits(Level::ERROR, Some("a::b")));
    }

    #[test]
    fn event_has_its_fields_after_the_message() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        // Its own log: that of the process is not created in tests.
        let log: &'static FirecrackerLog =
            Box::leak(Box::new(FirecrackerLog::new(InitialLog::Silent)));
        *log.target.file.lock().unwrap() = Some(Arc::new(LineFile::open(&path).unwrap()));
        log.settings.write().unwrap().change(&config(r#"{"level": "Trace"}"#));
        let layer = LineLayer(log).with_filter(LineFilter(log));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::trace!(bytes = 5, path = %"/a", "it is written");
        });
        let lines = std::fs::read_to_string(&path).unwrap();
        assert!(lines.starts_with("2") && lines.contains(" [anonymous-instance:"), "{lines}");
        assert!(lines.ends_with("] it is written bytes=5 path=/a\n"), "{lines}");
    }
}
