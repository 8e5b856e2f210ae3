//! Suspends a checkpoint run between two checkpoints, so that another process can continue it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The requests to a run's thread, and where the thread is.
#[derive(Default)]
pub(super) struct RunSuspension {
    state: Mutex<SuspensionState>,
    changed: Condvar,
    /// Whether the thread is to end the series of checkpoints that it takes.
    interrupt: AtomicBool,
}

#[derive(Default)]
struct SuspensionState {
    is_cancelled: bool,
    /// Whether an upgrade wants the run to be suspended.
    is_requested: bool,
    /// Whether the run is to end here, because it continues in another process.
    moves: bool,
    /// Whether the thread waits for the decision where the run continues.
    is_suspended: bool,
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

/// The outcome of a request to suspend a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SuspendOutcome {
    /// It takes no checkpoint until it is resumed.
    Suspended,
    /// It has ended.
    Over,
    /// Its checkpoint in progress takes longer.
    Busy,
}

impl RunSuspension {
    /// Returns the flag that ends a series of checkpoints.
    pub(super) fn interrupt(&self) -> &AtomicBool {
        &self.interrupt
    }

    /// Ends the run after the checkpoint in progress.
    pub(super) fn cancel(&self) {
        self.change(|state| state.is_cancelled = true);
    }

    /// Returns whether the run is suspended, or is to be.
    pub(super) fn is_requested(&self) -> bool {
        self.state.lock().is_requested
    }

    /// Suspends the run until [`resume`](Self::resume). Waits at most `limit` for the checkpoint in
    /// progress; after that the run is suspended later.
    pub(super) fn suspend(&self, limit: Duration) -> SuspendOutcome {
        let end = Instant::now() + limit;
        self.change(|state| state.is_requested = true);
        let mut state = self.state.lock();
        while !state.is_suspended && !state.is_over {
            if self.changed.wait_until(&mut state, end).timed_out() {
                break;
            }
        }
        match (state.is_suspended, state.is_over) {
            (_, true) => SuspendOutcome::Over,
            (true, false) => SuspendOutcome::Suspended,
            (false, false) => SuspendOutcome::Busy,
        }
    }

    /// Lets the run continue here.
    pub(super) fn resume(&self) {
        self.change(|state| state.is_requested = false);
    }

    /// Ends a suspended run, because it continues in another process. Returns true once it is over,
    /// or false after `limit`.
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

    /// Waits until it is decided where the run continues; returns at once if no upgrade is under
    /// way. For the run's thread, after a series that was interrupted.
    pub(super) fn await_decision(&self) -> AfterSeries {
        let mut state = self.state.lock();
        state.is_suspended = state.is_requested;
        self.changed.notify_all();
        while state.is_requested && !state.is_cancelled && !state.moves {
            self.changed.wait(&mut state);
        }
        state.is_suspended = false;
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

    fn change(&self, change: impl FnOnce(&mut SuspensionState)) {
        let mut state = self.state.lock();
        change(&mut state);
        let interrupts = state.is_cancelled || state.is_requested;
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
    fn start(suspension: &Arc<RunSuspension>) -> thread::JoinHandle<AfterSeries> {
        let run = suspension.clone();
        thread::spawn(move || {
            let mut after = AfterSeries::Continue;
            while after == AfterSeries::Continue {
                while !run.interrupt().load(Ordering::Relaxed) {
                    thread::yield_now();
                }
                after = run.await_decision();
            }
            run.end();
            after
        })
    }

    #[test]
    fn run_is_suspended_until_its_place_is_decided() {
        let run = Arc::new(RunSuspension::default());
        let thread = start(&run);
        for _ in 0..100 {
            assert_eq!(run.suspend(LONG), SuspendOutcome::Suspended);
            run.resume();
        }
        assert_eq!(run.suspend(LONG), SuspendOutcome::Suspended);
        assert!(run.move_away(LONG));
        assert_eq!(thread.join().unwrap(), AfterSeries::Move);
        assert_eq!(run.suspend(LONG), SuspendOutcome::Over);
    }

    #[test]
    fn suspended_run_can_be_cancelled() {
        let run = Arc::new(RunSuspension::default());
        let thread = start(&run);
        assert_eq!(run.suspend(LONG), SuspendOutcome::Suspended);
        run.cancel();
        assert_eq!(thread.join().unwrap(), AfterSeries::End);
        assert!(run.move_away(LONG), "it is over");
    }

    #[test]
    fn busy_run_continues_after_the_request() {
        let run = RunSuspension::default();
        assert_eq!(run.suspend(Duration::from_millis(1)), SuspendOutcome::Busy);
        assert!(run.interrupt().load(Ordering::Relaxed) && run.is_requested());
        run.resume();
        assert!(!run.interrupt().load(Ordering::Relaxed) && !run.is_requested());
    }
}
