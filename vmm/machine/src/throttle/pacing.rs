//! Throttles vCPUs that make frames dirty faster than allowed: the collector's part.
//!
//! - *Check*: at each harvest, the collector charges each vCPU the time that its new frames take at
//!   the allowed rate, counted from the previous check. Unused time is not carried over.
//! - *Stall*: a vCPU that owes enough time does not enter the guest until it has paid, `max_stall`
//!   of the [`PacingPolicy`] at a time. Then it runs for at least `min_slice`, however much it
//!   owes. So interrupts never wait longer than one stall, and the guest has at least 1 % of the
//!   time. Debt beyond `max_owed` is dropped.
//! - *Slice*: the time until the next check of a running vCPU, chosen so that one stall pays for
//!   it. After a stall the vCPU itself reports the end of its slice, and waits. A vCPU that has not
//!   been stalled is checked periodically.
//!
//! The collector does not wait here: it gives the vCPU a job, and the vCPU's count of stalls shows
//! when the vCPU runs again.

use std::time::{Duration, Instant};

/// How long vCPUs stall and run.
struct PacingPolicy {
    /// The longest stall. A guest's scheduler, timers and peers do not take it for a hang: it is
    /// five ticks of a kernel with 250 Hz, and a tenth of TCP's minimum retransmission timeout in
    /// Linux (`TCP_RTO_MIN`, 200 ms).
    max_stall: Duration,
    /// The shortest stall. Less debt than this is not worth an exit, and stays owed.
    min_stall: Duration,
    /// The shortest time that a vCPU runs between two stalls: 1 % of the time if each of these is
    /// the longest, 0.2 of 20.2 ms.
    min_slice: Duration,
    /// Time after the end of a slice in which the vCPU may report, before it is checked without a
    /// report. The check kicks the vCPU and costs an exit, so it is made only if the report is late
    /// by more than half a tick of a host's kernel with 250 Hz. A later check would let the vCPU
    /// write unthrottled for longer.
    slice_grace: Duration,
    /// The longest time between two checks of a running vCPU. A program that writes fast and has
    /// just moved to the vCPU may write unthrottled for this long: about 5000 frames at 4 GB/s.
    max_slice: Duration,
    /// The most time that a vCPU can owe. It bounds the time for which a guest has only its minimum
    /// share after a burst: 13 of the longest stalls pay for it.
    max_owed: Duration,
}

const POLICY: PacingPolicy = PacingPolicy {
    max_stall: Duration::from_millis(20),
    min_stall: Duration::from_millis(1),
    min_slice: Duration::from_micros(200),
    slice_grace: Duration::from_millis(2),
    max_slice: Duration::from_millis(5),
    max_owed: Duration::from_millis(250),
};

/// A vCPU that can be stalled. `vcpu::ThrottleHandle` implements it; tests use a fake.
pub(crate) trait StallTarget {
    /// Stalls the vCPU until `until`, then lets it run for `slice` and report.
    fn stall(&self, until: Instant, slice: Duration);

    /// Ends the vCPU's stall immediately.
    fn end_stall(&self);

    /// Returns the number of completed stalls.
    fn stalls(&self) -> u64;
}

/// All vCPUs and their rate limit, if any.
pub(crate) struct Pacing<B> {
    vcpus: Vec<Paced<B>>,
    /// The time that one frame is charged.
    cost: Option<Duration>,
}

struct Paced<B> {
    target: B,
    /// Frames made dirty as of the last check, and the time of that check.
    dirtied: u64,
    checked: Instant,
    /// Time until which the frames dirtied so far have used up the vCPU's budget.
    paid: Instant,
    slice: Duration,
    state: PacedState,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PacedState {
    /// The vCPU has been running at least since `since`; the next check is due at `check`.
    Runs { since: Instant, check: Instant },
    /// The vCPU is stalled until `until`, and runs again when `stalls` stalls are complete; the
    /// next check is due at `check`.
    Stalled { until: Instant, stalls: u64, check: Instant },
}

impl<B: StallTarget> Pacing<B> {
    /// Creates the pacing of `targets`, without a rate limit.
    pub(crate) fn new(targets: Vec<B>) -> Self {
        let now = Instant::now();
        let state = PacedState::Runs { since: now, check: now };
        let paced = |target| Paced {
            target,
            dirtied: 0,
            checked: now,
            paid: now,
            slice: POLICY.min_slice,
            state,
        };
        Self { vcpus: targets.into_iter().map(paced).collect(), cost: None }
    }

