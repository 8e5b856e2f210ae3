//! The stop request, which every wait checks.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// The stop was requested after the point of no return.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TooLate;

const OPEN: u8 = 0;
const CANCELLED: u8 = 1;
const SEALED: u8 = 2;
/// The take-over failed after the point of no return.
const UNSEALED: u8 = 3;

/// The stop flag and the point of no return: the first of the two wins.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    state: AtomicU8,
    /// Whether a stop was requested, in time or not.
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

    /// Passes the point of no return. Returns false if a stop came first.
    pub(crate) fn seal(&self) -> bool {
        !matches!(self.exchange(OPEN, SEALED), Err(CANCELLED))
    }

    /// Accepts stop requests again, at a destination whose take-over has failed.
    pub(crate) fn unseal(&self) {
        // Has no effect if the flag was forced meanwhile.
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

    /// Whether a stop was requested, even too late.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
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
    fn stop_is_refused_between_commit_and_a_failure_alone() {
        let stop = Stop::default();
        assert!(stop.seal() && !stop.is_asked());
        assert_eq!(stop.cancel(), Err(TooLate));
        assert!(stop.is_asked());
        stop.unseal();
        assert_eq!(stop.cancel(), Ok(()));
        // The failure is reported as such, and not as a cancellation.
        assert!(!stop.is_cancelled());
    }
}
