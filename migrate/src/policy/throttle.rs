//! Throttles vCPUs while pre-copy makes no progress: a pure function of the passes measured so far,
//! beside [`judge`], with the same [figures](super::figures).
//!
//! | after a pass | the throttle |
//! | --- | --- |
//! | the writes of each vCPU are not known | none |
//! | the rest fits into the downtime target | stays, or the approach begins: see below |
//! | none yet, and the rest is less than `shrink_ratio` of the frames that the pass before the last one sent | none: the guest converges by itself |
//! | none yet, and the rest is more | begins: all vCPUs together get `first_share` of the link |
//! | active, and the rest is less than `shrink_ratio` of the frames that the last pass sent | stays |
//! | active, and the rest is more | the share is multiplied by `tighten_factor`, down to `least_share` |
//!
//! *The approach*: the rest fits, but would pause the guest for longer than `long_pause`, and
//! passes no longer shrink. Then another pass is sent while all vCPUs together have
//! `approach_share` of the link, and further passes while they shrink. A guest that dirties
//! memory as fast as the link carries it then runs slowly for about the time that it would have
//! been paused, and its pause is a small part of that time. The approach happens once in a
//! migration, and never exceeds a limit.
//!
//! All vCPUs have the same rate limit: the highest at which they together keep to the share if they
//! write as in the last pass. So vCPUs that write less than the limit are not slowed, and a program
//! that the guest moves to another vCPU is limited there as well. The limit never rises in a
//! migration, because a looser throttle would lose the progress that it has made.
//!
//! A guest that keeps to a share `s` leaves for the next pass at most `s` times the frames of the
//! last one. Passes of time `t` therefore shrink to a pause of `d` in `log(d / t) / log(s)` passes,
//! which together take `t / (1 - s)`.

use std::time::Duration;

use crate::policy::convergence::{
    Goals, Judgement, PassMeasurement, Reason, expected_downtime, frame_rate, judge, link_rate,
    shrinks,
};
use crate::policy::figures::FIGURES;

/// The throttle of a guest's vCPUs.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) enum Throttle {
    /// Full speed.
    #[default]
    Off,
    /// Limited to a rate.
    On {
        /// Share of the link's rate for all vCPUs together.
        share: f64,
        /// Limit of each vCPU, dirty frames a second, at least 1.
        rate: u64,
    },
}

impl Throttle {
    /// Returns the limit of each vCPU, dirty frames a second; `None` at full speed.
    pub(crate) fn rate(&self) -> Option<u64> {
        match self {
            Self::Off => None,
            Self::On { rate, .. } => Some(*rate),
        }
    }
}

/// Frames that vCPUs dirtied between the last two drains.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PassWrites<'a> {
    /// Frames that each vCPU dirtied; empty if they are not known.
    pub(crate) dirtied: &'a [u64],
    /// Time between the drains.
    pub(crate) time: Duration,
}

/// Returns the throttle after a pass. `passes` are those measured so far, oldest first; `pending`
/// frames are to be sent. Costs a sort of one number a vCPU.
///
/// Laws (tests below):
/// - A guest that converges by itself is never throttled.
/// - The rate never rises.
/// - vCPUs that write as in the last pass keep to their share, and the rate is the highest such
///   one.
/// - A vCPU that writes no faster than the rate is not slowed.
/// - A guest with constant dirty rates converges.
pub(crate) fn throttle(
    now: Throttle,
    goals: &Goals,
    passes: &[PassMeasurement],
    pending: u64,
    writes: PassWrites<'_>,
) -> Throttle {
    let link = link_rate(passes).unwrap_or(0);
    let Some(expected) = expected_downtime(pending, link) else { return now };
    if writes.dirtied.is_empty() || expected <= goals.downtime {
        return now;
    }
    let share = match now {
        Throttle::Off if makes_progress(passes, pending) => return now,
        Throttle::Off => FIGURES.first_share,
        Throttle::On { .. } if shrinks(passes, pending) => return now,
        Throttle::On { share, .. } => (share * FIGURES.tighten_factor).max(FIGURES.least_share),
    };
    with_share(now, share, passes, writes)
}

