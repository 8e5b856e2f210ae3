//! Decides when pre-copy ends: a pure function of the passes measured so far, with the
//! [figures](super::figures) of pre-copy.
//!
//! After each pass the frames that the guest wrote during it are pending.
//!
//! | sending them is expected to take | and | judgement |
//! | --- | --- | --- |
//! | no time: there are none | | switch over |
//! | at most `short_pause` | | switch over: a pause costs about as much by itself |
//! | at most the downtime target | the last pass left less than `shrink_ratio` of what it sent | keep going: the pause becomes shorter |
//! | at most the downtime target | it did not, or a limit is reached | switch over |
//! | longer | no limit is reached | keep going |
//! | longer | a limit is reached | as the strategy says: a long pause, or none |
//!
//! If passes do not shrink, the guest is throttled before a limit is reached. If the pause would
//! fit into the target but would be long, passes under a tight throttle precede it (the approach).
//! [`throttle`](super::throttle) describes both.
//!
//! If the guest keeps its dirty rate, the passes that only make the pause shorter take, in total,
//! at most `1 / (1 - shrink_ratio)` times as long as the pause without these passes.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use driftline_dirty_tracker::PAGE_SIZE;
use serde::{Deserialize, Serialize};

use crate::policy::figures::FIGURES;
use crate::report::{ms, per_second};

/// The action if pre-copy has not converged at a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimeoutStrategy {
    /// Give up; the guest continues here.
    #[default]
    Cancel,
    /// Pause the guest anyway, for the time that the rest takes at the link's rate.
    Switchover,
}

/// The name of a strategy that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownStrategy {
    /// Post-copy, which other monitors offer.
    #[error(
        "the timeout strategy \"postcopy\" is not offered by this version: use cancel or \
         switchover"
    )]
    Postcopy,
    /// Any other name.
    #[error("unknown timeout strategy \"{0}\": use cancel or switchover")]
    Unknown(String),
}

impl FromStr for TimeoutStrategy {
    type Err = UnknownStrategy;

    fn from_str(s: &str) -> Result<Self, UnknownStrategy> {
        match s {
            "cancel" => Ok(Self::Cancel),
            "switchover" => Ok(Self::Switchover),
            "postcopy" => Err(UnknownStrategy::Postcopy),
            _ => Err(UnknownStrategy::Unknown(s.to_owned())),
        }
    }
}

impl fmt::Display for TimeoutStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cancel => "cancel",
            Self::Switchover => "switchover",
        })
    }
}

/// The target and the limits of pre-copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Goals {
    /// Target of the pause.
    pub downtime: Duration,
    /// Upper bound on passes before the last one.
    pub max_passes: u32,
    /// Upper bound on the time of pre-copy.
    pub timeout: Duration,
    /// Action at either limit.
    pub strategy: TimeoutStrategy,
}

impl Default for Goals {
    /// Returns 300 ms, 30 passes, one hour, and the strategy `cancel`.
    fn default() -> Self {
        Self {
            downtime: Duration::from_millis(300),
            max_passes: 30,
            timeout: Duration::from_secs(3600),
            strategy: TimeoutStrategy::Cancel,
        }
    }
}

/// Measurement of one pass, and of the guest's writes during it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PassMeasurement {
    /// Frames sent, with and without content.
    pub frames: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// Time from its start to its acknowledgement.
    pub time: Duration,
    /// Frames that the guest wrote between this pass's drain and the next.
    pub dirtied: u64,
}

/// The decision after a pass, with its reason.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Judgement {
    /// Send the dirty frames as another pass.
    KeepGoing,
    /// Pause the guest.
    SwitchOver(Reason),
    /// Leave the guest at the source.
    GiveUp(LimitReached),
}

/// Why pre-copy ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Reason {
    /// The rest fits into the downtime.
    Fits {
        /// Expected pause.
        expected: Duration,
        /// The target.
        target: Duration,
    },
    /// The guest wrote nothing during the last pass.
    Quiet,
    /// Memory is handed over as it is, so nothing of it is left.
    SameMemory,
    /// A limit was reached.
    Limit(LimitReached),
}