    /// Limits each vCPU to `rate` frames a second from `now` on; `None` ends all stalls. `dirtied`
    /// is the number of frames that each vCPU has made dirty so far. If it is unknown (empty), no
    /// vCPU is throttled.
    pub(crate) fn set_rate(&mut self, rate: Option<u64>, dirtied: &[u64], now: Instant) {
        let before = self.cost;
        let rate = rate.filter(|_| dirtied.len() == self.vcpus.len());
        self.cost = rate.map(|rate| Duration::from_secs_f64(1.0 / rate.max(1) as f64));
        match (before, self.cost) {
            (None, Some(_)) => {
                for (vcpu, dirtied) in self.vcpus.iter_mut().zip(dirtied) {
                    (vcpu.dirtied, vcpu.checked, vcpu.paid) = (*dirtied, now, now);
                    vcpu.slice = POLICY.min_slice;
                    vcpu.state = PacedState::Runs { since: now, check: now + POLICY.min_slice };
                }
            }
            (Some(_), None) => self.vcpus.iter().for_each(|vcpu| vcpu.target.end_stall()),
            // At a change of the rate, time owed at the old rate stays owed.
            (Some(_), Some(_)) | (None, None) => {}
        }
    }

    /// Handles a harvest: `dirtied` is the number of frames that each vCPU has made dirty by `now`.
    pub(crate) fn harvested(&mut self, dirtied: &[u64], now: Instant) {
        let Some(cost) = self.cost else { return };
        for (vcpu, dirtied) in self.vcpus.iter_mut().zip(dirtied) {
            vcpu.check(*dirtied, cost, now);
        }
    }

    /// Answers a vCPU that has run for its slice and waits; the rings have been harvested since.
    /// `stalls` of its stalls were complete when it reported.
    pub(crate) fn reported(&mut self, vcpu: usize, stalls: u64, now: Instant) {
        let Some(vcpu) = self.vcpus.get_mut(vcpu) else { return };
        match (self.cost, vcpu.state) {
            (None, _) => vcpu.target.end_stall(),
            // The vCPU has been sent another stall meanwhile, which answers the report.
            (_, PacedState::Stalled { stalls: expected, .. }) if stalls < expected => {}
            _ if vcpu.target.stalls() > stalls => {}
            _ => vcpu.answer(stalls, now),
        }
    }

    /// Returns the time of the next check, by which the rings must be harvested.
    pub(crate) fn next_check(&self) -> Option<Instant> {
        let check = |vcpu: &Paced<B>| match vcpu.state {
            PacedState::Runs { check, .. } | PacedState::Stalled { check, .. } => check,
        };
        self.cost.and_then(|_| self.vcpus.iter().map(check).min())
    }
}

impl<B: StallTarget> Paced<B> {
    fn check(&mut self, dirtied: u64, cost: Duration, now: Instant) {
        let new = u32::try_from(dirtied.saturating_sub(self.dirtied)).unwrap_or(u32::MAX);
        let takes = cost.saturating_mul(new).min(POLICY.max_owed);
        self.paid = (self.paid.max(self.checked) + takes).min(now + POLICY.max_owed);
        (self.dirtied, self.checked) = (dirtied, now);
        let owed = self.paid.saturating_duration_since(now);
        self.state = match self.state {
            PacedState::Stalled { until, stalls, .. } if self.target.stalls() < stalls => {
                // The host has not scheduled the vCPU yet, or the vCPU waits for a device, or
                // another message caused this harvest early.
                let delay = now.saturating_duration_since(until);
                let check =
                    until.max(now + (delay / 2).clamp(POLICY.min_slice / 2, POLICY.max_stall));
                PacedState::Stalled { until, stalls, check }
            }
            PacedState::Stalled { .. } => {
                PacedState::Runs { since: now, check: now + self.slice + POLICY.slice_grace }
            }
            PacedState::Runs { since, .. }
                if owed >= POLICY.min_stall && now >= since + POLICY.min_slice =>
            {
                self.fit_slice(owed);
                self.stall(owed, self.target.stalls(), now)
            }
            PacedState::Runs { since, check } if now >= check => {
                self.fit_slice(owed);
                PacedState::Runs { since, check: now + self.slice }
            }
            runs @ PacedState::Runs { .. } => runs,
        };
    }