/// Returns the judgement after a pass, which is that of [`judge`] except for the approach, and the
/// throttle from now on. The arguments are those of [`judge`] and [`throttle`].
pub(crate) fn judge_and_throttle(
    now: Throttle,
    goals: &Goals,
    passes: &[PassMeasurement],
    (pending, elapsed): (u64, Duration),
    writes: PassWrites<'_>,
) -> (Judgement, Throttle) {
    let judgement = judge(goals, passes, pending, elapsed);
    match judgement {
        Judgement::KeepGoing => (judgement, throttle(now, goals, passes, pending, writes)),
        Judgement::SwitchOver(Reason::Fits { expected, .. })
            if expected > FIGURES.long_pause && has_room(goals, passes, elapsed, expected) =>
        {
            match approach(now, passes, writes) {
                Some(next) => (Judgement::KeepGoing, next),
                None => (judgement, now),
            }
        }
        _ => (judgement, now),
    }
}

/// Whether two passes of the expected pause's length stay within the limits: a rest that fits now
/// must not be given up for the sake of a shorter pause.
fn has_room(
    goals: &Goals,
    passes: &[PassMeasurement],
    elapsed: Duration,
    expected: Duration,
) -> bool {
    let after = elapsed.saturating_add(expected.saturating_mul(2));
    (passes.len() as u32).saturating_add(1) < goals.max_passes && after < goals.timeout
}

/// Returns the throttle of the approach; `None` if it would slow no vCPU, or is active already.
fn approach(now: Throttle, passes: &[PassMeasurement], writes: PassWrites<'_>) -> Option<Throttle> {
    if matches!(now, Throttle::On { share, .. } if share <= FIGURES.approach_share) {
        return None;
    }
    // With fewer bytes the link's rate is not measured well.
    if passes.iter().map(|p| p.bytes).sum::<u64>() < FIGURES.min_measured_bytes {
        return None;
    }
    let next = with_share(now, FIGURES.approach_share, passes, writes);
    (next.rate() != now.rate()).then_some(next)
}

/// Returns the throttle by which all vCPUs together keep to `share` if they write as in the last
/// pass; never looser than `now`.
fn with_share(
    now: Throttle,
    share: f64,
    passes: &[PassMeasurement],
    writes: PassWrites<'_>,
) -> Throttle {
    let Some(rate) = frame_rate(passes).filter(|_| !writes.time.is_zero()) else { return now };
    let frames = share * rate;
    let seconds = writes.time.as_secs_f64();
    let level = level(writes.dirtied, frames * seconds);
    let rate = level.map(|frames| ((frames / seconds) as u64).max(1));
    match (now, rate) {
        // Devices outrun the link, not vCPUs.
        (Throttle::Off, None) => now,
        (Throttle::Off, Some(rate)) => Throttle::On { share, rate },
        (Throttle::On { rate: before, .. }, rate) => {
            Throttle::On { share, rate: rate.map_or(before, |rate| rate.min(before)) }
        }
    }
}

/// Whether the pending frames are much fewer than the pass before the last one sent, or only one
/// pass was sent.
fn makes_progress(passes: &[PassMeasurement], pending: u64) -> bool {
    passes.len() < 2 || shrinks(&passes[..passes.len() - 1], pending)
}

/// Returns the highest limit for each value at which their sum is at most `all`; `None` if the sum
/// needs no limit. At least 0.
fn level(each: &[u64], all: f64) -> Option<f64> {
    let mut ascending = each.to_vec();
    ascending.sort_unstable();
    let mut left = all;
    for (covered, one) in ascending.iter().enumerate() {
        let even = left / (ascending.len() - covered) as f64;
        if *one as f64 > even {
            return Some(even);
        }
        left -= *one as f64;
    }
    None
}

#[cfg(test)]
mod tests {
    use driftline_dirty_tracker::PAGE_SIZE;
    use proptest::prelude::*;

    use super::*;
    use crate::policy::arbitrary::passes;
    use crate::policy::convergence::{Judgement, TimeoutStrategy, judge};

    const SECOND: Duration = Duration::from_secs(1);

    fn goals(downtime: Duration) -> Goals {
        let strategy = TimeoutStrategy::Cancel;
        Goals { downtime, max_passes: 60, timeout: Duration::MAX, strategy }
    }

    /// A pass of `frames` over a link of `link` bytes/s.
    fn pass(frames: u64, dirtied: u64, link: u64) -> PassMeasurement {
        let bytes = frames * PAGE_SIZE;
        let time = Duration::from_secs_f64(bytes as f64 / link as f64);
        PassMeasurement { frames, bytes, time, dirtied }
    }

