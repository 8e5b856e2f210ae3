//! Settings of a measurement.

use std::time::Duration;

use serde::{Serialize, Serializer};

/// Settings of a measurement.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct CompareSettings {
    /// Time between two epochs.
    #[serde(rename = "interval_ms", serialize_with = "as_ms")]
    pub interval: Duration,
    /// Time for which each cell is measured, summed over its runs.
    #[serde(rename = "duration_ms", serialize_with = "as_ms")]
    pub duration: Duration,
    /// Number of runs per cell.
    pub repeat: usize,
    /// Number of vCPUs per machine.
    pub vcpus: u8,
    /// Number of entries per dirty ring.
    pub ring_entries: u32,
    /// Time for which a kernel boots before it is measured.
    #[serde(rename = "boot_time_ms", serialize_with = "as_ms")]
    pub boot_time: Duration,
}

impl CompareSettings {
    /// Returns each run's share of the duration.
    pub fn per_run(&self) -> Duration {
        self.duration / u32::try_from(self.repeat.max(1)).unwrap_or(u32::MAX)
    }
}

fn as_ms<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64() * 1e3)
}
