//! Throttles one vCPU that makes frames dirty too fast.
//!
//! - *Stall*: a time for which the vCPU does not enter the guest. It runs jobs meanwhile, and a
//!   pause ends the stall.
//! - *Slice*: the time after a stall for which the vCPU runs. A timer of the vCPU ends the slice,
//!   so that its length does not depend on when the collector is scheduled. The vCPU then reports
//!   and does not enter the guest until the collector answers.

use std::time::{Duration, Instant};

use super::meter::StallMeter;
use crate::actor::{Inbox, Next};
use crate::kvm::ExitTimer;

/// Limit on waiting for the collector's answer to a report. Without an answer the vCPU runs
/// unthrottled.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// The throttle state of one vCPU.
#[derive(Debug, Default)]
pub(crate) struct ThrottleState {
    state: StallState,
    /// Created for the first slice.
    timer: Option<ExitTimer>,
    /// Whether the missing-timer warning has already been logged.
    warned: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum StallState {
    /// The vCPU runs unthrottled.
    #[default]
    Unthrottled,
    /// The vCPU does not enter the guest, until `until` or until a job ends the stall.
    Stalled { until: Option<Instant>, slice: Duration },
    /// The vCPU runs until this time, then reports.
    Slice { until: Instant },
}

impl ThrottleState {
    /// Stalls the vCPU until `until`, and then lets it run for `slice`. The wait after a report
    /// counts as part of this stall.
    pub(crate) fn begin(&mut self, until: Instant, slice: Duration, meter: &StallMeter) {
        if !matches!(self.state, StallState::Stalled { until: None, .. }) {
            self.end(meter);
        }
        meter.begin();
        self.state = StallState::Stalled { until: Some(until), slice };
    }

    /// Starts the wait after a reported slice. The vCPU stays out of the guest until a job ends the
    /// wait or [`ANSWER_LIMIT`] has passed.
    pub(crate) fn wait(&mut self, meter: &StallMeter) {
        self.stop_timer();
        meter.begin();
        self.state = StallState::Stalled { until: None, slice: Duration::ZERO };
    }

    /// Ends the stall or slice, if there is one.
    pub(crate) fn end(&mut self, meter: &StallMeter) {
        match std::mem::take(&mut self.state) {
            StallState::Unthrottled => {}
            StallState::Stalled { .. } => meter.end(),
            StallState::Slice { .. } => self.stop_timer(),
        }
    }

    pub(crate) fn is_stalled(&self) -> bool {
        matches!(self.state, StallState::Stalled { .. })
    }

    /// Returns whether it is time to report.
    pub(crate) fn slice_is_over(&self) -> bool {
        matches!(self.state, StallState::Slice { until } if Instant::now() >= until)
    }

    /// Returns the next job. Without a stall it does not wait for one; during a stall it waits at
    /// most until the stall ends.
    pub(crate) fn next<S>(&mut self, inbox: &Inbox<S>, meter: &StallMeter) -> Next<S> {
        let StallState::Stalled { until, slice } = self.state else { return inbox.try_recv() };
        let left =
            until.map_or(ANSWER_LIMIT, |until| until.saturating_duration_since(Instant::now()));
        let next = inbox.recv_timeout(left);
        if matches!(next, Next::Nothing) {
            self.end(meter);
            if until.is_some() {
                self.begin_slice(slice);
            }
        }
        next
    }

    /// Starts a slice. Without a timer the vCPU runs until the collector stalls it again.
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
                self.state = StallState::Slice { until };
            }
            Err(_) if self.warned => {}
            Err(e) => {
                self.warned = true;
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
    fn jobs_run_during_a_stall() {
        crate::kvm::register_kick_handler().unwrap();
        let (vcpu, inbox) = actor::inbox::<()>("vCPU 0");
        let (mut throttle, meter) = (ThrottleState::default(), StallMeter::default());
        assert!(matches!(throttle.next(&inbox, &meter), Next::Nothing));
        throttle.begin(Instant::now() + FAR, SLICE, &meter);
        vcpu.tell(|()| ());
        assert!(matches!(throttle.next(&inbox, &meter), Next::Job(_)));
        assert!(throttle.is_stalled() && meter.stalls() == 0);
        let before = meter.stalled();
        std::thread::sleep(SLICE);
        assert!(meter.stalled() >= before + SLICE, "a stall in progress counts");
        // Another stall replaces it, and ends by itself.
        throttle.begin(Instant::now() + 2 * SLICE, SLICE, &meter);
        assert_eq!(meter.stalls(), 1);
        assert!(matches!(throttle.next(&inbox, &meter), Next::Nothing));
        assert!(!throttle.is_stalled() && meter.stalls() == 2);
        assert!(meter.stalled() >= 2 * SLICE);
        throttle.begin(Instant::now() + FAR, SLICE, &meter);
        throttle.end(&meter);
        throttle.end(&meter);
        assert_eq!(meter.stalls(), 3);
        throttle.begin(Instant::now() + FAR, SLICE, &meter);
        drop(vcpu);
        assert!(matches!(throttle.next(&inbox, &meter), Next::End));
    }

    #[test]
    fn wait_for_an_answer_belongs_to_the_stall() {
        crate::kvm::register_kick_handler().unwrap();
        let (vcpu, inbox) = actor::inbox::<()>("vCPU 0");
        let (mut throttle, meter) = (ThrottleState::default(), StallMeter::default());
        throttle.begin(Instant::now(), SLICE, &meter);
        assert!(!throttle.slice_is_over());
        assert!(matches!(throttle.next(&inbox, &meter), Next::Nothing));
        // The timer's signal ends this sleep, or the time does.
        while !throttle.slice_is_over() {
            std::thread::sleep(SLICE);
        }
        throttle.wait(&meter);
        vcpu.tell(|()| ());
        assert!(matches!(throttle.next(&inbox, &meter), Next::Job(_)));
        assert!(throttle.is_stalled() && meter.stalls() == 1);
        throttle.begin(Instant::now(), SLICE, &meter);
        assert_eq!(meter.stalls(), 1, "the stall continues");
        assert!(matches!(throttle.next(&inbox, &meter), Next::Nothing));
        assert_eq!(meter.stalls(), 2);
        throttle.end(&meter);
        assert!(!throttle.slice_is_over() && meter.stalls() == 2);
        // A collector that never answers.
        throttle.wait(&meter);
        assert!(matches!(throttle.next(&inbox, &meter), Next::Nothing));
        assert!(!throttle.is_stalled() && !throttle.slice_is_over() && meter.stalls() == 3);
        assert!(meter.stalled() >= ANSWER_LIMIT);
    }
}
