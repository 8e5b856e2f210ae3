//! The log that a client of Firecracker's API configures: its lines, its filter and its
//! destination.
//!
//! ```text
//! 2026-11-24T18:19:40.123456789 [web-1:main:INFO:src/serve/mod.rs:104] API socket /run/fc.sock
//! ```
//!
//! A process named `firecracker` has no other log, and writes it to stdout until a file is set.
//! In `driftline serve` this log is silent until `PUT /logger`. The lines pass through the queue of
//! a [`LogOutput`], so that a reader that has stopped does not stop the threads that log. A FIFO is
//! opened and written without waiting: lines that it does not take are dropped and counted
//! ([`LineFile`]). So are lines that a guest causes, if there are too many ([`call_sites`]).

mod call_sites;
mod target;

use std::fmt::{self, Write as _};
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use driftline_control::firecracker::{LoggerConfig, LoggerLevel};
use driftline_machine::log::{LineSink, LogOutput};
use driftline_machine::{fatal_signals, local_time_ns};
use parking_lot::RwLock;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter, Layer};

use super::line_file::LineFile;
use super::values::DEFAULT_ID;
use call_sites::{CallSiteLimits, LineAdmission};
use target::LogTarget;

/// The target of events whose text has several lines, which are the program's own. The line feeds
/// of all others are escaped: a text of a client must not look like a line.
pub(super) const SEVERAL_LINES: &str = "driftline::several_lines";

/// Limit on waiting until queued lines are written to the file that a client replaces.
const REPLACE_LIMIT: Duration = Duration::from_secs(1);

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
    limits: CallSiteLimits,
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
                '\t' => line.push(c),
                '\n' if origin.has_several_lines => line.push(c),
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
    /// Whether line feeds stay.
    has_several_lines: bool,
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
        let target = Arc::new(LogTarget::stdout());
        let output = LogOutput::new(SharedTarget(target.clone()), dropped_line);
        let level = match initial {
            InitialLog::Silent => LevelFilter::OFF,
            InitialLog::Stdout => LevelFilter::INFO,
        };
        let settings = LogSettings { level, module: None, has_level: false, has_origin: false };
        let (id, limits) = (OnceLock::new(), CallSiteLimits::default());
        Self { id, settings: RwLock::new(settings), target, output, limits }
    }

    fn read<T>(&self, what: impl FnOnce(&LogSettings) -> T) -> T {
        what(&self.settings.read())
    }

    fn write_line(&self, origin: &LineOrigin<'_>, message: &str) {
        let id = self.id.get().map_or(DEFAULT_ID, String::as_str);
        let line = self.read(|settings| settings.line(SystemTime::now(), id, origin, message));
        self.output.line(line.as_bytes());
    }
}

/// Returns the message about lines which were dropped because the queue was full.
pub(super) fn dropped_message(lines: u64) -> String {
    format!("{lines} log lines were dropped: the reader of the log does not keep up")
}

/// Returns the line that reports lines which were dropped because the queue was full.
fn dropped_line(lines: u64) -> Vec<u8> {
    if let Some(log) = LOG.get() {
        log.target.add_missed(lines);
    }
    let why = dropped_message(lines);
    let settings =
        LogSettings { level: LevelFilter::WARN, module: None, has_level: false, has_origin: false };
    let id = LOG.get().and_then(|log| log.id.get()).map_or(DEFAULT_ID, String::as_str);
    let origin = own_origin(Level::WARN);
    settings.line(SystemTime::now(), id, &origin, &why).into_bytes()
}

/// Returns the origin of a line that no event causes.
fn own_origin(level: Level) -> LineOrigin<'static> {
    LineOrigin { level, file: Some(file!()), line: Some(line!()), has_several_lines: false }
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

/// Changes the log as `PUT /logger` does. Queued lines are written to the old file first, for at
/// most a second: its reader may have stopped.
///
/// # Errors
///
/// The file cannot be opened, or there are too many descriptors. Nothing changes then.
pub(super) fn configure(config: &LoggerConfig) -> io::Result<()> {
    let Some(log) = LOG.get() else { return Ok(()) };
    let file = config.log_path.as_deref().map(LineFile::open).transpose()?;
    if let Some(file) = &file {
        // A signal's handler cannot use the queue.
        fatal_signals::log_to(file.as_fd())?;
    }
    let mut settings = log.settings.write();
    settings.change(config);
    fatal_signals::set_logged(settings.level != LevelFilter::OFF);
    drop(settings);
    if let Some(file) = file {
        log.output.flush(REPLACE_LIMIT);
        log.target.replace(file);
    }
    tracing::callsite::rebuild_interest_cache();
    Ok(())
}