/// A pre-copy that reached the limit of its passes or of its time before the rest fitted into the
/// downtime target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LimitReached {
    /// Number of passes.
    pub passes: u32,
    /// Time spent.
    pub elapsed: Duration,
    /// The guest's dirty rate, bytes/s of whole frames.
    pub dirty_rate: u64,
    /// The link's rate, bytes/s.
    pub link_rate: u64,
    /// Expected pause, if the link's rate is known.
    pub expected: Option<Duration>,
    /// The target.
    pub target: Duration,
}

impl Reason {
    /// Returns the expected pause, if it is known.
    pub(crate) fn expected(&self) -> Option<Duration> {
        match self {
            Self::Fits { expected, .. } => Some(*expected),
            Self::Quiet | Self::SameMemory => None,
            Self::Limit(limit) => limit.expected,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fits { expected, target } => write!(
                f,
                "what is left takes about {:.1} ms, within the downtime target of {:.0} ms",
                ms(*expected),
                ms(*target)
            ),
            Self::Quiet => f.write_str("the guest wrote nothing during the last pass"),
            Self::SameMemory => f.write_str("its memory is handed over, not copied"),
            Self::Limit(limit) => limit.fmt(f),
        }
    }
}

impl fmt::Display for LimitReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passes, elapsed, dirty_rate, link_rate, expected, target } = self;
        write!(
            f,
            "the guest outruns the link: after {passes} passes and {:.1} s it writes {:.1} MB/s, \
             the link carries {:.1} MB/s",
            elapsed.as_secs_f64(),
            *dirty_rate as f64 / 1e6,
            *link_rate as f64 / 1e6
        )?;
        let Some(expected) = expected else { return Ok(()) };
        write!(
            f,
            ", and the pause would take about {:.0} ms where the target is {:.0} ms",
            ms(*expected),
            ms(*target)
        )
    }
}

/// Returns the link's rate in bytes/s, with a bandwidth limit if there is one: that of the last
/// pass with enough bytes, or else of all passes together. `None` before any pass was measured.
pub(crate) fn link_rate(passes: &[PassMeasurement]) -> Option<u64> {
    let rate = |bytes: u64, time: Duration| {
        let seconds = time.as_secs_f64();
        (bytes > 0 && seconds > 0.0).then(|| (bytes as f64 / seconds) as u64)
    };
    let large = passes.iter().rev().find(|p| p.bytes >= FIGURES.min_measured_bytes);
    match large {
        Some(p) => rate(p.bytes, p.time),
        None => rate(passes.iter().map(|p| p.bytes).sum(), passes.iter().map(|p| p.time).sum()),
    }
}

/// Returns the link's rate in frames a second, by the same passes as [`link_rate`]. It accounts for
/// zero frames and compression, which make frames smaller on the wire.
pub(crate) fn frame_rate(passes: &[PassMeasurement]) -> Option<f64> {
    let telling = passes
        .iter()
        .rev()
        .find(|p| p.bytes >= FIGURES.min_measured_bytes)
        .map_or(passes, std::slice::from_ref);
    let seconds = telling.iter().map(|p| p.time).sum::<Duration>().as_secs_f64();
    let frames: u64 = telling.iter().map(|p| p.frames).sum();
    (frames > 0 && seconds > 0.0).then(|| frames as f64 / seconds)
}

/// Returns the expected time to send `frames` with the guest paused; `None` at rate 0.
pub(crate) fn expected_downtime(frames: u64, link_rate: u64) -> Option<Duration> {
    let bytes = frames.saturating_mul(PAGE_SIZE);
    (link_rate > 0).then(|| Duration::from_secs_f64((bytes as f64 / link_rate as f64).min(1e9)))
}

/// Whether the pending frames are less than `shrink_ratio` of the last pass's frames.
pub(crate) fn shrinks(passes: &[PassMeasurement], pending: u64) -> bool {
    passes.last().is_some_and(|p| (pending as f64) < FIGURES.shrink_ratio * p.frames as f64)
}

