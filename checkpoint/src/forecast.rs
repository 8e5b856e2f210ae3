//! What checkpoints at an interval would cost a guest, before any is taken: a pure function.
//!
//! Its figures are those of one machine of two cores (`docs/src/performance/checkpoints.md`): an
//! order of magnitude elsewhere.

use std::time::Duration;

use driftline_dirty_tracker::PAGE_SIZE;
use serde::{Deserialize, Serialize};

use crate::copy_policy::BEHIND_FROM;

/// A pause in which nothing is copied.
const LEAST_PAUSE: Duration = Duration::from_micros(500);
/// To copy a frame in the pause, and to protect one, so that it is copied behind it.
const COPY_NS: f64 = 650.0;
const PROTECT_NS: f64 = 6.0;
/// Until a frame is durable.
const WRITE_NS: f64 = 5000.0;
/// The part of an interval that pauses may take for a guest to bear it.
pub const BEARABLE: f64 = 0.05;

/// Checkpoints at an interval.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct CadenceForecast {
    /// The interval, ms.
    pub every_ms: f64,
    /// Frames in each.
    pub frames: u64,
    /// How long the guest stands for each, ms.
    pub pause_ms: f64,
    /// From the end of the pause until it is durable, ms.
    pub write_ms: f64,
    /// What goes to the store, bytes/s.
    pub store_bytes_per_s: u64,
    /// Pauses take no more than [`BEARABLE`] of the time, and each is durable before the next.
    pub bearable: bool,
}

/// What it would cost to take a checkpoint `every` so often of a guest that makes `frames` dirty in
/// that time, on a host where frames can be copied behind the guest (`driftline doctor` tells).
///
/// ```
/// # use std::time::Duration;
/// let often = driftline_checkpoint::cadence_forecast(Duration::from_millis(100), 500);
/// assert!(often.bearable && often.pause_ms < 5.0);
/// assert_eq!(often.store_bytes_per_s, 500 * 4096 * 10);
/// assert!(!driftline_checkpoint::cadence_forecast(Duration::from_millis(1), 10).bearable);
/// ```
pub fn cadence_forecast(every: Duration, frames: u64) -> CadenceForecast {
    let each = if frames < BEHIND_FROM { COPY_NS } else { PROTECT_NS };
    let pause_ms = LEAST_PAUSE.as_secs_f64() * 1e3 + frames as f64 * each / 1e6;
    let write_ms = frames as f64 * WRITE_NS / 1e6;
    let every_ms = every.as_secs_f64() * 1e3;
    let bytes = frames.saturating_mul(PAGE_SIZE) as f64;
    CadenceForecast {
        every_ms,
        frames,
        pause_ms,
        write_ms,
        store_bytes_per_s: if every.is_zero() { 0 } else { (bytes / every.as_secs_f64()) as u64 },
        bearable: pause_ms <= BEARABLE * every_ms && write_ms <= every_ms,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_copied_behind_the_guest_makes_its_pause_no_longer_than_what_is_copied_in_it() {
        let second = Duration::from_secs(1);
        let at = |frames| cadence_forecast(second, frames);
        assert!(at(BEHIND_FROM).pause_ms < at(BEHIND_FROM - 1).pause_ms);
        assert_eq!(at(0).pause_ms, 0.5);
        assert_eq!(cadence_forecast(Duration::ZERO, 7).store_bytes_per_s, 0);
    }

    #[test]
    fn a_store_that_falls_behind_is_not_borne() {
        let at = |frames| cadence_forecast(Duration::from_secs(1), frames);
        assert!(at(100_000).bearable && !at(300_000).bearable);
    }
}
