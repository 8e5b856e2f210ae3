//! Writes Firecracker's metrics: a line when the guest runs, one each minute, on request, and at
//! the end.
//!
//! The lines pass through the queue of a [`LogOutput`], so that a reader that has stopped costs
//! lines and delays nothing.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use driftline_control::firecracker::{
    ApiCounts, ApiFault, FirecrackerMetrics, MetricsConfig, MetricsFault, UnwrittenLines,
};
use driftline_machine::log::LogOutput;
use driftline_machine::log_thread;
use driftline_machine::vm::SharedVm;

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
    /// It cannot be opened.
    pub(crate) fn open(config: &MetricsConfig) -> Result<Self, MetricsFault> {
        let file = LineFile::open(&config.metrics_path).map_err(MetricsFault::File)?;
        let missed = Arc::<AtomicU64>::default();
        let counted = missed.clone();
        let write = move |line: &[u8]| match line.last() {
            Some(b'\n') => {
                file.write_line(line).inspect_err(|_| _ = counted.fetch_add(1, Ordering::Relaxed))
            }
            _ => {
                let dropped = str::from_utf8(line).ok().and_then(|number| number.parse().ok());
                counted.fetch_add(dropped.unwrap_or(0), Ordering::Relaxed);
                Ok(())
            }
        };
        // How many lines found the queue full is counted above, and not written.
        let output = LogOutput::new(write, |lines| lines.to_string().into_bytes());
        Ok(Self { config: config.clone(), output, missed })
    }

    /// Lets a thread write all further lines. Call it once the process is restricted.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start_thread(&self) -> io::Result<()> {
        log_thread::start_for(&self.output)
    }
}

/// Writes the metrics of a guest.
pub(super) struct MetricsWriter {
    file: MetricsFile,
    metrics: FirecrackerMetrics,
    vm: SharedVm,
    next: Instant,
}

impl MetricsWriter {
    /// Creates the metrics of the instance `id` with the guest `vm`, and writes the first line.
    pub(super) fn start(file: MetricsFile, id: &str, calls: Arc<ApiCounts>, vm: SharedVm) -> Self {
        let metrics = FirecrackerMetrics::new(id, &file.config, calls);
        let mut writer = Self { file, metrics, vm, next: Instant::now() + INTERVAL };
        writer.write();
        writer
    }

    /// Returns the time until the next line is due.
    pub(super) fn due_in(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// Writes a line if one is due.
    pub(super) fn write_if_due(&mut self) {
        if self.due_in().is_zero() {
            self.write();
            // A thread that was busy with a request does not make up for lines.
            self.next = Instant::now() + INTERVAL;
        }
    }

    /// Writes a line, and waits until it is written.
    ///
    /// # Errors
    /// The destination does not take it.
    pub(super) fn flush(&mut self) -> Result<(), ApiFault> {
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
        let unwritten =
            UnwrittenLines { log: firecracker_log::missed_lines(), metrics: self.missed() };
        let line = self.metrics.line(&self.vm.info().devices, unwritten);
        self.file.output.line(&line);
    }

    fn missed(&self) -> u64 {
        self.file.missed.load(Ordering::Relaxed)
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
