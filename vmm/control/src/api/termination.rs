//! The signal that asks the process to end.

use std::sync::{Arc, OnceLock};

/// The first signal that asked the process to end, once there is one.
#[derive(Clone, Debug, Default)]
pub struct Termination(Arc<OnceLock<i32>>);

impl Termination {
    /// Returns the signal's number.
    pub fn signal(&self) -> Option<i32> {
        self.0.get().copied()
    }

    /// Records a signal. Only the first one counts.
    pub(super) fn note(&self, signal: i32) {
        let _ = self.0.set(signal);
        driftline_machine::exit::note_signal(signal);
    }
}
