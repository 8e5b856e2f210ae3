//! Forecasts a migration: a pure function of the writes that were observed in a guest.
//!
//! A guest's writes are a [`WriteCurve`]: the number of distinct frames that it dirties in a window
//! of each length. [`forecast`] simulates pass after pass on the curve. After each pass it calls
//! `judge` and `judge_and_throttle`, as the source of a migration does, so no second formula
//! decides when pre-copy ends.
//!
//! | figure | assumption |
//! | --- | --- |
//! | time of a pass | its bytes divided by the bandwidth |
//! | writes during it | the curve at that time plus `PASS_OVERHEAD`; at most the rate of a throttled vCPU |
//! | pending frames at the pause | those that the last pass left, and those written in `RECORD_OVERHEAD` |
//! | downtime | pending frames divided by the bandwidth, plus `PAUSE_OVERHEAD` |
//! | total | `SETUP_TIME`, the passes and the downtime |
//!
//! The forecast does not include copied disks, compression, or a source or destination that is
//! slower than the link.

use std::time::Duration;

use driftline_dirty_tracker::PAGE_SIZE;
use serde::{Deserialize, Serialize};

use crate::policy::convergence::{Goals, Judgement, PassMeasurement, expected_downtime, judge};
use crate::policy::throttle::{PassWrites, Throttle, judge_and_throttle};
use crate::report::ms;

/// Time until the first pass, in which the destination builds a machine. An upper bound: whole
/// migrations of guests that send little take 21 and 25 ms in `docs/src/performance/migration.md`.
const SETUP_TIME: Duration = Duration::from_millis(25);
/// Time from a pass's last byte to the next pass: acknowledgement and drain. 1 ms, chosen: a round
/// trip within a site, and some time for the drain. Each pass of a forecast is wrong by as much as
/// this is.
const PASS_OVERHEAD: Duration = Duration::from_millis(1);
/// Time from the judgement to the pause, in which the hand-over record becomes durable. 3 ms,
/// chosen: two syncs of a disk with flash memory. What the guest writes meanwhile is sent in the
/// pause.
const RECORD_OVERHEAD: Duration = Duration::from_millis(3);
/// Part of the downtime that does not depend on the pending frames: pause, state, hand-over,
/// resume. An upper bound for most guests: the median downtimes in
/// `docs/src/performance/migration.md`, which include the last frames, are 0.8 to 2.3 ms.
const PAUSE_OVERHEAD: Duration = Duration::from_millis(2);

/// Bytes of a pass besides contents.
const HEADS: u64 = 64;

/// A guest's writes in one window.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct WriteWindow {
    /// Length of the window.
    pub length: Duration,
    /// Number of distinct dirty frames.
    pub frames: f64,
    /// Of these, those of each vCPU; empty if they are not known.
    pub by_vcpu: Vec<f64>,
}

/// Number of distinct frames that a guest dirties in a window, by the window's length. It never
/// falls with the length and never exceeds the memory. The curve is linear between measured
/// windows, and beyond the longest one it continues the last segment.
#[derive(Clone, PartialEq, Debug)]
pub struct WriteCurve {
    /// Ascending in seconds, the first at 0. Each has the frames of every vCPU, and last the frames
    /// of other writers.
    points: Vec<(f64, Vec<f64>)>,
    vcpus: usize,
    most: f64,
}

impl WriteCurve {
    /// Returns the curve through `windows`, in any order, of a guest with `memory` frames. Skips
    /// windows without a length or with an invalid number. If a longer window has fewer frames than
    /// a shorter one, the shorter one counts.
    pub fn new(windows: &[WriteWindow], memory: u64) -> Self {
        let usable =
            |w: &&WriteWindow| !w.length.is_zero() && w.frames.is_finite() && w.frames >= 0.0;
        let mut windows: Vec<&WriteWindow> = windows.iter().filter(usable).collect();
        windows.sort_by_key(|w| w.length);
        let first = windows.first().map_or(0, |w| w.by_vcpu.len());
        let vcpus = if windows.iter().all(|w| w.by_vcpu.len() == first) { first } else { 0 };
        let mut points = vec![(0.0, vec![0.0; vcpus + 1])];
        for window in windows {
            let (before, last) = &points[points.len() - 1];
            let at = window.length.as_secs_f64();
            if at > *before {
                let parts = parts(window, vcpus);
                let highest = parts.iter().zip(last).map(|(now, last)| now.max(*last)).collect();
                points.push((at, highest));
            }
        }
        Self { points, vcpus, most: memory as f64 }
    }

