//! Throttles vCPUs that make frames dirty faster than allowed: the collector's part.
//!
//! *Looks*: at each harvest, the collector charges each vCPU the time that its new frames take at
//! the allowed rate, counted from the previous look. Unused time cannot be saved up. *Hold*: a vCPU
//! that owes enough time stays out of the guest until it has paid, [`HOLD_MOST`] at a time. Then it
//! runs for at least [`SLICE_LEAST`], whatever it owes, so that interrupts never wait longer than
//! one hold, and the guest has 1 % of the time in any case. What it owes beyond [`OWED_MOST`] is
//! forgiven. *Slice*: the time until the next look at a running vCPU, chosen so that one hold pays
//! for it. After a hold the vCPU itself reports the end of its slice, and waits. A vCPU that was
//! not held is looked at by the clock.
//!
//! Nothing here waits: the collector gives the vCPU a job, and the vCPU's count of holds
//! shows when it runs again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::actor::Handle;
use crate::vcpu::{Counters, Vcpu};

/// The longest hold. It is shorter than what a guest's scheduler, timers or peers would take for a
/// stop.
const HOLD_MOST: Duration = Duration::from_millis(20);
/// The shortest hold. Less than this is not worth an exit: it stays owed until there is more.
const HOLD_LEAST: Duration = Duration::from_millis(1);
/// The shortest time that a vCPU runs between two holds.
const SLICE_LEAST: Duration = Duration::from_micros(200);
/// How late a vCPU may report before it is looked at by the clock.
const SLICE_GRACE: Duration = Duration::from_millis(2);
/// The longest time between two looks at a running vCPU. A program that writes fast and has just
/// moved to it may write unthrottled for this long.
const SLICE_MOST: Duration = Duration::from_millis(5);
/// The most time that a vCPU can owe, so that after a burst the guest is not limited to its least
/// share for long.
const OWED_MOST: Duration = Duration::from_millis(250);

/// The means to hold one vCPU.
#[derive(Debug)]
pub(crate) struct Brake {
    /// The handle that kicks.
    pub(crate) vcpu: Handle<Vcpu>,
    pub(crate) counters: Arc<Counters>,
}

/// What pacing asks of a vCPU. [`Brake`] implements it; tests use a fake.
pub(crate) trait Holdable {
    /// Keeps the vCPU out of the guest until `until`, then lets it run for `slice` and report.
    fn hold(&self, until: Instant, slice: Duration);

    /// Lets the vCPU continue at once.
    fn end_hold(&self);

    /// Returns the number of completed holds.
    fn holds(&self) -> u64;
}

impl Holdable for Brake {
    fn hold(&self, until: Instant, slice: Duration) {
        // A vCPU that has ended writes nothing.
        self.vcpu.tell(move |vcpu| vcpu.begin_hold(until, slice));
    }

    fn end_hold(&self) {
        self.vcpu.tell(Vcpu::end_hold);
    }

    fn holds(&self) -> u64 {
        self.counters.throttled.holds()
    }
}

/// All vCPUs and their rate limit, if any.
pub(crate) struct Pacing<B> {
    vcpus: Vec<Paced<B>>,
    /// The time that one frame is charged.
    cost: Option<Duration>,
}

struct Paced<B> {
    brake: B,
    /// Frames made dirty as of the last look, and the time of that look.
    dirtied: u64,
    looked: Instant,
    /// Time until which the frames dirtied so far have used up the vCPU's budget.
    paid: Instant,
    slice: Duration,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// It has been running at least since `since`; the next look is due at `look`.
    Runs { since: Instant, look: Instant },
    /// It is held until `until`, and runs again when `holds` holds are complete; the next look is
    /// due at `look`.
    Held { until: Instant, holds: u64, look: Instant },
}

impl<B: Holdable> Pacing<B> {
    /// Creates it without a rate limit.
    pub(crate) fn new(brakes: Vec<B>) -> Self {
        let now = Instant::now();
        let state = State::Runs { since: now, look: now };
        let paced =
            |brake| Paced { brake, dirtied: 0, looked: now, paid: now, slice: SLICE_LEAST, state };
        Self { vcpus: brakes.into_iter().map(paced).collect(), cost: None }
    }

