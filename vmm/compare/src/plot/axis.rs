//! Axes: maps values to places, and chooses the ticks.

/// How an axis is divided. The function formats a value.
#[derive(Clone, Debug)]
pub(crate) enum AxisTicks {
    /// At powers of ten.
    Log(fn(f64) -> String),
    /// Evenly from zero. Values below zero have no meaning and lie at zero.
    Linear(fn(f64) -> String),
    /// Only at these values, on a logarithmic scale.
    At(Vec<(f64, String)>),
}

/// An axis with its label, including the unit.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) ticks: AxisTicks,
}

/// An axis over a range of values, drawn between two places.
pub(crate) struct AxisScale<'a> {
    ticks: &'a AxisTicks,
    low: f64,
    high: f64,
    /// Distance between two ticks of a linear axis.
    step: f64,
    places: (f64, f64),
}

impl Axis {
    /// Returns whether `value` has a place on the axis.
    pub(super) fn takes(&self, value: f64) -> bool {
        value.is_finite() && (value > 0.0 || matches!(self.ticks, AxisTicks::Linear(_)))
    }

    /// Returns a scale with room for all of `values` that have a place, or `None` if none has one.
    pub(super) fn scale(
        &self,
        values: impl Iterator<Item = f64>,
        places: (f64, f64),
    ) -> Option<AxisScale<'_>> {
        let all: Vec<f64> = values.filter(|v| self.takes(*v)).collect();
        let least = all.iter().copied().reduce(f64::min)?;
        let most = all.iter().copied().reduce(f64::max)?;
        let step = step(most.max(0.0));
        let (low, high) = match &self.ticks {
            AxisTicks::Log(_) => (round_down(least / 1.1), round_up(most * 1.1)),
            AxisTicks::Linear(_) => (0.0, ((most / step).ceil() * step).max(step)),
            AxisTicks::At(at) => {
                let ends = at.iter().map(|(value, _)| *value).chain([least, most]);
                let (low, high) =
                    ends.fold((least, most), |(low, high), v| (low.min(v), high.max(v)));
                // No point lies on the edge.
                (low / 1.6, high * 1.6)
            }
        };
        Some(AxisScale { ticks: &self.ticks, low, high, step, places })
    }
}

impl AxisScale<'_> {
    /// Returns where `value` is drawn; values beyond an end are drawn at that end.
    pub(super) fn place(&self, value: f64) -> f64 {
        let part = match self.ticks {
            AxisTicks::Linear(_) => value / self.high,
            // Values that are not above zero have no logarithm and lie at the lower end.
            _ if value <= self.low => 0.0,
            _ => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        self.places.0 + (self.places.1 - self.places.0) * part.clamp(0.0, 1.0)
    }

    /// Returns the places and labels of the ticks.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        match self.ticks {
            AxisTicks::At(at) => {
                at.iter().map(|(v, label)| (self.place(*v), label.clone())).collect()
            }
            AxisTicks::Log(show) => {
                let wide = self.high / self.low > 150.0;
                let digits: &[f64] = if wide { &[1.0] } else { &[1.0, 2.0, 5.0] };
                let decades = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
                let values = decades.flat_map(|d| digits.iter().map(move |m| m * 10f64.powi(d)));
                let inside = values.filter(|v| (self.low * 0.999..=self.high * 1.001).contains(v));
                inside.map(|v| (self.place(v), show(v))).collect()
            }
            AxisTicks::Linear(show) => {
                let count = (self.high / self.step).round() as usize;
                let values = (0..=count).map(|i| self.step * i as f64);
                values.map(|v| (self.place(v), show(v))).collect()
            }
        }
    }
}

/// Returns a step of 1, 2 or 5 times a power of ten that divides `range` into about five parts.
fn step(range: f64) -> f64 {
    let rough = if range > 0.0 { range / 5.0 } else { 1.0 };
    let decade = 10f64.powi(rough.log10().floor() as i32);
    let digit = rough / decade;
    decade
        * if digit <= 1.0 {
            1.0
        } else if digit <= 2.0 {
            2.0
        } else if digit <= 5.0 {
            5.0
        } else {
            10.0
        }
}

/// Returns the largest 1, 2 or 5 times a power of ten that is at most `value`.
fn round_down(value: f64) -> f64 {
    let decade = 10f64.powi(value.log10().floor() as i32);
    let digits = [5.0, 2.0, 1.0];
    digits.into_iter().map(|d| d * decade).find(|v| *v <= value).unwrap_or(decade)
}

/// Returns the smallest 1, 2 or 5 times a power of ten that is at least `value`.
fn round_up(value: f64) -> f64 {
    let decade = 10f64.powi(value.log10().floor() as i32);
    let digits = [1.0, 2.0, 5.0, 10.0];
    digits.into_iter().map(|d| d * decade).find(|v| *v >= value).unwrap_or(decade * 10.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn axis(log: bool) -> Axis {
        let show = |v: f64| format!("{v}");
        let ticks = if log { AxisTicks::Log(show) } else { AxisTicks::Linear(show) };
        Axis { label: String::new(), ticks }
    }

    proptest! {
        #[test]
        fn places_ascend_and_ticks_are_few(
            a in 1e-6f64..1e12, b in 1e-6f64..1e12, log: bool
        ) {
            let axis = axis(log);
            let scale = axis.scale([a, b].into_iter(), (0.0, 500.0)).unwrap();
            prop_assert!(scale.place(a.min(b)) <= scale.place(a.max(b)));
            let ticks = scale.ticks();
            prop_assert!((2..=20).contains(&ticks.len()), "{:?}", ticks);
            prop_assert!(ticks.windows(2).all(|w| w[0].0 < w[1].0));
            prop_assert!(ticks.iter().all(|(at, _)| (0.0..=500.0).contains(at)));
        }
    }

    #[test]
    fn steps_and_bounds_are_round_numbers() {
        assert_eq!((round_down(37.0), round_up(37.0)), (20.0, 50.0));
        assert_eq!((round_down(100.0), round_up(600.0)), (100.0, 1000.0));
        assert_eq!((step(100.0), step(7.0), step(0.0)), (20.0, 2.0, 1.0));
        let axis = axis(false);
        let scale = axis.scale([-3.0, 42.0].into_iter(), (0.0, 100.0)).unwrap();
        let labels: Vec<String> = scale.ticks().into_iter().map(|(_, label)| label).collect();
        assert_eq!(labels, ["0", "10", "20", "30", "40", "50"]);
        assert_eq!(scale.place(-3.0), scale.place(0.0));
        assert!(axis.scale([-3.0].into_iter(), (0.0, 100.0)).unwrap().ticks().len() >= 2);
    }
}
