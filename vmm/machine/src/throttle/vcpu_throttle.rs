//! Throttles one vCPU that makes frames dirty too fast.
//!
//! *Hold*: a time for which the vCPU does not enter the guest. It runs jobs all the while, and
//! a pause ends the hold. *Slice*: the time after a hold for which it runs. A timer of the vCPU's
//! own ends the slice, so that this does not depend on when the collector gets to run. The vCPU
//! then reports and stays out of the guest until the collector answers.

use std::time::{Duration, Instant};

use super::meter::HoldMeter;
use crate::actor::{Inbox, Next};
use crate::kvm::ExitTimer;

/// How long the vCPU waits for the collector's answer to a report. Without an answer it runs
/// unthrottled.
const ANSWER: Duration = Duration::from_secs(1);

/// The throttle state of one vCPU.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    state: State,
    /// Created for the first slice.
    timer: Option<ExitTimer>,
    /// Whether the missing-timer warning has already been logged.
    told: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum State {
    /// It runs unthrottled.
    #[default]
    Free,
    /// It stays out of the guest, until `until` or until a job ends the hold.
    Held { since: Instant, until: Option<Instant>, slice: Duration },
    /// It runs until this time, then reports.
    Slice { until: Instant },
}

impl Hold {
    /// Holds the vCPU until `until`, and then lets it run for `slice`. The wait after a report
    /// counts as part of this hold.
    pub(crate) fn begin(&mut self, until: Instant, slice: Duration, meter: &HoldMeter) {
        let since = match self.state {
            State::Held { since, until: None, .. } => since,
            _ => {
                self.end(meter);
                Instant::now()
            }
        };
        self.state = State::Held { since, until: Some(until), slice };
    }

    /// Starts the wait after a reported slice. The vCPU stays out of the guest until a job ends the
    /// wait or [`ANSWER`] has passed.
    pub(crate) fn wait(&mut self) {
        self.stop_timer();
        self.state = State::Held { since: Instant::now(), until: None, slice: Duration::ZERO };
    }

    /// Ends the hold or slice, if there is one.
    pub(crate) fn end(&mut self, meter: &HoldMeter) {
        match std::mem::take(&mut self.state) {
            State::Free => {}
            State::Held { since, .. } => meter.count(since.elapsed()),
            State::Slice { .. } => self.stop_timer(),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        matches!(self.state, State::Held { .. })
    }

    /// Returns whether it is time to report.
    pub(crate) fn slice_is_over(&self) -> bool {
        matches!(self.state, State::Slice { until } if Instant::now() >= until)
    }

    /// Returns the next job. Without a hold it does not wait for one; during a hold it waits at
    /// most until the hold ends.
    pub(crate) fn next<S>(&mut self, inbox: &Inbox<S>, meter: &HoldMeter) -> Next<S> {
        let State::Held { until, slice, .. } = self.state else { return inbox.try_recv() };
        let left = until.map_or(ANSWER, |until| until.saturating_duration_since(Instant::now()));
        let next = inbox.recv_timeout(left);
        if matches!(next, Next::Nothing) {
            self.end(meter);
            if until.is_some() {
                self.begin_slice(slice);
            }
        }
        next
    }

    /// Starts a slice. Without a timer the vCPU runs until the collector holds it again.
    fn begin_slice(&mut self, slice: Duration) {
        let made = match self.timer.take() {
            Some(timer) => Ok(timer),
            None => ExitTimer::new(),
        };
        // Taken before the timer starts, so that this time has passed when the timer's one signal
        // arrives.
        let until = Instant::now() + slice;
        match made.and_then(|timer| timer.start(slice).map(|()| timer)) {
            Ok(timer) => {
                self.timer = Some(timer);
                self.state = State::Slice { until };
            }
            Err(_) if self.told => {}
            Err(e) => {
                self.told = true;
                tracing::warn!("a vCPU has no timer to end its slices: {e}");
            }
        }
    }

    fn stop_timer(&self) {
        if let Some(Err(e)) = self.timer.as_ref().map(ExitTimer::stop) {
            tracing::warn!("a vCPU's timer cannot be stopped: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actor;

    const FAR: Duration = Duration::from_secs(3600);
    const SLICE: Duration = Duration::from_millis(1);

    #[test]
    fn jobs_are_heard_during_a_hold_and_its_end_is_counted() {
        crate::kvm::register_kick_handler().unwrap();
        let (vcpu, inbox) = actor::inbox::<()>("vCPU 0");
        let (mut hold, meter) = (Hold::default(), HoldMeter::default());
        assert!(matches!(hold.next(&inbox, &meter), Next::Nothing));
        hold.begin(Instant::now() + FAR, SLICE, &meter);
        vcpu.tell(|()| ());
        assert!(matches!(hold.next(&inbox, &meter), Next::Job(_)));
        assert!(hold.is_on() && meter.holds() == 0);
        // Another hold replaces it, and ends by itself.
        hold.begin(Instant::now() + 2 * SLICE, SLICE, &meter);
        assert_eq!(meter.holds(), 1);
        assert!(matches!(hold.next(&inbox, &meter), Next::Nothing));
        assert!(!hold.is_on() && meter.holds() == 2);
        assert!(meter.held() >= 2 * SLICE);
        hold.begin(Instant::now() + FAR, SLICE, &meter);
        hold.end(&meter);
        hold.end(&meter);
        assert_eq!(meter.holds(), 3);
        hold.begin(Instant::now() + FAR, SLICE, &meter);
        drop(vcpu);
        assert!(matches!(hold.next(&inbox, &meter), Next::End));
    }

    #[test]
    fn a_slice_ends_and_the_wait_for_an_answer_is_part_of_the_next_hold() {
        crate::kvm::register_kick_handler().unwrap();
        let (vcpu, inbox) = actor::inbox::<()>("vCPU 0");
        let (mut hold, meter) = (Hold::default(), HoldMeter::default());
        hold.begin(Instant::now(), SLICE, &meter);
        assert!(!hold.slice_is_over());
        assert!(matches!(hold.next(&inbox, &meter), Next::Nothing));
        // The timer's signal ends this sleep, or the time does.
        while !hold.slice_is_over() {
            std::thread::sleep(SLICE);
        }
        hold.wait();
        vcpu.tell(|()| ());
        assert!(matches!(hold.next(&inbox, &meter), Next::Job(_)));
        assert!(hold.is_on() && meter.holds() == 1);
        hold.begin(Instant::now(), SLICE, &meter);
        assert_eq!(meter.holds(), 1, "it goes on");
        assert!(matches!(hold.next(&inbox, &meter), Next::Nothing));
        assert_eq!(meter.holds(), 2);
        hold.end(&meter);
        assert!(!hold.slice_is_over() && meter.holds() == 2);
        // A collector that never answers.
        hold.wait();
        assert!(matches!(hold.next(&inbox, &meter), Next::Nothing));
        assert!(!hold.is_on() && !hold.slice_is_over() && meter.holds() == 3);
        assert!(meter.held() >= ANSWER);
    }
}
