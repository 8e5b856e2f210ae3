//! The request to stop, which every wait looks at.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// The point after which a stop is refused was passed before it was requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TooLate;

const OPEN: u8 = 0;
const CANCELLED: u8 = 1;
const SEALED: u8 = 2;
/// The guest that was sealed does not run here after all.
const UNSEALED: u8 = 3;

/// The stop flag, and the point after which it cannot be set any more: one of the two comes first.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    state: AtomicU8,
    /// It was asked to stop, in time or not.
    asked: AtomicBool,
}

impl Stop {
    pub(crate) fn cancel(&self) -> Result<(), TooLate> {
        self.asked.store(true, Ordering::SeqCst);
        match self.exchange(OPEN, CANCELLED) {
            Ok(_) | Err(CANCELLED | UNSEALED) => Ok(()),
            Err(_) => Err(TooLate),
        }
    }

    /// Passes the point of no return; `false` if it was cancelled before.
    pub(crate) fn seal(&self) -> bool {
        !matches!(self.exchange(OPEN, SEALED), Err(CANCELLED))
    }

    /// At a destination whose take-over has failed: requests to stop are no longer refused.
    pub(crate) fn unseal(&self) {
        // Fails if the flag was forced meanwhile.
        let _ = self.exchange(SEALED, UNSEALED);
    }

    fn exchange(&self, from: u8, to: u8) -> Result<u8, u8> {
        self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst)
    }

    pub(crate) fn is_sealed(&self) -> bool {
        self.state.load(Ordering::SeqCst) == SEALED
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.state.load(Ordering::SeqCst) == CANCELLED
    }

    /// Whether anybody has asked to stop, also when that was too late.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// Sets the flag for good: whoever reads with it is to end.
    pub(crate) fn force(&self) {
        self.state.store(CANCELLED, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_is_refused_between_commit_and_a_failure_alone() {
        let stop = Stop::default();
        assert!(stop.seal() && !stop.is_asked());
        assert_eq!(stop.cancel(), Err(TooLate));
        assert!(stop.is_asked());
        stop.unseal();
        assert_eq!(stop.cancel(), Ok(()));
        // The failure is told as what it is.
        assert!(!stop.is_cancelled());
    }
}
