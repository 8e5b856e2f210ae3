//! Limits the log lines that strangers can cause: one line of each kind a second.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Minimum time between two lines of one kind.
const EVERY: Duration = Duration::from_secs(1);

/// The limit on lines of one kind.
#[derive(Debug)]
pub(crate) struct LogLimit(Mutex<LogLimitState>);

#[derive(Debug)]
struct LogLimitState {
    /// Time of the last line that was shown.
    last_shown: Option<Instant>,
    /// Lines suppressed since then.
    unshown: u64,
}

impl LogLimit {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(LogLimitState { last_shown: None, unshown: 0 }))
    }

    /// Returns the number of lines suppressed since the last one if the next line may be shown;
    /// `None` if it is suppressed as well.
    pub(crate) fn admit(&self) -> Option<u64> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        if state.last_shown.is_some_and(|last| now.saturating_duration_since(last) < EVERY) {
            state.unshown += 1;
            return None;
        }
        state.last_shown = Some(now);
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