    /// Answers a report. A vCPU that owes almost no time after the longest slice needs no timer.
    fn answer(&mut self, stalls: u64, now: Instant) {
        let owed = self.paid.saturating_duration_since(now);
        let was_longest = self.slice == POLICY.max_slice;
        self.fit_slice(owed);
        self.state = if was_longest && self.slice == POLICY.max_slice && owed < POLICY.min_stall {
            self.target.end_stall();
            PacedState::Runs { since: now, check: now + self.slice }
        } else {
            self.stall(if owed < POLICY.min_stall { Duration::ZERO } else { owed }, stalls, now)
        };
    }

    /// Stalls the vCPU, after `stalls` other stalls, and gives it a slice.
    fn stall(&self, owed: Duration, stalls: u64, now: Instant) -> PacedState {
        let until = now + owed.min(POLICY.max_stall);
        // A vCPU that cannot pay in one stall gets the shortest slice.
        let slice = if owed > POLICY.max_stall { POLICY.min_slice } else { self.slice };
        self.target.stall(until, slice);
        // The vCPU reports before this check, if it has a timer and a processor.
        PacedState::Stalled { until, stalls: stalls + 1, check: until + slice + POLICY.slice_grace }
    }

    /// Shortens slices if one stall does not pay for a slice, and lengthens them if there is little
    /// to pay.
    fn fit_slice(&mut self, owed: Duration) {
        if owed > POLICY.max_stall / 2 {
            self.slice = (self.slice / 2).max(POLICY.min_slice);
        } else if owed < POLICY.max_stall / 8 {
            self.slice = (self.slice * 2).min(POLICY.max_slice);
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
    struct FakeVcpu {
        state: Cell<FakeVcpuState>,
        stalls: Cell<u64>,
    }

    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    enum FakeVcpuState {
        #[default]
        Unthrottled,
        Stalled(Instant, Duration),
        Slice(Instant),
        Waits,
    }

    impl FakeVcpu {
        fn runs(&self) -> bool {
            matches!(self.state.get(), FakeVcpuState::Unthrottled | FakeVcpuState::Slice(_))
        }

        /// Advances to `now`. Returns whether the vCPU reports now.
        fn pass(&self, now: Instant) -> bool {
            match self.state.get() {
                FakeVcpuState::Stalled(until, slice) if now >= until => {
                    self.state.set(FakeVcpuState::Slice(now + slice));
                    self.stalls.set(self.stalls.get() + 1);
                }
                FakeVcpuState::Slice(until) if now >= until => {
                    self.state.set(FakeVcpuState::Waits);
                    return true;
                }
                _ => {}
            }
            false
        }
    }

    impl StallTarget for Rc<FakeVcpu> {
        fn stall(&self, until: Instant, slice: Duration) {
            assert!(!matches!(self.state.get(), FakeVcpuState::Stalled(..)), "one stall at a time");
            self.state.set(FakeVcpuState::Stalled(until, slice));
        }

        fn end_stall(&self) {
            if !self.runs() {
                self.stalls.set(self.stalls.get() + 1);
            }
            self.state.set(FakeVcpuState::Unthrottled);
        }

        fn stalls(&self) -> u64 {
            self.stalls.get()
        }
    }

    /// The activity of one vCPU in a simulation.
    #[derive(Clone, Copy, Debug, Default)]
    struct SimulatedVcpu {
        frames: f64,
        ran: Duration,
        longest_stall: Duration,
        shortest_run: Option<Duration>,
        /// Duration of the current stall or run so far.
        so_far: Duration,
    }

    const STEP: Duration = Duration::from_micros(50);

    /// Simulates vCPUs that would write `speeds` frames a second under a throttle to `rate` for
    /// `time`. Their reports, and checks by the clock, arrive with `delay`.
    fn simulate(speeds: &[u64], rate: u64, time: Duration, delay: Duration) -> Vec<SimulatedVcpu> {
        let fakes: Vec<Rc<FakeVcpu>> = speeds.iter().map(|_| Rc::default()).collect();
        let mut pacing = Pacing::new(fakes.clone());
        let begun = Instant::now();
        let mut did = vec![SimulatedVcpu::default(); speeds.len()];
        let mut reports: Vec<(Instant, usize, u64)> = Vec::new();
        let frames =
            |did: &[SimulatedVcpu]| did.iter().map(|d| d.frames as u64).collect::<Vec<_>>();
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
                    did.longest_stall = did.longest_stall.max(did.so_far);
                }
                if fakes[i].pass(now) {
                    reports.push((now + delay, i, fakes[i].stalls()));
                }
            }
            if let Some(at) = reports.iter().position(|(due, ..)| now >= *due) {
                let (_, i, stalls) = reports.remove(at);
                pacing.harvested(&frames(&did), now);
                pacing.reported(i, stalls, now);
            } else if pacing.next_check().is_some_and(|check| now >= check + delay) {
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
        assert!(
            fakes.iter().all(|f| matches!(f.state.get(), FakeVcpuState::Unthrottled)),
            "no vCPU is stalled"
        );
        assert_eq!(pacing.next_check(), None);
        did
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn only_vcpus_above_the_rate_are_throttled(
            speeds in prop::collection::vec(1u64..1_000_000, 1..5), rate in 100u64..500_000,
            delay_us in 0u64..3000,
        ) {
            let (time, delay) = (Duration::from_secs(2), Duration::from_micros(delay_us));
            for (speed, did) in speeds.iter().zip(simulate(&speeds, rate, time, delay)) {
                let got = did.frames / time.as_secs_f64();
                // The least share, and what was written before the first stall.
                let least = *speed as f64 * 0.025;
                let first = *speed as f64 * (POLICY.min_slice + delay).as_secs_f64() * 4.0;
                let most = (rate as f64 * 1.05).max(least) + first + 1.0;
                prop_assert!(got <= most, "{got} of {speed} at {rate}");
                prop_assert!(did.longest_stall <= POLICY.max_stall + delay + 8 * STEP, "{did:?}");
                prop_assert!(did.shortest_run.is_none_or(|run| run >= POLICY.min_slice), "{did:?}");
                // Between two shortest slices there are a stall and waits for an answer.
                let cycle = POLICY.max_stall + POLICY.min_slice + delay + 8 * STEP;
                let share = POLICY.min_slice.as_secs_f64() / cycle.as_secs_f64();
                prop_assert!(did.ran >= time.mul_f64(0.9 * share), "{did:?}");
                if *speed <= rate * 9 / 10 {
                    prop_assert!(did.ran >= time * 9 / 10, "{did:?} at {speed} below {rate}");
                } else if *speed > rate * 2 && delay_us < 500 {
                    prop_assert!(got >= rate as f64 * 0.7, "{got} of {speed} at {rate}");
                }
            }
        }
    }

    #[test]
    fn unresponsive_vcpu_is_stalled_once_and_debt_bounded() {
        let fake = Rc::new(FakeVcpu::default());
        let mut pacing = Pacing::new(vec![fake.clone()]);
        let begun = Instant::now();
        pacing.set_rate(Some(100), &[0], begun);
        // At this rate, 65,536 frames in one harvest take 11 minutes.
        let mut now = begun + POLICY.min_slice;
        pacing.harvested(&[1 << 16], now);
        let stalled = now + POLICY.max_stall;
        assert_eq!(fake.state.get(), FakeVcpuState::Stalled(stalled, POLICY.min_slice));
        let mut checks = 0;
        while now < begun + Duration::from_secs(10) {
            now = pacing.next_check().unwrap();
            pacing.harvested(&[1 << 16], now);
            checks += 1;
        }
        assert!(checks < 1000, "{checks} checks of a vCPU that does not answer for 10 s");
        assert!(!fake.runs());
        fake.end_stall();
        pacing.harvested(&[1 << 16], now);
        now = pacing.next_check().unwrap();
        pacing.harvested(&[1 << 16], now);
        assert!(fake.runs(), "debt beyond the maximum is dropped");
    }
}
