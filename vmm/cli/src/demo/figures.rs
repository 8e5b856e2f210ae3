//! Owns the demo's figures and its closing table.

use driftline_control::model::EpochLine;
use driftline_images::PayloadReport;
use driftline_migrate::SendReport;
use serde::Serialize;

use crate::output::{bytes, table};

/// The demo's measurements.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub(super) struct DemoFigures {
    /// The backend that ran the vCPUs.
    pub(super) backend: String,
    /// Time from the start of the process to the guest's first line, in ms.
    pub(super) launch_ms: f64,
    /// Number of checkpoints taken.
    pub(super) checkpoints: u64,
    /// Median pause for a checkpoint, in µs.
    pub(super) pause_p50_us: u64,
    /// Longest pause for a checkpoint, in µs.
    pub(super) pause_max_us: u64,
    /// Number of frames in the first, full checkpoint.
    pub(super) full_frames: u64,
    /// Median number of frames in the other checkpoints.
    pub(super) incremental_frames_p50: u64,
    /// Time from the start of the restoring process until the guest ran, in ms.
    pub(super) restore_ms: f64,
    /// Duration of the whole migration, in ms.
    pub(super) migration_total_ms: f64,
    /// Downtime of the migration, in ms: no vCPU ran on either side.
    pub(super) migration_downtime_ms: f64,
    /// Number of passes over memory, including the last one.
    pub(super) migration_passes: u64,
    /// Number of bytes sent.
    pub(super) migration_bytes: u64,
    /// Longest time between two ticks of a vCPU's loop as measured by the guest, in µs.
    pub(super) guest_longest_gap_us: u64,
    /// Number of pages written by all vCPUs in all processes.
    pub(super) pages_written: u64,
    /// Number of pages whose content the guest found wrong.
    pub(super) errors: u64,
}

impl DemoFigures {
    pub(super) fn add_checkpoints(&mut self, lines: &[EpochLine]) {
        self.checkpoints = lines.len() as u64;
        self.pause_p50_us = median(lines.iter().map(|l| l.report.pause_us));
        self.pause_max_us = lines.iter().map(|l| l.report.pause_us).max().unwrap_or(0);
        self.full_frames = lines.first().map_or(0, |l| l.report.frames);
        self.incremental_frames_p50 = median(lines.iter().skip(1).map(|l| l.report.frames));
    }

    pub(super) fn add_migration(&mut self, report: &SendReport) {
        self.migration_total_ms = report.total_time_ms;
        self.migration_downtime_ms = report.downtime_ms;
        self.migration_passes = report.passes.len() as u64;
        self.migration_bytes = report.transferred_bytes;
    }

    pub(super) fn add_reports(&mut self, reports: &[PayloadReport]) {
        self.guest_longest_gap_us = reports.iter().map(|r| r.max_gap_us).max().unwrap_or(0);
        self.pages_written = reports.iter().map(|r| r.pages).sum();
        self.errors = reports.iter().map(|r| r.errors).sum();
    }

    pub(super) fn table(&self) -> String {
        let ms = |us: u64| format!("{:.2} ms", us as f64 / 1e3);
        table(&[
            ("launch", format!("{:.0} ms", self.launch_ms)),
            ("checkpoints", self.checkpoints.to_string()),
            ("  pause, median", ms(self.pause_p50_us)),
            ("  pause, longest", ms(self.pause_max_us)),
            ("  pages, full", self.full_frames.to_string()),
            ("  pages, median", self.incremental_frames_p50.to_string()),
            ("restore", format!("{:.0} ms", self.restore_ms)),
            ("migration", format!("{:.0} ms", self.migration_total_ms)),
            ("  downtime", format!("{:.1} ms", self.migration_downtime_ms)),
            ("  passes", self.migration_passes.to_string()),
            ("  transferred", bytes(self.migration_bytes)),
            ("guest's longest gap", ms(self.guest_longest_gap_us)),
            ("pages written", self.pages_written.to_string()),
            ("errors found", self.errors.to_string()),
        ])
    }
}

fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median([].into_iter()), 0);
        assert_eq!(median([3, 1, 2].into_iter()), 2);
    }
}