    /// Returns the number of distinct frames in a window of `length`.
    pub fn frames(&self, length: Duration) -> u64 {
        self.with(length, Throttle::Off).0
    }

    /// Returns all frames in a window of `length`, and those of each vCPU, under `throttle`.
    fn with(&self, length: Duration, throttle: Throttle) -> (u64, Vec<u64>) {
        let most = throttle.rate().map_or(f64::INFINITY, |r| r as f64 * length.as_secs_f64());
        let mut parts = self.at(length.as_secs_f64());
        for part in &mut parts[..self.vcpus] {
            *part = part.min(most);
        }
        let all = parts.iter().sum::<f64>().min(self.most);
        (all.round() as u64, parts[..self.vcpus].iter().map(|part| part.round() as u64).collect())
    }

    fn at(&self, seconds: f64) -> Vec<f64> {
        let above = self.points.partition_point(|(at, _)| *at < seconds);
        // Beyond the last point the last segment continues.
        let above = above.clamp(1, (self.points.len() - 1).max(1));
        let Some(((to, high), (from, low))) =
            self.points.get(above).zip(self.points.get(above - 1)).map(|(a, b)| (a.clone(), b))
        else {
            return vec![0.0; self.vcpus + 1];
        };
        let part = (seconds - from) / (to - from);
        low.iter().zip(high).map(|(low, high)| low + (high - low) * part).collect()
    }
}

/// Returns a window's frames by writer: each vCPU, and last all others. Another subscriber that
/// drains the tracker makes vCPUs count frames twice, so their sum is scaled down to the window's.
fn parts(window: &WriteWindow, vcpus: usize) -> Vec<f64> {
    let count = |n: &f64| if n.is_finite() { n.max(0.0) } else { 0.0 };
    let mut parts: Vec<f64> = window.by_vcpu.iter().take(vcpus).map(count).collect();
    let known: f64 = parts.iter().sum();
    if known > window.frames {
        parts.iter_mut().for_each(|part| *part *= window.frames / known);
    }
    parts.push((window.frames - known).max(0.0));
    parts
}

/// The conditions of a forecast.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForecastConditions {
    /// Bandwidth of the link, bytes/s; at least 1.
    pub bytes_per_s: u64,
    /// Target and limits of pre-copy.
    pub goals: Goals,
    /// Whether vCPUs may be throttled (`--no-throttle` forbids it).
    pub throttle: bool,
    /// Frames that the first pass sends.
    pub populated: u64,
    /// Of these, zero frames, whose contents are not sent.
    pub zeros: u64,
}

impl ForecastConditions {
    /// Returns the judgement after a pass, and the throttle from then on.
    fn judge(
        &self,
        now: Throttle,
        passes: &[PassMeasurement],
        (pending, elapsed): (u64, Duration),
        writes: PassWrites<'_>,
    ) -> (Judgement, Throttle) {
        match self.throttle {
            true => judge_and_throttle(now, &self.goals, passes, (pending, elapsed), writes),
            false => (judge(&self.goals, passes, pending, elapsed), now),
        }
    }
}

/// The forecast of a migration.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Forecast {
    /// Whether pre-copy converges.
    pub converges: bool,
    /// Why pre-copy ends, in words.
    pub reason: String,
    /// The passes while the guest runs.
    pub passes: Vec<ForecastPass>,
    /// Time until the destination runs the guest, ms; without convergence, until the migration is
    /// given up.
    pub total_time_ms: f64,
    /// Pause, ms; without convergence, the pause if it were forced at that time.
    pub downtime_ms: f64,
    /// Bytes sent, including those of the pause.
    pub transferred_bytes: u64,
    /// Last limit of each vCPU's dirty rate, bytes/s of whole frames; `None` without a throttle.
    pub most_bytes_per_s: Option<u64>,
}

/// One pass of a forecast.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct ForecastPass {
    /// Frames sent, with and without content.
    pub frames: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// Time of the pass, ms.
    pub time_ms: f64,
    /// Frames that are pending after it.
    pub left_frames: u64,
}