    fn any_throttle() -> impl Strategy<Value = Throttle> {
        let on = (FIGURES.least_share..=FIGURES.first_share, 1u64..1 << 30);
        prop_oneof![Just(Throttle::Off), on.prop_map(|(share, rate)| Throttle::On { share, rate }),]
    }

    /// A guest: for each vCPU the frames that it writes over and over, and its frames a second.
    type VcpuRates = Vec<(u64, u64)>;

    fn any_vcpus() -> impl Strategy<Value = VcpuRates> {
        prop::collection::vec((1u64..1 << 18, 0u64..1 << 20), 1..9)
    }

    /// Returns the frames that each vCPU dirties in `time` under `throttle`.
    fn dirtied(vcpus: &VcpuRates, time: Duration, throttle: Throttle) -> Vec<u64> {
        let most = throttle.rate().unwrap_or(u64::MAX);
        let one = |(set, rate): &(u64, u64)| {
            let written = (*rate).min(most) as f64 * time.as_secs_f64();
            (written as u64).min(*set)
        };
        vcpus.iter().map(one).collect()
    }

    /// The passes of a simulated migration.
    struct SimulatedMigration {
        passes: Vec<PassMeasurement>,
        throttles: Vec<Throttle>,
        end: Judgement,
    }

    /// Migrates a guest with constant dirty rates over a link of `link` bytes/s.
    fn migrate(vcpus: &VcpuRates, link: u64, goals: &Goals, allowed: bool) -> SimulatedMigration {
        let (mut passes, mut throttles) = (Vec::new(), vec![Throttle::Off]);
        let mut pending: u64 = vcpus.iter().map(|(set, _)| set).sum();
        let mut elapsed = Duration::ZERO;
        loop {
            let sent = pass(pending, 0, link);
            let now = *throttles.last().unwrap();
            let by = dirtied(vcpus, sent.time, now);
            pending = by.iter().sum();
            passes.push(PassMeasurement { dirtied: pending, ..sent });
            elapsed += sent.time;
            let writes = PassWrites { dirtied: &by, time: sent.time };
            let (end, next) = match allowed {
                true => judge_and_throttle(now, goals, &passes, (pending, elapsed), writes),
                false => (judge(goals, &passes, pending, elapsed), now),
            };
            if end != Judgement::KeepGoing {
                return SimulatedMigration { passes, throttles, end };
            }
            throttles.push(next);
        }
    }

