//! What a migration would come to, before anyone begins it: a pure function over what a guest was
//! seen to write.
//!
//! A guest's writes are a [`WriteCurve`]: how many distinct frames it makes dirty in a window of each
//! length. [`forecast`] goes from pass to pass along it, and after each asks [`judge`] and
//! [`judge_and_throttle`] themselves, as the source of a migration does; there is no second formula
//! for when precopy ends.
//!
//! | taken to be | is |
//! | --- | --- |
//! | the time of a pass | its bytes by the bandwidth |
//! | what the guest writes meanwhile | the curve at that time and [`PASS_OVERHEAD`]; of a throttled vCPU at most its rate's |
//! | what waits when the pause begins | what the last pass left, and what is written in [`RECORD_OVERHEAD`] |
//! | the downtime | what waits by the bandwidth, and [`PAUSE_OVERHEAD`] |
//! | total | [`SETUP_TIME`], the passes, the downtime |
//!
//! Not in it: drives that go along, compression, and a source or destination that is slower than
//! the link.

use std::time::Duration;

use driftline_dirty_tracker::PAGE_SIZE;
use serde::{Deserialize, Serialize};

use crate::policy::convergence::{Goals, Judgement, PassMeasurement, expected_downtime, judge};
use crate::policy::throttle::{Throttle, judge_and_throttle};
use crate::report::ms;

/// From the beginning to the first pass: a machine is built at the destination.
pub const SETUP_TIME: Duration = Duration::from_millis(25);
/// From a pass's last byte to the next pass: it is acknowledged, and what is dirty is drained.
pub const PASS_OVERHEAD: Duration = Duration::from_millis(1);
/// From the verdict to the pause: the hand-over record becomes durable.
pub const RECORD_OVERHEAD: Duration = Duration::from_millis(3);
/// Of the downtime, what does not depend on what waits: stop, state, hand-over, start.
pub const PAUSE_OVERHEAD: Duration = Duration::from_millis(2);

/// Bytes of a pass that are not contents.
const HEADS: u64 = 64;

/// What a guest wrote in a window.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct WriteWindow {
    /// How long it was.
    pub length: Duration,
    /// Distinct frames that were made dirty.
    pub frames: f64,
    /// Of these, those of each vCPU; empty where that is not known.
    pub by_vcpu: Vec<f64>,
}

/// Distinct frames that a guest makes dirty over the length of a window: never fewer in a longer
/// one, nor more than its memory has. Between the windows measured it is a line; beyond the longest
/// it goes on as between the last two.
#[derive(Clone, PartialEq, Debug)]
pub struct WriteCurve {
    /// Ascending in seconds, the first at no time; for each, the frames of every vCPU, and last of
    /// all that is not theirs.
    points: Vec<(f64, Vec<f64>)>,
    vcpus: usize,
    most: f64,
}

impl WriteCurve {
    /// Through `windows`, in any order, of a guest of `memory` frames. What no window can have (no
    /// length, a number that is none) is left out; where a longer window has seen less than a
    /// shorter one, the shorter one counts.
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

    /// Distinct frames in a window of `length`.
    pub fn frames(&self, length: Duration) -> u64 {
        self.with(length, Throttle::Off).0
    }

    /// All frames in a window of `length`, and those of each vCPU, if each may make so many dirty.
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
        // Beyond the last one the line of the last two goes on.
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

/// A window's frames by who made them dirty. Whoever else drains the tracker makes vCPUs count
/// frames again: no more than there were.
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

/// What a forecast is made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForecastConditions {
    /// What the link carries, bytes/s; at least 1.
    pub bytes_per_s: u64,
    /// What precopy aims at.
    pub goals: Goals,
    /// Whether vCPUs may be throttled, as they are unless `--no-throttle`.
    pub throttle: bool,
    /// Frames that the first pass sends.
    pub populated: u64,
    /// Of these, those that are nothing but zeros, whose contents are not sent.
    pub zeros: u64,
}

impl ForecastConditions {
    /// The verdict after a pass, and the throttle for what follows.
    fn judge(
        &self,
        now: Throttle,
        passes: &[PassMeasurement],
        (pending, elapsed): (u64, Duration),
        writes: (&[u64], Duration),
    ) -> (Judgement, Throttle) {
        match self.throttle {
            true => judge_and_throttle(now, &self.goals, passes, (pending, elapsed), writes),
            false => (judge(&self.goals, passes, pending, elapsed), now),
        }
    }
}

/// A migration that was not made.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Forecast {
    /// Whether it ends by itself.
    pub converges: bool,
    /// Why precopy ends, in words.
    pub reason: String,
    /// The passes while the guest runs.
    pub passes: Vec<ForecastPass>,
    /// From the beginning until the guest runs there, ms; if it does not converge, until it is
    /// given up.
    pub total_time_ms: f64,
    /// The pause, ms; if it does not converge, what it would be if it were forced then.
    pub downtime_ms: f64,
    /// Bytes sent, those of the pause included.
    pub transferred_bytes: u64,
    /// Rate that each vCPU is limited to at last, bytes/s of whole frames; `None` without a
    /// throttle.
    pub most_bytes_per_s: Option<u64>,
}

/// A pass of it.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct ForecastPass {
    /// Frames sent, with and without content.
    pub frames: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// How long that takes, ms.
    pub time_ms: f64,
    /// Frames that wait after it.
    pub left_frames: u64,
}

