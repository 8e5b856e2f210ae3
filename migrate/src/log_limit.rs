//! Limits log lines that strangers can cause: one a second of each kind.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time between two lines of one kind.
const EVERY: Duration = Duration::from_secs(1);

/// The lines of one kind.
#[derive(Debug)]
pub(crate) struct LogLimit(Mutex<LogLimitState>);

#[derive(Debug)]
struct LogLimitState {
    shown: Option<Instant>,
    unshown: u64,
}

impl LogLimit {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(LogLimitState { shown: None, unshown: 0 }))
    }

    /// Whether the next line may be shown: with the number of those that were not since the last
    /// one.
    pub(crate) fn admit(&self) -> Option<u64> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        if state.shown.is_some_and(|shown| now.saturating_duration_since(shown) < EVERY) {
            state.unshown += 1;
            return None;
        }
        state.shown = Some(now);
        Some(std::mem::take(&mut state.unshown))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_is_shown() {
        let (limit, begun) = (LogLimit::new(), Instant::now());
        assert_eq!(limit.admit_at(begun), Some(0));
        for ms in 0..999 {
            assert_eq!(limit.admit_at(begun + Duration::from_millis(ms)), None);
        }
        assert_eq!(limit.admit_at(begun + EVERY), Some(999));
        assert_eq!(limit.admit_at(begun + 2 * EVERY), Some(0));
    }
}
