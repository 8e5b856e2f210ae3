//! Medians, quartiles and spreads.

use serde::Serialize;

/// Minimum number of runs from which a statement about their spread is made.
const ENOUGH_RUNS: usize = 3;

/// A figure over several runs: its median, and the spread around it.
///
/// ```
/// use driftline_compare::RunSpread;
/// let spread = RunSpread::of([3.0, 1.0, 2.0]).unwrap();
/// assert_eq!((spread.min, spread.median, spread.max, spread.runs), (1.0, 2.0, 3.0, 3));
/// assert_eq!(RunSpread::of([]), None);
/// ```
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct RunSpread {
    /// The middle value, or the mean of the two middle values if their number is even.
    pub median: f64,
    /// The value below which a quarter of the values lie.
    pub lower_quartile: f64,
    /// The value above which a quarter of the values lie.
    pub upper_quartile: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
    /// Number of values.
    pub runs: usize,
}

impl RunSpread {
    /// Returns the spread of all finite values, or `None` if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let sorted = sorted(values);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let at = |part: f64| quantile(&sorted, part);
        let (lower_quartile, upper_quartile) = (at(0.25)?, at(0.75)?);
        let median = at(0.5)?;
        Some(Self { median, lower_quartile, upper_quartile, min, max, runs: sorted.len() })
    }

    /// Returns whether the middle halves of the two do not overlap, so that the order of their
    /// medians does not depend on one run. Returns false if either has fewer than three runs.
    pub fn is_apart_from(&self, other: &Self) -> bool {
        self.runs.min(other.runs) >= ENOUGH_RUNS
            && (self.upper_quartile < other.lower_quartile
                || other.upper_quartile < self.lower_quartile)
    }
}

/// Returns all finite values in ascending order.
pub(crate) fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Returns the value below which the share `part` (0 to 1) of the `sorted` values lies,
/// interpolated between neighbours.
pub(crate) fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = part.clamp(0.0, 1.0) * last as f64;
    let below = sorted.get(at.floor() as usize)?;
    let above = sorted.get(at.ceil() as usize)?;
    Some(below + (above - below) * at.fract())
}

/// Returns the median of values in any order.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    quantile(&sorted(values), 0.5)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn median_splits_the_values_in_half(
            values in prop::collection::vec(-1e9f64..1e9, 1..50)
        ) {
            let spread = RunSpread::of(values.iter().copied()).unwrap();
            let below = values.iter().filter(|v| **v < spread.median).count();
            let above = values.iter().filter(|v| **v > spread.median).count();
            prop_assert!(below <= values.len() / 2 && above <= values.len() / 2);
            prop_assert!(spread.min <= spread.median && spread.median <= spread.max);
            prop_assert!(values.contains(&spread.min) && values.contains(&spread.max));
            prop_assert_eq!(spread.runs, values.len());
        }

        #[test]
        fn quantiles_ascend_from_the_least_to_the_greatest(
            values in prop::collection::vec(-1e9f64..1e9, 1..50), a in 0.0f64..1.0, b in 0.0f64..1.0
        ) {
            let sorted = sorted(values);
            let (low, high) = (quantile(&sorted, a.min(b)), quantile(&sorted, a.max(b)));
            prop_assert!(low <= high);
            prop_assert_eq!(quantile(&sorted, 0.0), sorted.first().copied());
            prop_assert_eq!(quantile(&sorted, 1.0), sorted.last().copied());
        }
    }

    #[test]
    fn values_that_are_no_numbers_are_ignored() {
        let spread = RunSpread::of([f64::NAN, 4.0, f64::INFINITY, 2.0]).unwrap();
        assert_eq!((spread.median, spread.runs), (3.0, 2));
        assert_eq!(RunSpread::of([f64::NAN]), None);
        assert_eq!(quantile(&[1.0, 2.0], 0.25), Some(1.25));
        let (low, high) = (RunSpread::of([2.0; 3]).unwrap(), RunSpread::of([4.5; 3]).unwrap());
        assert!(low.is_apart_from(&high) && high.is_apart_from(&low) && !low.is_apart_from(&low));
        let few = RunSpread::of([9.0; 2]).unwrap();
        assert!(!few.is_apart_from(&low) && !low.is_apart_from(&few), "two runs are too few");
    }
}