/// Returns the forecast of a migration.
///
/// Costs a few hundred operations for each pass and vCPU; there are at most `goals.max_passes`.
///
/// Laws (tests below):
/// - The judgement after each pass is that of `judge`, except for the throttle's approach.
/// - Without a throttle and without `RECORD_OVERHEAD`, a faster link or fewer writes give no pass
///   more frames. A migration that converges still does, and takes longer at most by the passes
///   that make the pause shorter.
/// - With a throttle a migration converges if only vCPUs write.
pub fn forecast(conditions: &ForecastConditions, curve: &WriteCurve) -> Forecast {
    report_of(conditions, &simulate(conditions, curve, RECORD_OVERHEAD))
}

fn report_of(conditions: &ForecastConditions, simulated: &SimulatedPrecopy) -> Forecast {
    let SimulatedPrecopy { measured, end, throttle, pending, elapsed } = simulated;
    let waits = expected_downtime(*pending, conditions.bytes_per_s.max(1)).unwrap_or_default();
    let downtime = waits.saturating_add(PAUSE_OVERHEAD);
    let converges = matches!(end, Judgement::SwitchOver(_));
    let total = SETUP_TIME.saturating_add(*elapsed).saturating_add(match converges {
        true => downtime,
        false => Duration::ZERO,
    });
    let pass = |p: &PassMeasurement| ForecastPass {
        frames: p.frames,
        bytes: p.bytes,
        time_ms: ms(p.time),
        left_frames: p.dirtied,
    };
    let rest = if converges { pending.saturating_mul(PAGE_SIZE) } else { 0 };
    Forecast {
        converges,
        reason: match end {
            Judgement::SwitchOver(reason) => reason.to_string(),
            Judgement::GiveUp(limit) => limit.to_string(),
            Judgement::KeepGoing => String::new(),
        },
        passes: measured.iter().map(pass).collect(),
        total_time_ms: ms(total),
        downtime_ms: ms(downtime),
        transferred_bytes: measured.iter().fold(rest, |sum, p| sum.saturating_add(p.bytes)),
        most_bytes_per_s: throttle.rate().map(|rate| rate.saturating_mul(PAGE_SIZE)),
    }
}

/// The passes and the end of a simulated pre-copy.
struct SimulatedPrecopy {
    measured: Vec<PassMeasurement>,
    /// Never `KeepGoing`.
    end: Judgement,
    throttle: Throttle,
    pending: u64,
    elapsed: Duration,
}

