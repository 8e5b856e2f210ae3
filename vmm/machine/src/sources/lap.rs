//! Measures the steps of a collection.

use std::time::Instant;

/// Returns the nanoseconds since `start` and sets `start` to now.
pub(super) fn lap(start: &mut Instant) -> u64 {
    let now = Instant::now();
    let ns = now.duration_since(*start).as_nanos();
    *start = now;
    u64::try_from(ns).unwrap_or(u64::MAX)
}
