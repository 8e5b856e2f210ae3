//! Estimates the cost of checkpoints at an interval for a guest before any is taken; a pure
//! function.
//!
//! The figures are round numbers near or above those of one machine with two cores, in the tables
//! of `docs/src/performance/checkpoints.md`. Elsewhere they give an order of magnitude. A wrong one
//! makes the forecast wrong, and nothing else.

use std::time::Duration;

use driftline_dirty_tracker::PAGE_SIZE;
use serde::{Deserialize, Serialize};

use crate::copy_policy::CopyPolicy;

/// A pause in which nothing is copied. The medians of up to 256 pages are 0.24 to 0.34 ms in the
/// first table.
const LEAST_PAUSE: Duration = Duration::from_micros(500);
/// Time to copy a frame in the pause: 512 frames in a third of a millisecond, as [`CopyPolicy`]
/// assumes. The pauses of 16,384 and 65,536 pages take 470 ns a page in the first table.
const COPY_NS: f64 = 650.0;
/// Time to write-protect a frame that is copied after the pause. Chosen: a hundredth of a copy. The
/// first table has 1 to 3 ns a page.
const PROTECT_NS: f64 = 6.0;
/// Time until a frame is durable, as on a disk that takes 800 MB/s. In the first table, 4,096 to
/// 65,536 pages take 5 to 15 µs each, on a disk that slowed down.
const WRITE_NS: f64 = 5000.0;
/// Largest share of an interval that pauses may take for [`CadenceForecast::bearable`]. 5 %,
/// chosen: a guest with deadlines bears less, and a batch job bears more.
const BEARABLE: f64 = 0.05;

/// Estimated cost of checkpoints at an interval.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct CadenceForecast {
    /// The interval, ms.
    pub every_ms: f64,
    /// Frames in each checkpoint.
    pub frames: u64,
    /// Pause of the guest for each checkpoint, ms.
    pub pause_ms: f64,
    /// Time from the end of the pause until the checkpoint is durable, ms.
    pub write_ms: f64,
    /// Data written to the store, bytes/s.
    pub store_bytes_per_s: u64,
    /// Whether pauses take at most 5 % of the time and each checkpoint is durable before the next.
    pub bearable: bool,
}

/// Estimates the cost of a checkpoint every `every`, of a guest that dirties `frames` frames in
/// that time, on a host where frames can be copied while the guest runs (`driftline doctor` tells).
///
/// ```
/// # use std::time::Duration;
/// let often = driftline_checkpoint::cadence_forecast(Duration::from_millis(100), 500);
/// assert!(often.bearable && often.pause_ms < 5.0);
/// assert_eq!(often.store_bytes_per_s, 500 * 4096 * 10);
/// assert!(!driftline_checkpoint::cadence_forecast(Duration::from_millis(1), 10).bearable);
/// ```
pub fn cadence_forecast(every: Duration, frames: u64) -> CadenceForecast {
    let each = if frames < CopyPolicy::DEFAULT.background_from { COPY_NS } else { PROTECT_NS };
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
    fn background_copy_shortens_the_forecast_pause() {
        let second = Duration::from_secs(1);
        let at = |frames| cadence_forecast(second, frames);
        let many = CopyPolicy::DEFAULT.background_from;
        assert!(at(many).pause_ms < at(many - 1).pause_ms);
        assert_eq!(at(0).pause_ms, 0.5);
        assert_eq!(cadence_forecast(Duration::ZERO, 7).store_bytes_per_s, 0);
    }

    #[test]
    fn overloaded_store_is_not_bearable() {
        let at = |frames| cadence_forecast(Duration::from_secs(1), frames);
        assert!(at(100_000).bearable && !at(300_000).bearable);
    }
}