    /// Limits each vCPU to `rate` frames a second from `now` on; `None` ends all holds. `dirtied`
    /// is the number of frames that each vCPU has made dirty so far. If it is unknown (empty), no
    /// vCPU is throttled.
    pub(crate) fn set_rate(&mut self, rate: Option<u64>, dirtied: &[u64], now: Instant) {
        let before = self.cost;
        let rate = rate.filter(|_| dirtied.len() == self.vcpus.len());
        self.cost = rate.map(|rate| Duration::from_secs_f64(1.0 / rate.max(1) as f64));
        match (before, self.cost) {
            (None, Some(_)) => {
                for (vcpu, dirtied) in self.vcpus.iter_mut().zip(dirtied) {
                    (vcpu.dirtied, vcpu.looked, vcpu.paid) = (*dirtied, now, now);
                    vcpu.slice = SLICE_LEAST;
                    vcpu.state = State::Runs { since: now, look: now + SLICE_LEAST };
                }
            }
            (Some(_), None) => self.vcpus.iter().for_each(|vcpu| vcpu.brake.end_hold()),
            // At a change of the rate, time owed at the old rate stays owed.
            (Some(_), Some(_)) | (None, None) => {}
        }
    }

    /// Handles a harvest: `dirtied` is the number of frames that each vCPU has made dirty by `now`.
    pub(crate) fn harvested(&mut self, dirtied: &[u64], now: Instant) {
        let Some(cost) = self.cost else { return };
        for (vcpu, dirtied) in self.vcpus.iter_mut().zip(dirtied) {
            vcpu.look(*dirtied, cost, now);
        }
    }

    /// Answers a vCPU that has run for its slice and waits; the rings have been harvested since.
    /// `holds` of its holds were complete when it reported.
    pub(crate) fn reported(&mut self, vcpu: usize, holds: u64, now: Instant) {
        let Some(vcpu) = self.vcpus.get_mut(vcpu) else { return };
        match (self.cost, vcpu.state) {
            (None, _) => vcpu.brake.end_hold(),
            // The vCPU has been sent another hold meanwhile, which answers the report.
            (_, State::Held { holds: expected, .. }) if holds < expected => {}
            _ if vcpu.brake.holds() > holds => {}
            _ => vcpu.answer(holds, now),
        }
    }

    /// Returns when the rings should be harvested again at the latest.
    pub(crate) fn next_look(&self) -> Option<Instant> {
        let look = |vcpu: &Paced<B>| match vcpu.state {
            State::Runs { look, .. } | State::Held { look, .. } => look,
        };
        self.cost.and_then(|_| self.vcpus.iter().map(look).min())
    }
}

impl<B: Holdable> Paced<B> {
    fn look(&mut self, dirtied: u64, cost: Duration, now: Instant) {
        let new = u32::try_from(dirtied.saturating_sub(self.dirtied)).unwrap_or(u32::MAX);
        let takes = cost.saturating_mul(new).min(OWED_MOST);
        self.paid = (self.paid.max(self.looked) + takes).min(now + OWED_MOST);
        (self.dirtied, self.looked) = (dirtied, now);
        let owed = self.paid.saturating_duration_since(now);
        self.state = match self.state {
            State::Held { until, holds, .. } if self.brake.holds() < holds => {
                // The host has not scheduled it yet, or it waits for a device, or another message
                // caused this harvest early.
                let late = now.saturating_duration_since(until);
                let look = until.max(now + (late / 2).clamp(SLICE_LEAST / 2, HOLD_MOST));
                State::Held { until, holds, look }
            }
            State::Held { .. } => State::Runs { since: now, look: now + self.slice + SLICE_GRACE },
            State::Runs { since, .. } if owed >= HOLD_LEAST && now >= since + SLICE_LEAST => {
                self.fit_slice(owed);
                self.hold(owed, self.brake.holds(), now)
            }
            State::Runs { since, look } if now >= look => {
                self.fit_slice(owed);
                State::Runs { since, look: now + self.slice }
            }
            runs @ State::Runs { .. } => runs,
        };
    }

