//! How cells are measured.

use std::time::Duration;

use serde::{Serialize, Serializer};

/// How cells are measured.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Settings {
    /// Time between two epochs.
    #[serde(rename = "interval_ms", serialize_with = "as_ms")]
    pub interval: Duration,
    /// How long each cell is measured, all its runs together.
    #[serde(rename = "duration_ms", serialize_with = "as_ms")]
    pub duration: Duration,
    /// Runs of each cell.
    pub repeat: usize,
    /// Of each machine.
    pub vcpus: u8,
    /// Of each dirty ring.
    pub ring_entries: u32,
    /// How long a kernel boots before it is measured.
    #[serde(rename = "settle_ms", serialize_with = "as_ms")]
    pub settle: Duration,
}

impl Settings {
    /// Of the duration, each run's part.
    pub fn per_run(&self) -> Duration {
        self.duration / u32::try_from(self.repeat.max(1)).unwrap_or(u32::MAX)
    }
}

fn as_ms<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64() * 1e3)
}
