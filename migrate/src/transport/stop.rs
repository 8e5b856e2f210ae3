//! The stop flag, which every wait checks.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// A stop request after the point of no return.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TooLate;

const OPEN: u8 = 0;
const CANCELLED: u8 = 1;
const COMMITTED: u8 = 2;
/// The take-over failed after the point of no return.
const TAKE_OVER_FAILED: u8 = 3;

/// A stop flag with a point of no return. The first of a stop request and a commit wins.
#[derive(Debug, Default)]
pub(crate) struct StopFlag {
    state: AtomicU8,
    /// Whether a stop was requested, in time or not.
    requested: AtomicBool,
}

impl StopFlag {
    /// Requests a stop.
    pub(crate) fn cancel(&self) -> Result<(), TooLate> {
        self.requested.store(true, Ordering::SeqCst);
        match self.exchange(OPEN, CANCELLED) {
            Ok(_) | Err(CANCELLED | TAKE_OVER_FAILED) => Ok(()),
            Err(_) => Err(TooLate),
        }
    }

    /// Passes the point of no return. Returns false if a stop was requested first.
    pub(crate) fn commit(&self) -> bool {
        !matches!(self.exchange(OPEN, COMMITTED), Err(CANCELLED))
    }

    /// Accepts stop requests again, at a destination whose take-over has failed.
    pub(crate) fn undo_commit(&self) {
        // Has no effect if the flag was forced meanwhile.
        let _ = self.exchange(COMMITTED, TAKE_OVER_FAILED);
    }

    fn exchange(&self, from: u8, to: u8) -> Result<u8, u8> {
        self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst)
    }

    pub(crate) fn is_committed(&self) -> bool {
        self.state.load(Ordering::SeqCst) == COMMITTED
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.state.load(Ordering::SeqCst) == CANCELLED
    }

    /// Whether a stop was requested, including one that was too late.
    pub(crate) fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// Sets the flag for good, which ends every wait that checks it.
    pub(crate) fn force(&self) {
        self.state.store(CANCELLED, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_is_refused_only_between_commit_and_failure() {
        let stop = StopFlag::default();
        assert!(stop.commit() && !stop.is_requested());
        assert_eq!(stop.cancel(), Err(TooLate));
        assert!(stop.is_requested());
        stop.undo_commit();
        assert_eq!(stop.cancel(), Ok(()));
        // The failure is reported, not a cancellation.
        assert!(!stop.is_cancelled());
    }
}
