//! Distributions of durations for metrics: fixed buckets of atomic counters.
//!
//! An observation is a search in at most 32 bounds and two relaxed additions. It neither allocates
//! nor waits, so that any thread may observe while the guest waits for it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Durations, counted in buckets.
#[derive(Debug)]
pub struct Histogram {
    /// Inclusive upper bound of each bucket except the last one, which has none, in µs, ascending.
    bounds_us: &'static [u64],
    counts: Box<[AtomicU64]>,
    sum_ns: AtomicU64,
}

/// A snapshot of a [`Histogram`].
#[derive(Clone, PartialEq, Debug)]
pub struct Distribution {
    /// Upper bound of each bucket, in seconds, and the number of observations in it alone. The last
    /// bound is infinite.
    pub buckets: Vec<(f64, u64)>,
    /// Sum of all observations, in seconds.
    pub sum_s: f64,
}

impl Histogram {
    /// Creates an empty histogram whose buckets end at `bounds_us`, ascending, in µs.
    pub fn new(bounds_us: &'static [u64]) -> Self {
        let counts = (0..=bounds_us.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds_us, counts, sum_ns: AtomicU64::new(0) }
    }

    /// Adds one observation.
    pub fn observe(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let bucket = self.bounds_us.partition_point(|us| us.saturating_mul(1_000) < ns);
        self.counts[bucket].fetch_add(1, Relaxed);
        // 584 years of observations fit.
        self.sum_ns.fetch_add(ns, Relaxed);
    }

    /// Returns the observations so far. The sum may have one that the buckets do not have yet, or
    /// the other way round.
    pub fn read(&self) -> Distribution {
        let bounds = self.bounds_us.iter().map(|us| Duration::from_micros(*us).as_secs_f64());
        let counts = self.counts.iter().map(|count| count.load(Relaxed));
        let buckets = bounds.chain([f64::INFINITY]).zip(counts).collect();
        Distribution {
            buckets,
            sum_s: Duration::from_nanos(self.sum_ns.load(Relaxed)).as_secs_f64(),
        }
    }
}

impl Distribution {
    /// Returns the number of observations.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_belong_to_their_buckets() {
        let histogram = Histogram::new(&[10, 100]);
        for ns in [0, 10_000, 10_001, 100_000, 100_001, u64::MAX >> 1] {
            histogram.observe(Duration::from_nanos(ns));
        }
        let Distribution { buckets, sum_s } = histogram.read();
        assert_eq!(buckets, [(10e-6, 2), (100e-6, 2), (f64::INFINITY, 2)]);
        assert!(sum_s > 9e9, "{sum_s}");
        assert_eq!(histogram.read().count(), 6);
    }

    #[test]
    fn observations_of_many_threads_are_all_counted() {
        let histogram = Histogram::new(&[1, 2]);
        std::thread::scope(|scope| {
            for us in [1, 2, 3] {
                let histogram = &histogram;
                scope.spawn(move || {
                    (0..1_000).for_each(|_| histogram.observe(Duration::from_micros(us)));
                });
            }
        });
        let Distribution { buckets, sum_s } = histogram.read();
        assert_eq!(buckets.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [1_000; 3]);
        assert!((sum_s - 6e-3).abs() < 1e-9, "{sum_s}");
    }
}
