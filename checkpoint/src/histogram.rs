//! Distributions of durations, of any number of them, in constant memory.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Buckets per octave: a percentile is at most 1/32 too high.
const FINE: u64 = 32;
/// Octaves above the first `FINE` microseconds: up to 39 days.
const OCTAVES: u64 = 37;

/// Durations in microseconds, counted in buckets whose width grows with the duration.
#[derive(Clone, Debug)]
pub(crate) struct DurationHistogram {
    buckets: Box<[u64]>,
    count: u64,
    most_us: u64,
}

impl Default for DurationHistogram {
    fn default() -> Self {
        let buckets = vec![0; (FINE * (OCTAVES + 1)) as usize].into();
        Self { buckets, count: 0, most_us: 0 }
    }
}

/// Percentiles of durations, in microseconds; all zero if there are none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Percentiles {
    /// Median.
    pub p50_us: u64,
    /// 90th percentile.
    pub p90_us: u64,
    /// 99th percentile.
    pub p99_us: u64,
    /// Maximum.
    pub max_us: u64,
}

fn bucket(us: u64) -> usize {
    let octave = (us / FINE).checked_ilog2().map_or(0, |log| u64::from(log) + 1).min(OCTAVES);
    // The number's leading bits, which are at least FINE and less than twice that.
    let within = if octave == 0 { us } else { (us >> (octave - 1)).min(2 * FINE - 1) - FINE };
    (octave * FINE + within) as usize
}

/// Returns the largest number in a bucket.
fn top(bucket: usize) -> u64 {
    let (octave, within) = (bucket as u64 / FINE, bucket as u64 % FINE);
    if octave == 0 { within } else { ((FINE + within + 1) << (octave - 1)) - 1 }
}

impl DurationHistogram {
    pub(crate) fn add(&mut self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.buckets[bucket(us)] += 1;
        self.count += 1;
        self.most_us = self.most_us.max(us);
    }

    /// Returns the `percent`th percentile in microseconds, at most 1/32 too high.
    fn percentile(&self, percent: u64) -> u64 {
        let wanted = (self.count * percent).div_ceil(100).max(1);
        let mut seen = 0;
        let found = self.buckets.iter().position(|n| {
            seen += n;
            seen >= wanted
        });
        found.map_or(0, |bucket| top(bucket).min(self.most_us))
    }

    pub(crate) fn percentiles(&self) -> Percentiles {
        Percentiles {
            p50_us: self.percentile(50),
            p90_us: self.percentile(90),
            p99_us: self.percentile(99),
            max_us: self.most_us,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn percentiles_are_at_most_slightly_high(
            mut all in prop::collection::vec(
                prop_oneof![0u64..100, 0u64..100_000, 0u64..1 << 50],
                1..300,
            ),
        ) {
            let mut times = DurationHistogram::default();
            all.iter().for_each(|us| times.add(Duration::from_micros(*us)));
            all.sort_unstable();
            let Percentiles { p50_us, p90_us, p99_us, max_us } = times.percentiles();
            prop_assert_eq!(max_us, all[all.len() - 1]);
            for (percent, found) in [(50, p50_us), (90, p90_us), (99, p99_us)] {
                let exact = all[(all.len() * percent).div_ceil(100) - 1];
                let most = exact + exact / FINE;
                // Beyond the last octave only the maximum is known.
                let known = exact < 1 << 40;
                let right = (exact..=most).contains(&found);
                prop_assert!(!known || right, "{percent} %: {found}, not {exact}");
            }
        }

        #[test]
        fn buckets_are_laid_end_to_end(us in 0u64..1 << 41) {
            prop_assert!(us <= top(bucket(us)));
            prop_assert_eq!(bucket(top(bucket(us))), bucket(us));
            prop_assert_eq!(bucket(top(bucket(us)) + 1), bucket(us) + 1);
        }
    }

    #[test]
    fn no_durations_give_zeros() {
        assert_eq!(DurationHistogram::default().percentiles(), Percentiles::default());
    }
}
