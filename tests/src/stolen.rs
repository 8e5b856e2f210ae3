//! What the machine under the tests loses to others: on a shared host a processor may stand still
//! for tens of milliseconds, which no program on it can tell from its own slowness, but its kernel
//! can.

use std::time::{Duration, Instant};

/// A tick of /proc/stat.
const TICK: Duration = Duration::from_millis(10);

/// Measures from its making on.
#[derive(Debug)]
pub struct StolenTime {
    begun: Instant,
    ticks: u64,
}

impl StolenTime {
    /// Now.
    pub fn begin() -> Self {
        Self { begun: Instant::now(), ticks: ticks() }
    }

    /// Of a hundred parts of the processors' time, how many the host has given to others.
    pub fn percent(&self) -> f64 {
        let stolen = TICK * u32::try_from(ticks().saturating_sub(self.ticks)).unwrap_or(u32::MAX);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        100.0 * stolen.as_secs_f64() / self.begun.elapsed().as_secs_f64() / processors as f64
    }
}

/// Ticks that all processors have lost since they were there: the eighth figure of the line "cpu".
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/stat").expect("/proc/stat");
    let figure = stat.lines().next().and_then(|line| line.split_whitespace().nth(8));
    figure.and_then(|ticks| ticks.parse().ok()).expect("stolen time in /proc/stat")
}
