//! Holds a checkpoint run between two checkpoints, so that another process can continue it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The requests to a run's thread, and where the thread is.
#[derive(Default)]
pub(super) struct RunHold {
    state: Mutex<HoldState>,
    changed: Condvar,
    /// Whether the thread is to end the series of checkpoints that it takes.
    interrupt: AtomicBool,
}

#[derive(Default)]
struct HoldState {
    is_cancelled: bool,
    /// Whether an upgrade wants the run to rest.
    is_wanted: bool,
    /// Whether the run is to end here, because it continues in another process.
    moves: bool,
    /// Whether the thread rests.
    rests: bool,
    is_over: bool,
}

/// What a run's thread does after a series of checkpoints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AfterSeries {
    /// The run is over.
    End,
    /// It takes further checkpoints.
    Continue,
    /// It continues in another process.
    Move,
}

/// The outcome of asking a run to rest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RunRest {
    /// It takes no checkpoint until it is released.
    Rests,
    /// It has ended.
    Over,
    /// Its checkpoint in progress takes longer.
    Busy,
}

impl RunHold {
    /// Returns what ends a series of checkpoints.
    pub(super) fn interrupt(&self) -> &AtomicBool {
        &self.interrupt
    }

    /// Ends the run after the checkpoint in progress.
    pub(super) fn cancel(&self) {
        self.change(|state| state.is_cancelled = true);
    }

    /// Returns whether the run was asked to rest, or rests.
    pub(super) fn is_wanted(&self) -> bool {
        self.state.lock().is_wanted
    }

    /// Asks the run to rest until [`release`](Self::release), and waits at most `limit` until it
    /// does.
    pub(super) fn hold(&self, limit: Duration) -> RunRest {
        let end = Instant::now() + limit;
        self.change(|state| state.is_wanted = true);
        let mut state = self.state.lock();
        while !state.rests && !state.is_over {
            if self.changed.wait_until(&mut state, end).timed_out() {
                break;
            }
        }
        match (state.rests, state.is_over) {
            (_, true) => RunRest::Over,
            (true, false) => RunRest::Rests,
            (false, false) => RunRest::Busy,
        }
    }

    /// Lets the run continue here.
    pub(super) fn release(&self) {
        self.change(|state| state.is_wanted = false);
    }

    /// Ends a run that rests, because it continues in another process. Returns once it is over, or
    /// false after `limit`.
    pub(super) fn move_away(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        self.change(|state| state.moves = true);
        let mut state = self.state.lock();
        while !state.is_over {
            if self.changed.wait_until(&mut state, end).timed_out() {
                return state.is_over;
            }
        }
        true
    }

    /// Rests while an upgrade wants that, until it is decided where the run continues. For the
    /// run's thread, after a series that was interrupted.
    pub(super) fn rest(&self) -> AfterSeries {
        let mut state = self.state.lock();
        state.rests = state.is_wanted;
        self.changed.notify_all();
        while state.is_wanted && !state.is_cancelled && !state.moves {
            self.changed.wait(&mut state);
        }
        state.rests = false;
        match (state.is_cancelled, state.moves) {
            (true, _) => AfterSeries::End,
            (false, true) => AfterSeries::Move,
            (false, false) => AfterSeries::Continue,
        }
    }

    /// Notes that the run is over.
    pub(super) fn end(&self) {
        self.change(|state| state.is_over = true);
    }

    fn change(&self, change: impl FnOnce(&mut HoldState)) {
        let mut state = self.state.lock();
        change(&mut state);
        let interrupts = state.is_cancelled || state.is_wanted;
        self.interrupt.store(interrupts, Ordering::Relaxed);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// Starts a run that takes no checkpoints. Returns what ended it.
    fn run(hold: &Arc<RunHold>) -> thread::JoinHandle<AfterSeries> {
        let hold = hold.clone();
        thread::spawn(move || {
            let mut after = AfterSeries::Continue;
            while after == AfterSeries::Continue {
                while !hold.interrupt().load(Ordering::Relaxed) {
                    thread::yield_now();
                }
                after = hold.rest();
            }
            hold.end();
            after
        })
    }

    #[test]
    fn run_rests_until_its_place_is_decided() {
        let hold = Arc::new(RunHold::default());
        let thread = run(&hold);
        for _ in 0..100 {
            assert_eq!(hold.hold(LONG), RunRest::Rests);
            hold.release();
        }
        assert_eq!(hold.hold(LONG), RunRest::Rests);
        assert!(hold.move_away(LONG));
        assert_eq!(thread.join().unwrap(), AfterSeries::Move);
        assert_eq!(hold.hold(LONG), RunRest::Over);
    }

    #[test]
    fn resting_run_can_be_cancelled() {
        let hold = Arc::new(RunHold::default());
        let thread = run(&hold);
        assert_eq!(hold.hold(LONG), RunRest::Rests);
        hold.cancel();
        assert_eq!(thread.join().unwrap(), AfterSeries::End);
        assert!(hold.move_away(LONG), "it is over");
    }

    #[test]
    fn busy_run_goes_on() {
        let hold = RunHold::default();
        assert_eq!(hold.hold(Duration::from_millis(1)), RunRest::Busy);
        assert!(hold.interrupt().load(Ordering::Relaxed) && hold.is_wanted());
        hold.release();
        assert!(!hold.interrupt().load(Ordering::Relaxed) && !hold.is_wanted());
    }
}