/// Simulates pre-copy. `record_time` is [`RECORD_OVERHEAD`], or 0 for the laws that hold without
/// it.
fn simulate(
    conditions: &ForecastConditions,
    curve: &WriteCurve,
    record_time: Duration,
) -> SimulatedPrecopy {
    let ForecastConditions { bytes_per_s, populated, .. } = conditions;
    let (mut measured, mut now) = (Vec::new(), Throttle::Off);
    let mut elapsed = Duration::ZERO;
    let mut frames = *populated;
    let mut contents = populated.saturating_sub(conditions.zeros);
    loop {
        let bytes = contents.saturating_mul(PAGE_SIZE).saturating_add(HEADS);
        let seconds = bytes as f64 / (*bytes_per_s).max(1) as f64;
        let time = Duration::from_secs_f64(seconds.min(1e9)).max(Duration::from_nanos(1));
        let mut window = time.saturating_add(PASS_OVERHEAD);
        let (mut dirtied, mut by) = curve.with(window, now);
        elapsed = elapsed.saturating_add(window);
        measured.push(PassMeasurement { frames, bytes, time, dirtied });
        let writes = PassWrites { dirtied: &by, time: window };
        let (mut end, mut next) = conditions.judge(now, &measured, (dirtied, elapsed), writes);
        if matches!(end, Judgement::SwitchOver(_)) {
            window = window.saturating_add(record_time);
            elapsed = elapsed.saturating_add(record_time);
            (dirtied, by) = curve.with(window, now);
            if let Some(last) = measured.last_mut() {
                last.dirtied = dirtied;
            }
            let writes = PassWrites { dirtied: &by, time: window };
            (end, next) = conditions.judge(now, &measured, (dirtied, elapsed), writes);
        }
        if end != Judgement::KeepGoing {
            return SimulatedPrecopy { measured, end, throttle: now, pending: dirtied, elapsed };
        }
        now = next;
        (frames, contents) = (dirtied, dirtied);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::convergence::{Reason, TimeoutStrategy};
    use crate::policy::figures::FIGURES;

    const MEMORY: u64 = 1 << 20;

    fn goals(downtime_ms: u64) -> Goals {
        Goals {
            downtime: Duration::from_millis(downtime_ms),
            max_passes: 30,
            timeout: Duration::from_secs(36_000_000),
            strategy: TimeoutStrategy::Cancel,
        }
    }

    fn conditions(bytes_per_s: u64, populated: u64, downtime_ms: u64) -> ForecastConditions {
        let goals = goals(downtime_ms);
        ForecastConditions { bytes_per_s, goals, throttle: false, populated, zeros: 0 }
    }

    fn window(ms: u64, frames: f64, by_vcpu: Vec<f64>) -> WriteWindow {
        WriteWindow { length: Duration::from_millis(ms), frames, by_vcpu }
    }

    /// Windows with writes of two vCPUs and of a device.
    fn any_windows() -> impl Strategy<Value = Vec<WriteWindow>> {
        let one = (1u64..3000, 0.0f64..40_000.0, 0.0f64..40_000.0, 0.0f64..1000.0);
        let window = one.prop_map(|(ms, a, b, other)| window(ms, a + b + other, vec![a, b]));
        prop::collection::vec(window, 0..7)
    }

    fn any_conditions() -> impl Strategy<Value = ForecastConditions> {
        (1u64 << 20..4 << 30, 16u64..MEMORY, 1u64..1000).prop_map(|(b, p, d)| conditions(b, p, d))
    }

    /// Checks the laws that compare an `easier` migration with a `harder` one.
    fn is_easier(
        (easier, harder): (&ForecastConditions, &ForecastConditions),
        (light, heavy): (&WriteCurve, &WriteCurve),
    ) -> Result<(), TestCaseError> {
        let without_record =
            |c: &ForecastConditions, curve| report_of(c, &simulate(c, curve, Duration::ZERO));
        let (easy, hard) = (without_record(easier, light), without_record(harder, heavy));
        for (e, h) in easy.passes.iter().zip(&hard.passes) {
            prop_assert!(e.frames <= h.frames && e.time_ms <= h.time_ms + 1e-6, "{e:?} {h:?}");
        }
        // Wider by the rounding of the link's rate, which is measured in bytes and nanoseconds.
        let wider = Goals { downtime: easier.goals.downtime.mul_f64(1.01), ..easier.goals };
        let wide = without_record(&ForecastConditions { goals: wider, ..*easier }, light);
        if hard.converges {
            prop_assert!(wide.converges, "{wide:?} beside {hard:?}");
            let shorter = ms(wider.downtime) / (1.0 - FIGURES.shrink_ratio)
                + wide.passes.len() as f64 * ms(PASS_OVERHEAD);
            let most = hard.total_time_ms + shorter + ms(PAUSE_OVERHEAD);
            prop_assert!(wide.total_time_ms <= most, "{wide:?} beside {hard:?}");
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn curve_is_monotonic_and_bounded_by_memory(
            windows in any_windows(),
            a in 0u64..100_000,
            b in 0u64..100_000,
        ) {
            let curve = WriteCurve::new(&windows, MEMORY);
            let at = |ms: u64| curve.frames(Duration::from_millis(ms));
            let (short, long) = (at(a.min(b)), at(a.max(b)));
            prop_assert!(short <= long && long <= MEMORY);
        }

        #[test]
        fn forecast_judgement_is_that_of_judge(
            c in any_conditions(),
            windows in any_windows(),
            throttled in any::<bool>(),
        ) {
            let c = ForecastConditions { throttle: throttled, ..c };
            let simulated = simulate(&c, &WriteCurve::new(&windows, MEMORY), RECORD_OVERHEAD);
            for (i, pass) in simulated.measured.iter().enumerate() {
                // No time limit is near: the time spent decides nothing.
                let passes = &simulated.measured[..=i];
                let judgement = judge(&c.goals, passes, pass.dirtied, Duration::ZERO);
                if i + 1 < simulated.measured.len() {
                    let approach = matches!(
                        judgement,
                        Judgement::SwitchOver(Reason::Fits { expected, .. })
                            if throttled && expected > FIGURES.long_pause
                    );
                    prop_assert!(approach || judgement == Judgement::KeepGoing, "{judgement:?}");
                } else {
                    let kind = std::mem::discriminant(&judgement);
                    prop_assert_eq!(kind, std::mem::discriminant(&simulated.end));
                    prop_assert_eq!(pass.dirtied, simulated.pending);
                }
            }
        }

        #[test]
        fn faster_link_makes_convergence_easier(
            c in any_conditions(),
            windows in any_windows(),
            by in 1.0f64..50.0,
        ) {
            let curve = WriteCurve::new(&windows, MEMORY);
            let bytes_per_s = (c.bytes_per_s as f64 * by) as u64;
            let faster = ForecastConditions { bytes_per_s, ..c };
            is_easier((&faster, &c), (&curve, &curve))?;
        }

        #[test]
        fn fewer_writes_make_convergence_easier(
            c in any_conditions(),
            windows in any_windows(),
            part in 0.0f64..1.0,
        ) {
            let scale = |w: &WriteWindow| WriteWindow {
                frames: w.frames * part,
                by_vcpu: w.by_vcpu.iter().map(|n| n * part).collect(),
                ..w.clone()
            };
            let less: Vec<WriteWindow> = windows.iter().map(scale).collect();
            let curves = (&WriteCurve::new(&less, MEMORY), &WriteCurve::new(&windows, MEMORY));
            is_easier((&c, &c), curves)?;
        }

        #[test]
        fn vcpu_writes_always_converge_with_a_throttle(
            b in 8u64 << 20..4 << 30,
            frames in 1.0f64..1e6,
            share in 0.0f64..1.0,
        ) {
            let windows = [window(100, frames, vec![frames * share, frames * (1.0 - share)])];
            let c = ForecastConditions { throttle: true, ..conditions(b, MEMORY, 300) };
            let forecast = forecast(&c, &WriteCurve::new(&windows, MEMORY));
            prop_assert!(forecast.converges, "{forecast:?}");
        }
    }

    #[test]
    fn curve_is_linear_between_and_beyond_windows() {
        let windows = [window(100, 1000.0, vec![]), window(200, 1500.0, vec![])];
        let curve = WriteCurve::new(&windows, 4000);
        let at = |ms| curve.frames(Duration::from_millis(ms));
        assert_eq!([0, 50, 100, 150, 200, 400].map(at), [0, 500, 1000, 1250, 1500, 2500]);
        assert_eq!(at(10_000), 4000, "memory bounds the curve");
        let nothing = WriteCurve::new(&[], 4000);
        assert_eq!(nothing.frames(Duration::from_secs(1)), 0);
        let bad = [window(0, 5.0, vec![]), window(5, f64::NAN, vec![]), window(9, -1.0, vec![])];
        assert_eq!(WriteCurve::new(&bad, 4000), nothing);
    }

    #[test]
    fn quiet_guest_moves_in_one_pass() {
        let quiet = WriteCurve::new(&[window(1000, 0.0, vec![0.0])], MEMORY);
        let c = conditions(100 << 20, 25_600, 300);
        let moved = forecast(&c, &quiet);
        assert!(moved.converges && moved.passes.len() == 1, "{moved:?}");
        assert!(moved.reason.contains("wrote nothing"), "{moved:?}");
        let expected = 1000.0 + ms(SETUP_TIME + PASS_OVERHEAD + RECORD_OVERHEAD + PAUSE_OVERHEAD);
        assert!((moved.total_time_ms - expected).abs() < 0.1, "{moved:?}");
        assert_eq!(moved.downtime_ms, ms(PAUSE_OVERHEAD));
        let zeros = forecast(&ForecastConditions { zeros: 12_800, ..c }, &quiet);
        assert!((moved.total_time_ms - zeros.total_time_ms - 500.0).abs() < 0.1, "{zeros:?}");
        assert_eq!(zeros.passes[0].frames, 25_600);
    }

    #[test]
    fn forecast_of_a_fast_writer_needs_the_throttle() {
        // All of 64 MiB is written in a quarter of a second, and the link has 40 MB/s.
        let all = 16_384.0;
        let windows = [window(250, all, vec![all, 0.0]), window(1000, all, vec![all, 0.0])];
        let curve = WriteCurve::new(&windows, MEMORY);
        let c = conditions(40_000_000, 20_000, 300);
        let alone = forecast(&c, &curve);
        assert!(!alone.converges && alone.passes.len() == 30, "{alone:?}");
        assert!(alone.reason.contains("outruns the link") && alone.most_bytes_per_s.is_none());
        assert!((alone.downtime_ms - 1677.7 - ms(PAUSE_OVERHEAD)).abs() < 1.0, "{alone:?}");
        let throttled = forecast(&ForecastConditions { throttle: true, ..c }, &curve);
        assert!(throttled.converges && throttled.downtime_ms < 300.0, "{throttled:?}");
        assert_eq!(
            throttled.most_bytes_per_s,
            Some(1464 * 4096),
            "0.15 of the link, in the approach"
        );
    }
}