    /// Answers a report. A vCPU that owes next to nothing after the longest slice needs no more
    /// timers.
    fn answer(&mut self, holds: u64, now: Instant) {
        let owed = self.paid.saturating_duration_since(now);
        let was_longest = self.slice == SLICE_MOST;
        self.fit_slice(owed);
        self.state = if was_longest && self.slice == SLICE_MOST && owed < HOLD_LEAST {
            self.brake.end_hold();
            State::Runs { since: now, look: now + self.slice }
        } else {
            self.hold(if owed < HOLD_LEAST { Duration::ZERO } else { owed }, holds, now)
        };
    }

    /// Holds the vCPU, after `holds` other holds, and gives it a slice.
    fn hold(&self, owed: Duration, holds: u64, now: Instant) -> State {
        let until = now + owed.min(HOLD_MOST);
        // A vCPU that cannot pay in one hold gets the shortest slice.
        let slice = if owed > HOLD_MOST { SLICE_LEAST } else { self.slice };
        self.brake.hold(until, slice);
        // The vCPU reports before this look, if it has a timer and a processor.
        State::Held { until, holds: holds + 1, look: until + slice + SLICE_GRACE }
    }

    /// Shortens slices if one hold does not pay for a slice, and lengthens them if there is little
    /// to pay.
    fn fit_slice(&mut self, owed: Duration) {
        if owed > HOLD_MOST / 2 {
            self.slice = (self.slice / 2).max(SLICE_LEAST);
        } else if owed < HOLD_MOST / 8 {
            self.slice = (self.slice * 2).min(SLICE_MOST);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;

    /// A vCPU on the test's own clock.
    #[derive(Default)]
    struct Fake {
        state: Cell<Stands>,
        holds: Cell<u64>,
    }

    #[derive(Clone, Copy, Default)]
    enum Stands {
        #[default]
        Free,
        Held(Instant, Duration),
        Slice(Instant),
        Waits,
    }

    impl Fake {
        fn runs(&self) -> bool {
            matches!(self.state.get(), Stands::Free | Stands::Slice(_))
        }

        /// Advances to `now`. Returns whether the vCPU reports now.
        fn pass(&self, now: Instant) -> bool {
            match self.state.get() {
                Stands::Held(until, slice) if now >= until => {
                    self.state.set(Stands::Slice(now + slice));
                    self.holds.set(self.holds.get() + 1);
                }
                Stands::Slice(until) if now >= until => {
                    self.state.set(Stands::Waits);
                    return true;
                }
                _ => {}
            }
            false
        }
    }

    impl Holdable for Rc<Fake> {
        fn hold(&self, until: Instant, slice: Duration) {
            assert!(!matches!(self.state.get(), Stands::Held(..)), "one hold at a time");
            self.state.set(Stands::Held(until, slice));
        }

        fn end_hold(&self) {
            if !self.runs() {
                self.holds.set(self.holds.get() + 1);
            }
            self.state.set(Stands::Free);
        }

        fn holds(&self) -> u64 {
            self.holds.get()
        }
    }

    /// What one vCPU did in a simulation.
    #[derive(Clone, Copy, Debug, Default)]
    struct Did {
        frames: f64,
        ran: Duration,
        longest_hold: Duration,
        shortest_run: Option<Duration>,
        /// Duration of the current hold or run so far.
        so_far: Duration,
    }

    const STEP: Duration = Duration::from_micros(50);

    /// Simulates vCPUs that would write `speeds` frames a second under a throttle to `rate` for
    /// `time`. Their reports, and looks by the clock, arrive `late`.
    fn course(speeds: &[u64], rate: u64, time: Duration, late: Duration) -> Vec<Did> {
        let fakes: Vec<Rc<Fake>> = speeds.iter().map(|_| Rc::default()).collect();
        let mut pacing = Pacing::new(fakes.clone());
        let begun = Instant::now();
        let mut did = vec![Did::default(); speeds.len()];
        let mut reports: Vec<(Instant, usize, u64)> = Vec::new();
        let frames = |did: &[Did]| did.iter().map(|d| d.frames as u64).collect::<Vec<_>>();
        pacing.set_rate(Some(rate), &frames(&did), begun);
        let mut now = begun;
        while now < begun + time {
            now += STEP;
            let ran: Vec<bool> = fakes.iter().map(|fake| fake.runs()).collect();
            for ((i, did), runs) in did.iter_mut().enumerate().zip(&ran) {
                did.so_far += STEP;
                if *runs {
                    did.ran += STEP;
                    did.frames += speeds[i] as f64 * STEP.as_secs_f64();
                } else {
                    did.longest_hold = did.longest_hold.max(did.so_far);
                }
                if fakes[i].pass(now) {
                    reports.push((now + late, i, fakes[i].holds()));
                }
            }
            if let Some(at) = reports.iter().position(|(due, ..)| now >= *due) {
                let (_, i, holds) = reports.remove(at);
                pacing.harvested(&frames(&did), now);
                pacing.reported(i, holds, now);
            } else if pacing.next_look().is_some_and(|look| now >= look + late) {
                pacing.harvested(&frames(&did), now);
            }
            for ((fake, did), ran) in fakes.iter().zip(&mut did).zip(ran) {
                if fake.runs() != ran {
                    if ran {
                        let run = did.shortest_run.unwrap_or(Duration::MAX).min(did.so_far);
                        did.shortest_run = Some(run);
                    }
                    did.so_far = Duration::ZERO;
                }
            }
        }
        pacing.set_rate(None, &[], now);
        assert!(fakes.iter().all(|f| matches!(f.state.get(), Stands::Free)), "all are let go");
        assert_eq!(pacing.next_look(), None);
        did
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn rates_are_kept_down_to_the_least_share_and_nobody_slower_is_held(
            speeds in prop::collection::vec(1u64..1_000_000, 1..5), rate in 100u64..500_000,
            late_us in 0u64..3000,
        ) {
            let (time, late) = (Duration::from_secs(2), Duration::from_micros(late_us));
            for (speed, did) in speeds.iter().zip(course(&speeds, rate, time, late)) {
                let got = did.frames / time.as_secs_f64();
                // The least share, and what was written before the first hold.
                let least = *speed as f64 * 0.025;
                let first = *speed as f64 * (SLICE_LEAST + late).as_secs_f64() * 4.0;
                prop_assert!(got <= (rate as f64 * 1.05).max(least) + first + 1.0, "{got} of {speed} at {rate}");
                prop_assert!(did.longest_hold <= HOLD_MOST + late + 8 * STEP, "{did:?}");
                prop_assert!(did.shortest_run.is_none_or(|run| run >= SLICE_LEAST), "{did:?}");
                // Between two shortest slices there are a hold and waits for an answer.
                let cycle = HOLD_MOST + SLICE_LEAST + late + 8 * STEP;
                prop_assert!(did.ran.as_secs_f64() >= 0.9 * time.as_secs_f64() * SLICE_LEAST.as_secs_f64() / cycle.as_secs_f64(), "{did:?}");
                if *speed <= rate * 9 / 10 {
                    prop_assert!(did.ran >= time * 9 / 10, "{did:?} at {speed} below {rate}");
                } else if *speed > rate * 2 && late_us < 500 {
                    prop_assert!(got >= rate as f64 * 0.7, "{got} of {speed} at {rate}");
                }
            }
        }
    }

    #[test]
    fn a_vcpu_that_does_not_come_back_is_not_asked_twice_and_what_it_owes_is_bounded() {
        let fake = Rc::new(Fake::default());
        let mut pacing = Pacing::new(vec![fake.clone()]);
        let begun = Instant::now();
        pacing.set_rate(Some(100), &[0], begun);
        // At this rate, 65,536 frames at once take 11 minutes.
        let mut now = begun + SLICE_LEAST;
        pacing.harvested(&[1 << 16], now);
        let held = now + HOLD_MOST;
        assert!(matches!(fake.state.get(), Stands::Held(until, SLICE_LEAST) if until == held));
        let mut looks = 0;
        while now < begun + Duration::from_secs(10) {
            now = pacing.next_look().unwrap();
            pacing.harvested(&[1 << 16], now);
            looks += 1;
        }
        assert!(looks < 1000, "{looks} looks at a vCPU that stands for 10 s");
        assert!(!fake.runs());
        fake.end_hold();
        pacing.harvested(&[1 << 16], now);
        now = pacing.next_look().unwrap();
        pacing.harvested(&[1 << 16], now);
        assert!(fake.runs(), "the rest was forgiven");
    }
}