    proptest! {
        #[test]
        fn rate_and_share_never_rise(
            now in any_throttle(), p in passes(6), pending in 0u64..1 << 22,
            by in prop::collection::vec(0u64..1 << 20, 0..9), ms in 1u64..100_000,
        ) {
            let goals = goals(Duration::from_millis(300));
            let window = Duration::from_millis(ms);
            let writes = PassWrites { dirtied: &by, time: window };
            let next = throttle(now, &goals, &p, pending, writes);
            prop_assert_eq!(next, throttle(now, &goals, &p, pending, writes));
            prop_assert!(next.rate().unwrap_or(u64::MAX) <= now.rate().unwrap_or(u64::MAX));
            prop_assert!(next.rate() != Some(0));
            if let (Throttle::On { share: before, .. }, Throttle::On { share, .. }) = (now, next) {
                let tighter = (before * FIGURES.tighten_factor).max(FIGURES.least_share);
                prop_assert!(share == before || share == tighter);
            }
            prop_assert!(now == Throttle::Off || next != Throttle::Off);
        }

        #[test]
        fn level_is_the_highest_within_the_total(
            each in prop::collection::vec(0u64..1 << 20, 1..9), all in 0.0f64..4e6,
        ) {
            let under = |level: f64| each.iter().map(|one| (*one as f64).min(level)).sum::<f64>();
            match level(&each, all) {
                None => prop_assert!(under(f64::INFINITY) <= all + 1e-3),
                Some(level) => {
                    prop_assert!((under(level) - all).abs() < 1e-3, "{level}: {}", under(level));
                    prop_assert!(each.iter().any(|one| *one as f64 > level));
                }
            }
        }

        #[test]
        fn first_throttle_keeps_to_its_share(
            vcpus in any_vcpus(),
            mb in 1u64..2000,
        ) {
            let link = mb * 1_000_000;
            let goals = goals(Duration::from_millis(300));
            let simulated = migrate(&vcpus, link, &goals, true);
            let began = simulated.throttles.iter().position(|t| *t != Throttle::Off);
            let began = began.map(|at| (at, simulated.throttles[at]));
            if let Some((at, Throttle::On { share, rate })) = began {
                prop_assert!(share == FIGURES.first_share || share == FIGURES.approach_share);
                // vCPUs that write as in the last pass keep to it, except for a frame a second of
                // rounding up.
                let window = simulated.passes[at - 1].time;
                let by = dirtied(&vcpus, window, Throttle::Off);
                let seconds = window.as_secs_f64();
                let kept: f64 = by.iter().map(|d| (*d as f64 / seconds).min(rate as f64)).sum();
                prop_assert!(kept <= share * link as f64 / PAGE_SIZE as f64 + vcpus.len() as f64);
            }
        }

        #[test]
        fn converging_guest_is_never_throttled(
            vcpus in any_vcpus(),
            mb in 1u64..2000,
        ) {
            // All vCPUs together dirty less than a pass sends.
            let rate: u64 = vcpus.iter().map(|(_, rate)| rate).sum();
            let link = (mb * 1_000_000).max(rate * PAGE_SIZE * 10 / 7 + PAGE_SIZE);
            let simulated = migrate(&vcpus, link, &goals(Duration::from_millis(300)), true);
            prop_assert!(matches!(simulated.end, Judgement::SwitchOver(_)), "{:?}", simulated.end);
            prop_assert!(simulated.throttles.iter().all(|t| *t == Throttle::Off));
        }

        #[test]
        fn every_steady_guest_converges_with_a_throttle(
            vcpus in any_vcpus(),
            mb in 1u64..2000,
        ) {
            let link = mb * 1_000_000;
            let goals = goals(Duration::from_millis(300));
            let with = migrate(&vcpus, link, &goals, true);
            prop_assert!(matches!(with.end, Judgement::SwitchOver(_)), "{:?}", with.end);
            // From the start of the throttle each pass shrinks, or tightens the throttle for the
            // next one.
            let begins = with.throttles.iter().position(|t| *t != Throttle::Off);
            let Some(begins) = begins else { return Ok(()) };
            let short = FIGURES.short_pause.as_secs_f64();
            let first = with.passes[begins].time.as_secs_f64() / short;
            let later = with.passes.len() - begins;
            let most = first.ln() / FIGURES.shrink_ratio.recip().ln() + 6.0;
            prop_assert!(later as f64 <= most, "{later} for {first}");
        }

        /// A long pause remains only if the throttle is at the approach's share.
        #[test]
        fn approach_shortens_a_long_pause(vcpus in any_vcpus(), mb in 1u64..2000) {
            let link = mb * 1_000_000;
            let goals = goals(Duration::from_millis(300));
            let with = migrate(&vcpus, link, &goals, true);
            let Judgement::SwitchOver(Reason::Fits { expected, .. }) = with.end else {
                return Ok(());
            };
            let sent: u64 = with.passes.iter().map(|p| p.bytes).sum();
            if expected > FIGURES.long_pause && sent >= FIGURES.min_measured_bytes {
                let last = with.throttles.last().unwrap();
                let tight = |share: &f64| *share <= FIGURES.approach_share;
                let tight = matches!(last, Throttle::On { share, .. } if tight(share));
                prop_assert!(tight, "{last:?}: {expected:?}");
            }
            let approaches = with.throttles.windows(2).filter(|t| matches!((t[0], t[1]),
                (Throttle::Off | Throttle::On { .. }, Throttle::On { share, .. })
                    if share == FIGURES.approach_share && t[0] != t[1]));
            prop_assert!(approaches.count() <= 1);
        }

        #[test]
        fn vcpus_below_the_rate_are_not_slowed(
            vcpus in any_vcpus(),
            mb in 1u64..2000,
        ) {
            let goals = goals(Duration::from_millis(300));
            let simulated = migrate(&vcpus, mb * 1_000_000, &goals, true);
            let Some(rate) = simulated.throttles.last().unwrap().rate() else { return Ok(()) };
            for idle in vcpus.iter().filter(|(_, own)| *own <= rate) {
                let idle = vec![*idle];
                let dirty = dirtied(&idle, SECOND, *simulated.throttles.last().unwrap());
                prop_assert_eq!(dirty, dirtied(&idle, SECOND, Throttle::Off));
            }
        }
    }