/// Judges after a pass. `passes` are those measured so far, oldest first; `pending` frames are to
/// be sent; `elapsed` is the time since the first pass began. Allocates nothing.
///
/// Laws (tests below):
/// - With no pending frames the judgement is always to switch over.
/// - At a limit the judgement is never `KeepGoing`.
/// - Fewer pending frames never turn a switch-over into giving up.
/// - A rest that fits into the target is never given up, and another pass precedes its pause only
///   while passes shrink.
pub(crate) fn judge(
    goals: &Goals,
    passes: &[PassMeasurement],
    pending: u64,
    elapsed: Duration,
) -> Judgement {
    if pending == 0 {
        return Judgement::SwitchOver(Reason::Quiet);
    }
    let link_rate = link_rate(passes).unwrap_or(0);
    let expected = expected_downtime(pending, link_rate);
    let done = passes.len() as u32;
    let may_continue = done < goals.max_passes && elapsed < goals.timeout;
    if let Some(expected) = expected.filter(|e| *e <= goals.downtime) {
        if may_continue && expected > FIGURES.short_pause && shrinks(passes, pending) {
            return Judgement::KeepGoing;
        }
        return Judgement::SwitchOver(Reason::Fits { expected, target: goals.downtime });
    }
    if may_continue {
        return Judgement::KeepGoing;
    }
    let dirty_rate = passes.last().map_or(0, |p| {
        let bytes = p.dirtied.saturating_mul(PAGE_SIZE);
        per_second(bytes, p.time)
    });
    let target = goals.downtime;
    let limit = LimitReached { passes: done, elapsed, dirty_rate, link_rate, expected, target };
    match goals.strategy {
        TimeoutStrategy::Cancel => Judgement::GiveUp(limit),
        TimeoutStrategy::Switchover => Judgement::SwitchOver(Reason::Limit(limit)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::arbitrary::passes;

    fn goals() -> impl Strategy<Value = Goals> {
        let strategy =
            prop_oneof![Just(TimeoutStrategy::Cancel), Just(TimeoutStrategy::Switchover)];
        (0u64..2_000, 0u32..40, 0u64..5_000, strategy).prop_map(|(d, max_passes, t, strategy)| {
            let (downtime, timeout) = (Duration::from_millis(d), Duration::from_millis(t));
            Goals { downtime, max_passes, timeout, strategy }
        })
    }

    proptest! {
        #[test]
        fn a_limit_always_ends_precopy(
            g in goals(),
            p in passes(40),
            pending in any::<u64>(),
            ms in 0u64..10_000,
        ) {
            let elapsed = Duration::from_millis(ms);
            let judgement = judge(&g, &p, pending, elapsed);
            if p.len() as u32 >= g.max_passes || elapsed >= g.timeout {
                prop_assert_ne!(judgement, Judgement::KeepGoing);
            }
        }

        #[test]
        fn nothing_pending_switches_over(g in goals(), p in passes(40), ms in 0u64..10_000) {
            let judgement = judge(&g, &p, 0, Duration::from_millis(ms));
            prop_assert_eq!(judgement, Judgement::SwitchOver(Reason::Quiet));
        }

        #[test]
        fn less_pending_never_gives_up(
            g in goals(),
            p in passes(40),
            pending in 0u64..1 << 40,
            less in 0u64..1 << 40,
            ms in 0u64..10_000,
        ) {
            let elapsed = Duration::from_millis(ms);
            if matches!(judge(&g, &p, pending, elapsed), Judgement::SwitchOver(_)) {
                match judge(&g, &p, pending.saturating_sub(less), elapsed) {
                    Judgement::SwitchOver(_) => {}
                    Judgement::KeepGoing => prop_assert!(shrinks(&p, pending.saturating_sub(less))),
                    Judgement::GiveUp(why) => prop_assert!(false, "{why}"),
                }
            }
        }

        #[test]
        fn fitting_rest_is_sent_only_while_passes_shrink(
            g in goals(),
            p in passes(40),
            pending in 1u64..1 << 22,
            ms in 0u64..10_000,
        ) {
            let elapsed = Duration::from_millis(ms);
            let expected = link_rate(&p).and_then(|rate| expected_downtime(pending, rate));
            if let Some(expected) = expected.filter(|e| *e <= g.downtime) {
                match judge(&g, &p, pending, elapsed) {
                    Judgement::SwitchOver(_) => {}
                    Judgement::KeepGoing => {
                        prop_assert!(expected > FIGURES.short_pause && shrinks(&p, pending));
                    }
                    Judgement::GiveUp(why) => prop_assert!(false, "{why}"),
                }
            }
        }

        /// With a constant dirty rate and a constant link, the passes that only make the pause
        /// shorter stay within the bound in the module's documentation.
        #[test]
        fn extra_passes_have_a_bounded_cost(
            link in 1u64 << 20..1 << 34,
            share in 0.0f64..1.0,
            set in 1u64..1 << 22,
            target_ms in 2u64..1000,
        ) {
            let goals = Goals {
                downtime: Duration::from_millis(target_ms),
                max_passes: 4095,
                timeout: Duration::from_secs(3600),
                strategy: TimeoutStrategy::Cancel,
            };
            let time = |frames: u64| {
                Duration::from_secs_f64((frames * PAGE_SIZE) as f64 / link as f64)
            };
            let (mut passes, mut pending) = (Vec::new(), set);
            let (mut fits, mut extra) = (None, Duration::ZERO);
            for _ in 0..200 {
                if fits.is_some() {
                    extra += time(pending);
                }
                let dirtied = (pending as f64 * share) as u64;
                let bytes = pending * PAGE_SIZE;
                let spent = time(pending);
                passes.push(PassMeasurement { frames: pending, bytes, time: spent, dirtied });
                pending = dirtied;
                if fits.is_none() && time(pending) <= goals.downtime {
                    fits = Some(time(pending));
                }
                match judge(&goals, &passes, pending, Duration::ZERO) {
                    Judgement::KeepGoing => {}
                    _ => break,
                }
            }
            if let Some(fits) = fits {
                let most = fits.mul_f64(1.0 / (1.0 - FIGURES.shrink_ratio))
                    + Duration::from_micros(10);
                prop_assert!(extra <= most, "{extra:?} for {fits:?}");
            }
        }

        #[test]
        fn only_strategy_cancel_gives_up(
            g in goals(),
            p in passes(40),
            pending in any::<u64>(),
            ms in 0u64..10_000,
        ) {
            if let Judgement::GiveUp(reason) = judge(&g, &p, pending, Duration::from_millis(ms)) {
                prop_assert_eq!(g.strategy, TimeoutStrategy::Cancel);
                prop_assert!(reason.to_string().contains("outruns the link"));
            }
        }

        #[test]
        fn switch_over_by_itself_fits_the_target(
            g in goals(),
            p in passes(40),
            pending in 1u64..1 << 40,
            ms in 0u64..10_000,
        ) {
            let judgement = judge(&g, &p, pending, Duration::from_millis(ms));
            if let Judgement::SwitchOver(Reason::Fits { expected, target }) = judgement {
                prop_assert!(expected <= target && target == g.downtime);
            }
        }
    }

    #[test]
    fn halving_dirty_set_converges() {
        let goals = Goals {
            downtime: Duration::from_millis(300),
            max_passes: 30,
            timeout: Duration::from_secs(3600),
            strategy: TimeoutStrategy::Cancel,
        };
        // 100 MB/s: 300 ms carry 7,324 frames.
        let pass = |frames: u64| PassMeasurement {
            frames,
            bytes: frames * PAGE_SIZE,
            time: Duration::from_secs_f64(frames as f64 * PAGE_SIZE as f64 / 100e6),
            dirtied: frames / 2,
        };
        let mut passes = vec![pass(64_000)];
        let mut pending = 32_000;
        while judge(&goals, &passes, pending, Duration::from_secs(1)) == Judgement::KeepGoing {
            passes.push(pass(pending));
            pending /= 2;
        }
        // It fits after four passes, and 31 frames take less than 2 ms.
        assert_eq!((passes.len(), pending), (11, 31));
    }

    #[test]
    fn postcopy_strategy_is_refused_by_name() {
        assert_eq!("switchover".parse(), Ok(TimeoutStrategy::Switchover));
        assert_eq!("cancel".parse(), Ok(TimeoutStrategy::Cancel));
        assert_eq!("postcopy".parse::<TimeoutStrategy>(), Err(UnknownStrategy::Postcopy));
        let e = "x".parse::<TimeoutStrategy>().unwrap_err().to_string();
        assert_eq!(e, "unknown timeout strategy \"x\": use cancel or switchover");
    }
}
