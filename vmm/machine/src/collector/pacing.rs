//! Holds back vCPUs that make frames dirty faster than a throttle allows: the collector's part of
//! it.
//!
//! *Looks*: whenever rings have been harvested, each vCPU owes the time that its new frames take at
//! the rate, counted from the look before; time that it has not used it cannot save up. *Hold*: a
//! vCPU that owes enough stays out of the guest until it has paid, [`HOLD_MOST`] at a time; then it
//! runs for [`SLICE_LEAST`] at least, whatever it owes, so that interrupts never wait longer than a
//! hold, and the guest has 1 % of the time in any case. What it owes beyond [`OWED_MOST`] is
//! forgiven. *Slice*: the time until the next look at a vCPU that runs, so chosen that a hold pays
//! for it. After a hold the vCPU itself reports when its slice is over, and waits; one that was not
//! held is looked at by the clock.
//!
//! Nothing here waits: a vCPU is told, and its count of holds says when it runs again.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use crate::kvm::ImmediateExit;
use crate::vcpu::{Command, Counters};

/// The longest hold: shorter than what a guest's scheduler, timers or peers would take for a stop.
const HOLD_MOST: Duration = Duration::from_millis(20);
/// Less than this is not worth an exit: it is owed until there is more.
const HOLD_LEAST: Duration = Duration::from_millis(1);
/// How long a vCPU runs between two holds, at least.
const SLICE_LEAST: Duration = Duration::from_micros(200);
/// How late a vCPU may report before it is looked at by the clock.
const SLICE_GRACE: Duration = Duration::from_millis(2);
/// The longest time between two looks at a vCPU that runs: as long as that a program may write that
/// is moved to it.
const SLICE_MOST: Duration = Duration::from_millis(5);
/// The most that is ever owed: after a burst the guest shall not have to do with its least share
/// for long.
const OWED_MOST: Duration = Duration::from_millis(250);

/// The way to hold one vCPU.
#[derive(Debug)]
pub(crate) struct Brake {
    pub(crate) commands: Sender<Command>,
    pub(crate) kick: Arc<ImmediateExit>,
    pub(crate) counters: Arc<Counters>,
}

/// What pacing asks of a vCPU: of a [`Brake`], but for tests.
pub(super) trait Holdable {
    /// Stay out of the guest until then, and report after so long in it.
    fn hold(&self, until: Instant, slice: Duration);

    /// Go on at once.
    fn end_hold(&self);

    /// How many holds are over.
    fn holds(&self) -> u64;
}

impl Brake {
    fn interrupt(&self, command: Command) {
        // A thread that has ended writes nothing any more.
        if self.commands.send(command).is_ok() {
            self.kick.kick();
        }
    }
}

impl Holdable for Brake {
    fn hold(&self, until: Instant, slice: Duration) {
        self.interrupt(Command::Hold(until, slice));
    }

    fn end_hold(&self) {
        self.interrupt(Command::EndHold);
    }

    fn holds(&self) -> u64 {
        self.counters.holds()
    }
}

/// All vCPUs, and the rate that they keep to, if any.
pub(super) struct Pacing<B> {
    vcpus: Vec<Paced<B>>,
    /// What one frame takes.
    cost: Option<Duration>,
}

struct Paced<B> {
    brake: B,
    /// Frames made dirty so far, by the last look, and when that was.
    dirtied: u64,
    looked: Instant,
    /// Until when all frames so far take.
    paid: Instant,
    slice: Duration,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// It has run at least since then; to be looked at then.
    Runs { since: Instant, look: Instant },
    /// It is held until then, and runs again when so many holds are over; to be looked at then.
    Held { until: Instant, holds: u64, look: Instant },
}

impl<B: Holdable> Pacing<B> {
    /// No rate yet.
    pub(super) fn new(brakes: Vec<B>) -> Self {
        let now = Instant::now();
        let state = State::Runs { since: now, look: now };
        let paced =
            |brake| Paced { brake, dirtied: 0, looked: now, paid: now, slice: SLICE_LEAST, state };
        Self { vcpus: brakes.into_iter().map(paced).collect(), cost: None }
    }

    /// From `now` on at most so many frames a second each; `None` lets all of them go. `dirtied` is
    /// what each has made dirty so far; where that is not known nobody is held.
    pub(super) fn set_rate(&mut self, rate: Option<u64>, dirtied: &[u64], now: Instant) {
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
            // Another rate: what is owed by the old one stays owed.
            (Some(_), Some(_)) | (None, None) => {}
        }
    }

    /// Rings have been harvested: each vCPU has made so many frames dirty by `now`.
    pub(super) fn harvested(&mut self, dirtied: &[u64], now: Instant) {
        let Some(cost) = self.cost else { return };
        for (vcpu, dirtied) in self.vcpus.iter_mut().zip(dirtied) {
            vcpu.look(*dirtied, cost, now);
        }
    }

    /// A vCPU has run for its slice, rings have been harvested after that, and it waits for a word.
    /// So many of its holds were over when it reported.
    pub(super) fn reported(&mut self, vcpu: usize, holds: u64, now: Instant) {
        let Some(vcpu) = self.vcpus.get_mut(vcpu) else { return };
        match (self.cost, vcpu.state) {
            (None, _) => vcpu.brake.end_hold(),
            // It has been held meanwhile: it has its word, or will.
            (_, State::Held { holds: expected, .. }) if holds < expected => {}
            _ if vcpu.brake.holds() > holds => {}
            _ => vcpu.answer(holds, now),
        }
    }

    /// When rings should be harvested again at the latest.
    pub(super) fn next_look(&self) -> Option<Instant> {
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
                // Its host has not let it go on yet, or it waits for a device; or somebody else had
                // rings harvested.
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

    /// To a report. Who owes next to nothing in the longest slice needs no more timers.
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

    /// A hold, after `holds` others, and a slice.
    fn hold(&self, owed: Duration, holds: u64, now: Instant) -> State {
        let until = now + owed.min(HOLD_MOST);
        // Who cannot pay at once gets no more than it must.
        let slice = if owed > HOLD_MOST { SLICE_LEAST } else { self.slice };
        self.brake.hold(until, slice);
        // It reports before that, if it has a timer and a processor.
        State::Held { until, holds: holds + 1, look: until + slice + SLICE_GRACE }
    }

    /// Slices become shorter where a hold does not pay for one, and longer where there is little to
    /// pay.
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

    /// A vCPU on a clock of the test's.
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

        /// Whether it has something to report now.
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

    /// What one vCPU did in a course.
    #[derive(Clone, Copy, Debug, Default)]
    struct Did {
        frames: f64,
        ran: Duration,
        longest_hold: Duration,
        shortest_run: Option<Duration>,
        /// Of the hold or run under way.
        so_far: Duration,
    }

    const STEP: Duration = Duration::from_micros(50);

    /// Lets vCPUs that would write `speeds` frames a second run under a throttle to `rate` for
    /// `time`. Their reports, and looks by the clock, come `late`.
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
                // The least share; and what was written before the first hold.
                let least = *speed as f64 * 0.025;
                let first = *speed as f64 * (SLICE_LEAST + late).as_secs_f64() * 4.0;
                prop_assert!(got <= (rate as f64 * 1.05).max(least) + first + 1.0, "{got} of {speed} at {rate}");
                prop_assert!(did.longest_hold <= HOLD_MOST + late + 8 * STEP, "{did:?}");
                prop_assert!(did.shortest_run.is_none_or(|run| run >= SLICE_LEAST), "{did:?}");
                // Between two least slices there are a hold, and waits for a word.
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
        // 65,536 frames at once are 11 minutes.
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
