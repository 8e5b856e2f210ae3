//! Distributions of any number of durations, in constant memory.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Significant decimal digits of a percentile: it is at most 1/128 too high. Two digits cost 37 KiB
/// for each distribution, three would cost 272 KiB.
const DIGITS: u8 = 2;
/// Duration up to which percentiles are known, in microseconds: 50 days.
const MAX_US: u64 = 1 << 42;

/// Distribution of durations.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "CountedDurations", into = "CountedDurations")]
pub(crate) struct DurationHistogram {
    /// `None` until there is a duration.
    counts: Option<Histogram<u64>>,
    /// Exact, unlike the maximum of `counts`.
    most_us: u64,
}

/// A distribution in transit to another process.
#[derive(Serialize, Deserialize)]
struct CountedDurations {
    /// Durations in microseconds, and how often they occurred.
    counts: Vec<(u64, u64)>,
    most_us: u64,
}

impl From<DurationHistogram> for CountedDurations {
    fn from(all: DurationHistogram) -> Self {
        let recorded = all.counts.iter().flat_map(Histogram::iter_recorded);
        let counts = recorded.map(|v| (v.value_iterated_to(), v.count_at_value())).collect();
        Self { counts, most_us: all.most_us }
    }
}

impl From<CountedDurations> for DurationHistogram {
    fn from(all: CountedDurations) -> Self {
        let mut times = Self::default();
        all.counts.iter().for_each(|(us, times_seen)| times.add_many(*us, *times_seen));
        times.most_us = all.most_us;
        times
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

impl DurationHistogram {
    pub(crate) fn add(&mut self, time: Duration) {
        self.add_many(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), 1);
    }

    /// Adds a duration of `us` microseconds `times` times.
    fn add_many(&mut self, us: u64, times: u64) {
        if self.counts.is_none() {
            // Fails only for other bounds.
            self.counts = Histogram::new_with_bounds(1, MAX_US, DIGITS).ok();
        }
        if let Some(counts) = &mut self.counts {
            counts.saturating_record_n(us, times);
        }
        self.most_us = self.most_us.max(us);
    }

    pub(crate) fn percentiles(&self) -> Percentiles {
        let Some(counts) = &self.counts else { return Percentiles::default() };
        let at = |quantile| counts.value_at_quantile(quantile).min(self.most_us);
        Percentiles { p50_us: at(0.5), p90_us: at(0.9), p99_us: at(0.99), max_us: self.most_us }
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
                let most = exact + exact / 128;
                // Beyond the bound only the maximum is known.
                let known = exact < MAX_US;
                let right = (exact..=most).contains(&found);
                prop_assert!(!known || right, "{percent} %: {found}, not {exact}");
            }
        }
    }

    #[test]
    fn percentiles_survive_a_change_of_process() {
        let mut times = DurationHistogram::default();
        (0..40).for_each(|log| times.add(Duration::from_micros((1 << log) + log)));
        let moved = serde_json::to_string(&times).unwrap();
        let mut moved: DurationHistogram = serde_json::from_str(&moved).unwrap();
        assert_eq!(moved.percentiles(), times.percentiles());
        (0..99).for_each(|_| times.add(Duration::from_micros(7)));
        (0..99).for_each(|_| moved.add(Duration::from_micros(7)));
        assert_eq!(moved.percentiles(), times.percentiles());
    }

    #[test]
    fn memory_does_not_grow_with_durations() {
        let mut times = DurationHistogram::default();
        let mut sizes = (0..64).map(|log| {
            times.add(Duration::from_micros(1 << log));
            times.counts.as_ref().map(|counts| counts.distinct_values() * size_of::<u64>())
        });
        let first = sizes.next().flatten().unwrap();
        assert!(first <= 37 << 10, "{first}");
        assert!(sizes.all(|size| size == Some(first)));
    }

    #[test]
    fn no_durations_give_zeros() {
        assert_eq!(DurationHistogram::default().percentiles(), Percentiles::default());
    }
}
