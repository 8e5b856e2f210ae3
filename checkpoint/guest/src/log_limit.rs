//! Limits the log lines that a guest or a peer can cause: one line of each kind a second.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Minimum time between two lines of one kind.
const EVERY: Duration = Duration::from_secs(1);

/// The limit on lines of one kind.
#[derive(Debug)]
pub struct LogLimit(Mutex<LogLimitState>);

#[derive(Debug)]
struct LogLimitState {
    /// Time of the last line that was shown.
    last_shown: Option<Instant>,
    /// What was added since then.
    unshown: u64,
}

impl LogLimit {
    /// Creates a limit that admits a line immediately.
    pub const fn new() -> Self {
        Self(Mutex::new(LogLimitState { last_shown: None, unshown: 0 }))
    }

    /// Returns the number of lines suppressed since the last one if the next line may be shown;
    /// `None` if it is suppressed as well.
    pub fn admit(&self) -> Option<u64> {
        self.add(1).map(|with_this| with_this - 1)
    }

    /// Adds an amount, such as of lost bytes. Returns what was added since the last line if the
    /// next one may be shown and there is something to show.
    pub fn add(&self, amount: u64) -> Option<u64> {
        self.add_at(Instant::now(), amount)
    }

    /// Returns what was added since the last line, for a last line without a limit.
    pub fn take(&self) -> u64 {
        std::mem::take(&mut self.0.lock().unshown)
    }

    fn add_at(&self, now: Instant, amount: u64) -> Option<u64> {
        let mut state = self.0.lock();
        state.unshown = state.unshown.saturating_add(amount);
        let is_early =
            state.last_shown.is_some_and(|last| now.saturating_duration_since(last) < EVERY);
        if is_early || state.unshown == 0 {
            return None;
        }
        state.last_shown = Some(now);
        Some(std::mem::take(&mut state.unshown))
    }
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_is_shown() {
        let (limit, begun) = (LogLimit::new(), Instant::now());
        assert_eq!(limit.add_at(begun, 1), Some(1));
        for ms in 0..999 {
            assert_eq!(limit.add_at(begun + Duration::from_millis(ms), 1), None);
        }
        assert_eq!(limit.add_at(begun + EVERY, 1), Some(1000));
        assert_eq!(limit.add_at(begun + 2 * EVERY, 1), Some(1));
    }

    #[test]
    fn suppressed_lines_are_those_before() {
        let limit = LogLimit::new();
        assert_eq!(limit.admit(), Some(0));
    }

    #[test]
    fn amounts_are_added_up_until_a_line() {
        let (limit, begun) = (LogLimit::new(), Instant::now());
        assert_eq!(limit.add_at(begun, 0), None);
        assert_eq!(limit.add_at(begun, 5), Some(5));
        assert_eq!(limit.add_at(begun + EVERY / 2, 6), None);
        assert_eq!(limit.add_at(begun + EVERY, 7), Some(13));
        assert_eq!(limit.add_at(begun + EVERY, 8), None);
        assert_eq!((limit.take(), limit.take()), (8, 0));
        assert_eq!(limit.add_at(begun + 3 * EVERY, 0), None);
    }
}