    const LINK: u64 = 10_000_000;

    #[test]
    fn fast_writer_converges_only_with_a_throttle() {
        // One vCPU writes 256 MiB at 1.2 GB/s, another one writes little; the link has 10 MB/s.
        let vcpus = vec![(1 << 16, 300_000), (100, 50)];
        let goals = goals(Duration::from_millis(300));
        let without = migrate(&vcpus, LINK, &goals, false);
        assert!(matches!(without.end, Judgement::GiveUp(_)), "{:?}", without.end);
        let with = migrate(&vcpus, LINK, &goals, true);
        assert!(matches!(with.end, Judgement::SwitchOver(_)), "{:?}", with.end);
        assert!(with.passes.len() <= 24, "{}", with.passes.len());
        // Both together have 0.6 of the link's 2,441 frames a second. The second one writes 100
        // frames in a pass of 27 s.
        assert_eq!(with.throttles[2].rate(), Some(1461));
        let tightest = with.throttles.last().unwrap();
        assert_eq!(tightest, &with.throttles[2], "the first throttle is enough");
    }

    #[test]
    fn approach_needs_room_before_the_limits() {
        // 700 frames are pending after passes of 1,000: a pause of 287 ms, which fits.
        let passes = [pass(1_000, 1_000, LINK), pass(1_000, 700, LINK)];
        let elapsed = Duration::from_secs(1);
        let judgement = |goals: Goals| {
            let writes = PassWrites { dirtied: &[700], time: passes[1].time };
            judge_and_throttle(Throttle::Off, &goals, &passes, (700, elapsed), writes).0
        };
        let goals = goals(Duration::from_millis(300));
        let expected = expected_downtime(700, LINK).unwrap();
        assert_eq!(judgement(goals), Judgement::KeepGoing);
        let short = Goals { timeout: elapsed + expected * 3 / 2, ..goals };
        let few = Goals { max_passes: 3, ..goals };
        for tight in [short, few] {
            let judgement = judgement(tight);
            assert!(
                matches!(judgement, Judgement::SwitchOver(Reason::Fits { .. })),
                "{judgement:?}"
            );
        }
    }

    #[test]
    fn throttle_begins_and_tightens_only_without_progress() {
        let goals = goals(Duration::from_millis(300));
        let (big, half) = (pass(40_000, 40_000, LINK), pass(20_000, 20_000, LINK));
        let by = |frames: u64, p: PassMeasurement| (vec![frames], p.time);
        let after = |now, passes: &[PassMeasurement], pending| {
            let (by, window) = by(pending, *passes.last().unwrap());
            throttle(now, &goals, passes, pending, PassWrites { dirtied: &by, time: window })
        };
        assert_eq!(after(Throttle::Off, &[big], 40_000), Throttle::Off, "one pass is too few");
        assert_eq!(after(Throttle::Off, &[big, big], 27_000), Throttle::Off, "passes shrink");
        assert_eq!(
            after(Throttle::Off, &[big, half], 20_000),
            Throttle::Off,
            "passes shrink slowly"
        );
        let first = after(Throttle::Off, &[big, big], 40_000);
        assert_eq!(first, Throttle::On { share: 0.6, rate: 1464 });
        assert_eq!(after(first, &[big, big, big], 24_000), first, "passes shrink");
        let tighter = after(first, &[big, big, big], 30_000);
        assert_eq!(tighter, Throttle::On { share: 0.3, rate: 732 });
        assert_eq!(after(first, &[big, big, big], 500), first, "the rest fits");
        let unknown = throttle(
            Throttle::Off,
            &goals,
            &[big, big],
            40_000,
            PassWrites { dirtied: &[], time: SECOND },
        );
        assert_eq!(unknown, Throttle::Off);
        let others = throttle(
            Throttle::Off,
            &goals,
            &[big, big],
            40_000,
            PassWrites { dirtied: &[10, 20], time: big.time },
        );
        assert_eq!(others, Throttle::Off, "devices write, not vCPUs");
        // Compressed to a quarter, four times as many frames fit onto the link.
        let packed = PassMeasurement { bytes: big.bytes / 4, time: big.time / 4, ..big };
        let rate = after(Throttle::Off, &[packed, packed], 40_000).rate();
        assert_eq!(rate, Some(1464 * 4 + 3), "{rate:?}");
    }
}
