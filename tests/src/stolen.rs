//! Processor time that the host gives to other machines. On a shared host a processor may not run
//! for tens of milliseconds. A program cannot tell this from its own slowness, but the kernel
//! counts it.

use std::time::{Duration, Instant};

/// A tick of /proc/stat.
const TICK: Duration = Duration::from_millis(10);

/// Measures stolen time since its creation.
#[derive(Debug)]
pub struct StolenTime {
    begun: Instant,
    ticks: u64,
}

impl StolenTime {
    /// Starts a measurement.
    pub fn begin() -> Self {
        Self { begun: Instant::now(), ticks: ticks() }
    }

    /// Returns the stolen share of all processors' time, in percent.
    pub fn percent(&self) -> f64 {
        let stolen = TICK * u32::try_from(ticks().saturating_sub(self.ticks)).unwrap_or(u32::MAX);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        100.0 * stolen.as_secs_f64() / self.begun.elapsed().as_secs_f64() / processors as f64
    }
}

/// Returns the ticks stolen from all processors since boot: the eighth figure of the line "cpu".
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/stat").expect("/proc/stat");
    let figure = stat.lines().next().and_then(|line| line.split_whitespace().nth(8));
    figure.and_then(|ticks| ticks.parse().ok()).expect("stolen time in /proc/stat")
}
