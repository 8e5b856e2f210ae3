//! Writes Firecracker's metrics: a line when the guest runs, one each minute, on request, and at
//! the end, also by a fatal signal.
//!
//! The lines pass through the queue of a [`LogOutput`], so that a reader that has stopped costs
//! lines and delays nothing.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use driftline_control::firecracker::{
    ApiCounts, ApiFault, FirecrackerMetrics, GuestCounts, MetricsConfig, MetricsFault,
    UnwrittenLines,
};
use driftline_machine::log::{LineSink, LogOutput};
use driftline_machine::metadata::MetadataStore;
use driftline_machine::vm::SharedVm;
use driftline_machine::{last_work, log_thread};
use parking_lot::Mutex;

use crate::firecracker_log;
use crate::line_file::LineFile;

/// Interval of the lines.
const INTERVAL: Duration = Duration::from_secs(60);
/// Limit on waiting until a line is written.
const WRITE_LIMIT: Duration = Duration::from_secs(1);

/// The file or FIFO of the metrics.
pub(crate) struct MetricsFile {
    config: MetricsConfig,
    output: Arc<LogOutput>,
    /// Number of lines that were not written.
    missed: Arc<AtomicU64>,
}

impl MetricsFile {
    /// Opens the destination that `config` names.
    ///
    /// # Errors
    ///
    /// It cannot be opened.
    pub(crate) fn open(config: &MetricsConfig) -> Result<Self, MetricsFault> {
        let file = LineFile::open(&config.metrics_path).map_err(MetricsFault::File)?;
        let missed = Arc::<AtomicU64>::default();
        let sink = MetricsSink { file: Mutex::new(file), missed: missed.clone() };
        // The sink counts the lines that found the queue full. It does not write their number.
        let output = LogOutput::new(sink, |lines| lines.to_string().into_bytes());
        Ok(Self { config: config.clone(), output, missed })
    }

    /// Lets a thread write all further lines. Call it once the process is restricted.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub(super) fn start_thread(&self) -> io::Result<()> {
        log_thread::start_for(&self.output)
    }
}

/// Writes lines, and counts those that are lost.
struct MetricsSink {
    file: Mutex<LineFile>,
    missed: Arc<AtomicU64>,
}

impl LineSink for MetricsSink {
    fn write_line(&self, line: &[u8]) -> io::Result<()> {
        let add = |lines| _ = self.missed.fetch_add(lines, Ordering::Relaxed);
        if line.ends_with(b"\n") {
            return self.file.lock().write_line(line).inspect_err(|_| add(1));
        }
        let dropped = str::from_utf8(line).ok().and_then(|number| number.parse().ok());
        add(dropped.unwrap_or(0));
        Ok(())
    }

    fn finish(&self) -> bool {
        self.file.lock().finish()
    }
}

/// When the lines are due.
#[derive(Debug)]
struct LineSchedule {
    next: Instant,
}

impl LineSchedule {
    fn new(now: Instant) -> Self {
        Self { next: now + INTERVAL }
    }

    fn due_in(&self, now: Instant) -> Duration {
        self.next.saturating_duration_since(now)
    }

    /// Returns whether a line is due, and then schedules the next one. Lines that fell due while
    /// the thread was busy with a request are not made up for.
    fn take_due(&mut self, now: Instant) -> bool {
        let is_due = now >= self.next;
        if is_due {
            *self = Self::new(now);
        }
        is_due
    }
}

/// Makes the lines of a guest's metrics.
struct GuestLines {
    file: MetricsFile,
    metrics: FirecrackerMetrics,
    vm: SharedVm,
}

impl GuestLines {
    /// Writes a line, and waits until it is written to its end.
    fn flush(&mut self) -> Result<(), ApiFault> {
        let missed = self.missed();
        self.write();
        let is_written = self.file.output.flush(WRITE_LIMIT);
        match is_written && self.missed() == missed {
            true => Ok(()),
            false => Err(ApiFault::Guest(
                "Metrics error: Failed to write metrics: their file or FIFO does not take them"
                    .to_owned(),
            )),
        }
    }

    fn write(&mut self) {
        let unwritten = UnwrittenLines {
            log: firecracker_log::missed_lines(),
            suppressed: firecracker_log::suppressed_lines(),
            metrics: self.missed(),
        };
        let guest = GuestCounts {
            devices: self.vm.info().devices,
            balloon: self.vm.balloon().map(|balloon| balloon.stats().counts),
            machine: self.vm.counts(),
        };
        let line = self.metrics.line(&guest, unwritten);
        self.file.output.line(&line);
    }

    fn missed(&self) -> u64 {
        self.file.missed.load(Ordering::Relaxed)
    }
}

/// Writes the metrics of a guest.
pub(super) struct MetricsWriter {
    lines: Arc<Mutex<GuestLines>>,
    schedule: LineSchedule,
}

impl MetricsWriter {
    /// Creates the metrics of the instance `id` with the guest `vm`, which reads `metadata`, and
    /// writes the first line. A thread writes another one if a signal ends the process.
    pub(super) fn start(
        file: MetricsFile,
        id: &str,
        calls: Arc<ApiCounts>,
        metadata: MetadataStore,
        vm: SharedVm,
    ) -> Self {
        let metrics = FirecrackerMetrics::new(id, &file.config, calls, metadata);
        let schedule = LineSchedule::new(Instant::now());
        let mut lines = GuestLines { file, metrics, vm };
        lines.write();
        let lines = Arc::new(Mutex::new(lines));
        // Weak, because the last line is written when the guest ends, and a signal adds none then.
        let shared = Arc::downgrade(&lines);
        let started = last_work::start(move |signal| {
            if let Some(lines) = shared.upgrade() {
                let mut lines = lines.lock();
                lines.metrics.set_fatal_signal(signal);
                // If the line is not written, the handler does not wait any longer.
                let _ = lines.flush();
            }
        });
        if let Err(e) = started {
            tracing::warn!("no metrics are written if a signal ends the process: {e}");
        }
        Self { lines, schedule }
    }

    /// Returns the time until the next line is due.
    pub(super) fn due_in(&self) -> Duration {
        self.schedule.due_in(Instant::now())
    }

    /// Writes a line if one is due.
    pub(super) fn write_if_due(&mut self) {
        if self.schedule.take_due(Instant::now()) {
            self.lines.lock().write();
        }
    }

    /// Writes a line, and waits until it is written to its end.
    ///
    /// # Errors
    ///
    /// The destination does not take it.
    pub(super) fn flush(&mut self) -> Result<(), ApiFault> {
        self.lines.lock().flush()
    }
}

impl Drop for MetricsWriter {
    /// Writes the last line.
    fn drop(&mut self) {
        if let Err(e) = self.flush() {
            tracing::error!("Failed to write metrics while stopping: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_due_each_minute() {
        let start = Instant::now();
        let mut schedule = LineSchedule::new(start);
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(schedule.due_in(at(10)), Duration::from_secs(50));
        assert!(!schedule.take_due(at(59)));
        assert!(schedule.take_due(at(60)));
        assert!(!schedule.take_due(at(60)));
        // Two lines were missed, and one is written.
        assert_eq!(schedule.due_in(at(500)), Duration::ZERO);
        assert!(schedule.take_due(at(500)));
        assert_eq!(schedule.due_in(at(500)), Duration::from_secs(60));
    }
}