/// What would happen.
///
/// Costs a few hundred operations for each pass and vCPU; there are at most `goals.max_passes`.
///
/// Laws (tests below): the verdict after each pass is that of [`judge`]. Without a throttle, and
/// but for what is written in [`RECORD_OVERHEAD`]: over a faster link, and of a guest that writes less, no
/// pass has more frames; what converges does so then, too, and takes longer by no more than passes
/// that make the pause shorter may. With a throttle all converges that only vCPUs write.
pub fn forecast(conditions: &ForecastConditions, curve: &WriteCurve) -> Forecast {
    report_of(conditions, &simulate(conditions, curve, RECORD_OVERHEAD))
}

fn report_of(conditions: &ForecastConditions, course: &SimulatedPrecopy) -> Forecast {
    let SimulatedPrecopy { measured, end, throttle, pending, elapsed } = course;
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
            Judgement::SwitchOver(why) | Judgement::GiveUp(why) => why.to_string(),
            Judgement::KeepGoing => String::new(),
        },
        passes: measured.iter().map(pass).collect(),
        total_time_ms: ms(total),
        downtime_ms: ms(downtime),
        transferred_bytes: measured.iter().fold(rest, |sum, p| sum.saturating_add(p.bytes)),
        most_bytes_per_s: throttle.rate().map(|rate| rate.saturating_mul(PAGE_SIZE)),
    }
}

/// How precopy goes.
struct SimulatedPrecopy {
    measured: Vec<PassMeasurement>,
    /// Never to keep going.
    end: Judgement,
    throttle: Throttle,
    pending: u64,
    elapsed: Duration,
}

/// `record_time` is [`RECORD_OVERHEAD`], but for the laws that hold without it.
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
        let (mut end, mut next) =
            conditions.judge(now, &measured, (dirtied, elapsed), (&by, window));
        if matches!(end, Judgement::SwitchOver(_)) {
            window = window.saturating_add(record_time);
            elapsed = elapsed.saturating_add(record_time);
            (dirtied, by) = curve.with(window, now);
            if let Some(last) = measured.last_mut() {
                last.dirtied = dirtied;
            }
            (end, next) = conditions.judge(now, &measured, (dirtied, elapsed), (&by, window));
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
    use crate::policy::convergence::{Reason, SHRINK_RATIO, TimeoutStrategy};
    use crate::policy::throttle::LONG_PAUSE;

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

    /// Windows of two vCPUs, and something else that writes.
    fn any_windows() -> impl Strategy<Value = Vec<WriteWindow>> {
        let one = (1u64..3000, 0.0f64..40_000.0, 0.0f64..40_000.0, 0.0f64..1000.0);
        let window = one.prop_map(|(ms, a, b, other)| window(ms, a + b + other, vec![a, b]));
        prop::collection::vec(window, 0..7)
    }

    fn any_conditions() -> impl Strategy<Value = ForecastConditions> {
        (1u64 << 20..4 << 30, 16u64..MEMORY, 1u64..1000).prop_map(|(b, p, d)| conditions(b, p, d))
    }

    /// What holds of an `easier` migration beside a `harder` one.
    fn is_easier(
        (easier, harder): (&ForecastConditions, &ForecastConditions),
        (light, heavy): (&WriteCurve, &WriteCurve),
    ) -> Result<(), TestCaseError> {
        let at_once =
            |c: &ForecastConditions, curve| report_of(c, &simulate(c, curve, Duration::ZERO));
        let (easy, hard) = (at_once(easier, light), at_once(harder, heavy));
        for (e, h) in easy.passes.iter().zip(&hard.passes) {
            prop_assert!(e.frames <= h.frames && e.time_ms <= h.time_ms + 1e-6, "{e:?} {h:?}");
        }
        // A link's rate is a whole number of bytes over one of nanoseconds.
        let wider = Goals { downtime: easier.goals.downtime.mul_f64(1.01), ..easier.goals };
        let wide = at_once(&ForecastConditions { goals: wider, ..*easier }, light);
        if hard.converges {
            prop_assert!(wide.converges, "{wide:?} beside {hard:?}");
            let shorter = ms(wider.downtime) / (1.0 - SHRINK_RATIO)
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
        fn forecast_verdict_is_that_of_judge(
            c in any_conditions(),
            windows in any_windows(),
            throttled in any::<bool>(),
        ) {
            let c = ForecastConditions { throttle: throttled, ..c };
            let course = simulate(&c, &WriteCurve::new(&windows, MEMORY), RECORD_OVERHEAD);
            for (i, pass) in course.measured.iter().enumerate() {
                // No time limit is near: the time spent decides nothing.
                let verdict = judge(&c.goals, &course.measured[..=i], pass.dirtied, Duration::ZERO);
                if i + 1 < course.measured.len() {
                    let approach = matches!(
                        verdict,
                        Judgement::SwitchOver(Reason::Fits { expected, .. })
                            if throttled && expected > LONG_PAUSE
                    );
                    prop_assert!(approach || verdict == Judgement::KeepGoing, "{verdict:?}");
                } else {
                    let (kind, end) =
                        (std::mem::discriminant(&verdict), std::mem::discriminant(&course.end));
                    prop_assert_eq!(kind, end);
                    prop_assert_eq!(pass.dirtied, course.pending);
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
            let faster = ForecastConditions { bytes_per_s: (c.bytes_per_s as f64 * by) as u64, ..c };
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
        assert_eq!(at(10_000), 4000, "memory has no more");
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
        // All of 64 MiB in a quarter of a second, over 40 MB/s.
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
