//! A vCPU's holds and slices, while a throttle is on and it makes frames dirty too fast.
//!
//! *Hold*: a time for which it does not enter the guest. It hears commands all the while, and a
//! pause ends it. *Slice*: the time after a hold for which it runs; it ends by a timer of the
//! vCPU's own, so that it does not depend on when the collector gets to run. The vCPU then reports
//! and is held until the collector says for how long.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use super::{Command, Counters};
use crate::kvm::ExitTimer;

/// How long it waits for the collector's answer to a report. Without one it runs as it likes.
const ANSWER: Duration = Duration::from_secs(1);

/// Where one vCPU stands with a throttle.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    state: State,
    /// Made for the first slice.
    timer: Option<ExitTimer>,
    /// That there is no timer has been said.
    told: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum State {
    /// It runs as it likes.
    #[default]
    Free,
    /// It is out of the guest, until then or until told.
    Held { since: Instant, until: Option<Instant>, slice: Duration },
    /// It runs until then.
    Slice { until: Instant },
}

impl Hold {
    /// Holds the vCPU until `until`, and then lets it run for `slice`. The wait after a report
    /// becomes part of this.
    pub(super) fn begin(&mut self, until: Instant, slice: Duration, counters: &Counters) {
        let since = match self.state {
            State::Held { since, until: None, .. } => since,
            _ => {
                self.end(counters);
                Instant::now()
            }
        };
        self.state = State::Held { since, until: Some(until), slice };
    }

    /// The slice is over and that has been reported: out of the guest until told, or [`ANSWER`] has
    /// passed.
    pub(super) fn wait(&mut self) {
        self.stop_timer();
        self.state = State::Held { since: Instant::now(), until: None, slice: Duration::ZERO };
    }

    /// Ends hold and slice, if there is one.
    pub(super) fn end(&mut self, counters: &Counters) {
        match std::mem::take(&mut self.state) {
            State::Free => {}
            State::Held { since, .. } => counters.count_hold(since.elapsed()),
            State::Slice { .. } => self.stop_timer(),
        }
    }

    pub(super) fn is_on(&self) -> bool {
        matches!(self.state, State::Held { .. })
    }

    /// Whether it is time to report.
    pub(super) fn slice_is_over(&self) -> bool {
        matches!(self.state, State::Slice { until } if Instant::now() >= until)
    }

    /// The next command. Without a hold it does not wait for one, and with one no longer than that
    /// lasts.
    pub(super) fn next(
        &mut self,
        commands: &Receiver<Command>,
        counters: &Counters,
    ) -> Result<Command, TryRecvError> {
        let State::Held { until, slice, .. } = self.state else { return commands.try_recv() };
        let left = until.map_or(ANSWER, |until| until.saturating_duration_since(Instant::now()));
        match commands.recv_timeout(left) {
            Ok(command) => Ok(command),
            Err(RecvTimeoutError::Timeout) => {
                self.end(counters);
                if until.is_some() {
                    self.begin_slice(slice);
                }
                Err(TryRecvError::Empty)
            }
            Err(RecvTimeoutError::Disconnected) => Err(TryRecvError::Disconnected),
        }
    }

    /// Without a timer it runs until the collector holds it again.
    fn begin_slice(&mut self, slice: Duration) {
        let made = match self.timer.take() {
            Some(timer) => Ok(timer),
            None => ExitTimer::new(),
        };
        // Before the timer starts: its one signal is to come when this has passed.
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
    use std::sync::mpsc;

    use super::*;

    const FAR: Duration = Duration::from_secs(3600);
    const SLICE: Duration = Duration::from_millis(1);

    #[test]
    fn commands_are_heard_during_a_hold_and_its_end_is_counted() {
        crate::kvm::register_kick_handler().unwrap();
        let (sender, commands) = mpsc::channel();
        let (mut hold, counters) = (Hold::default(), Counters::default());
        assert!(matches!(hold.next(&commands, &counters), Err(TryRecvError::Empty)));
        hold.begin(Instant::now() + FAR, SLICE, &counters);
        sender.send(Command::RingsDrained).unwrap();
        assert!(matches!(hold.next(&commands, &counters), Ok(Command::RingsDrained)));
        assert!(hold.is_on() && counters.holds() == 0);
        // Another one takes its place, and is over by itself.
        hold.begin(Instant::now() + 2 * SLICE, SLICE, &counters);
        assert_eq!(counters.holds(), 1);
        assert!(matches!(hold.next(&commands, &counters), Err(TryRecvError::Empty)));
        assert!(!hold.is_on() && counters.holds() == 2);
        assert!(counters.held() >= 2 * SLICE);
        hold.begin(Instant::now() + FAR, SLICE, &counters);
        hold.end(&counters);
        hold.end(&counters);
        assert_eq!(counters.holds(), 3);
        hold.begin(Instant::now() + FAR, SLICE, &counters);
        drop(sender);
        assert!(matches!(hold.next(&commands, &counters), Err(TryRecvError::Disconnected)));
    }

    #[test]
    fn a_slice_ends_and_the_wait_for_an_answer_is_part_of_the_next_hold() {
        crate::kvm::register_kick_handler().unwrap();
        let (sender, commands) = mpsc::channel();
        let (mut hold, counters) = (Hold::default(), Counters::default());
        hold.begin(Instant::now(), SLICE, &counters);
        assert!(!hold.slice_is_over());
        assert!(matches!(hold.next(&commands, &counters), Err(TryRecvError::Empty)));
        // The timer's signal ends this sleep, or the time does.
        while !hold.slice_is_over() {
            std::thread::sleep(SLICE);
        }
        hold.wait();
        sender.send(Command::EndHold).unwrap();
        assert!(matches!(hold.next(&commands, &counters), Ok(Command::EndHold)));
        assert!(hold.is_on() && counters.holds() == 1);
        hold.begin(Instant::now(), SLICE, &counters);
        assert_eq!(counters.holds(), 1, "it goes on");
        assert!(matches!(hold.next(&commands, &counters), Err(TryRecvError::Empty)));
        assert_eq!(counters.holds(), 2);
        hold.end(&counters);
        assert!(!hold.slice_is_over() && counters.holds() == 2);
        // A collector that never answers.
        hold.wait();
        assert!(matches!(hold.next(&commands, &counters), Err(TryRecvError::Empty)));
        assert!(!hold.is_on() && !hold.slice_is_over() && counters.holds() == 3);
        assert!(counters.held() >= ANSWER);
    }
}