/// Writes a message for the operator, if its level is logged.
pub(super) fn message(level: Level, text: &str) {
    if let Some(log) = LOG.get()
        && log.read(|settings| settings.admits(level, Some(module_path!())))
    {
        log.write_line(&own_origin(level), text);
    }
}

/// Returns the number of lines that were not written so far.
pub(super) fn missed_lines() -> u64 {
    LOG.get().map_or(0, |log| log.target.missed())
}

/// Returns the number of lines of a guest that exceeded the limit so far.
pub(super) fn suppressed_lines() -> u64 {
    LOG.get().map_or(0, |log| log.limits.suppressed())
}

/// The destination of the lines, shared with [`configure`].
struct SharedTarget(Arc<LogTarget>);

impl LineSink for SharedTarget {
    fn write_line(&self, line: &[u8]) -> io::Result<()> {
        self.0.write_line(line)
    }

    fn finish(&self) -> bool {
        self.0.finish()
    }
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
        match self.0.limits.admit(metadata, Instant::now()) {
            LineAdmission::Suppressed => return,
            LineAdmission::Logged { suppressed: 0 } => {}
            LineAdmission::Logged { suppressed } => {
                let text = format!("{suppressed} messages were suppressed due to rate limiting");
                self.0.write_line(&own_origin(Level::WARN), &text);
            }
        }
        let mut text = EventText::default();
        event.record(&mut text);
        let EventText { mut message, fields } = text;
        message.push_str(&fields);
        let origin = LineOrigin {
            level: *metadata.level(),
            file: metadata.file(),
            line: metadata.line(),
            has_several_lines: metadata.target() == SEVERAL_LINES,
        };
        self.0.write_line(&origin, &message);
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
    use std::time::UNIX_EPOCH;

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
        let mut origin = LineOrigin {
            level: Level::WARN,
            file: Some("src/a.rs"),
            line: Some(7),
            has_several_lines: false,
        };
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
            assert_eq!(line, format!("{head}a\\u{{1b}}[2J\\nb\n"), "{json}");
        }
        origin.has_several_lines = true;
        let line = silent().line(time, "web-1", &origin, "a\r\n\tb");
        assert_eq!(line, format!("{at} [web-1:{own}] a\\r\n\tb\n"));
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

    /// Returns the lines that events cause in a log of their own: that of the process is not
    /// created in tests.
    fn lines_of(events: impl FnOnce(&FirecrackerLog)) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log: &'static FirecrackerLog =
            Box::leak(Box::new(FirecrackerLog::new(InitialLog::Silent)));
        log.target.replace(LineFile::open(&path).unwrap());
        log.settings.write().change(&config(r#"{"level": "Trace"}"#));
        let layer = LineLayer(log).with_filter(LineFilter(log));
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || events(log));
        std::fs::read_to_string(&path).unwrap()
    }

    #[test]
    fn event_has_its_fields_after_the_message() {
        let lines = lines_of(|_| {
            tracing::trace!(bytes = 5, path = %"/a\n/b", "it is written");
            tracing::error!(target: SEVERAL_LINES, "a\nb");
        });
        let (first, second) = lines.split_once('\n').unwrap();
        assert!(first.starts_with('2') && first.contains(" [anonymous-instance:"), "{lines}");
        assert!(first.ends_with("] it is written bytes=5 path=/a\\n/b"), "{lines}");
        assert!(second.ends_with("] a\nb\n"), "{lines}");
    }

    #[test]
    fn lines_that_a_guest_causes_are_limited() {
        let lines = lines_of(|log| {
            for n in 0..25 {
                tracing::debug!(target: "driftline_machine::devices::net", "frame {n}");
                tracing::debug!(target: "driftline_machine::vcpu", "exit {n}");
                tracing::debug!("own {n}");
            }
            assert_eq!(log.limits.suppressed(), 2 * 15);
        });
        for (text, count) in [("] frame ", 10), ("] exit ", 10), ("] own ", 25)] {
            assert_eq!(lines.matches(text).count(), count, "{text}: {lines}");
        }
    }
}
