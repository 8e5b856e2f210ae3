//! How often losses are logged that a guest can cause without end.

use std::time::{Duration, Instant};

/// Least time between two lines.
const EVERY: Duration = Duration::from_secs(1);

/// Adds up losses, and says when to log them: at most one line a second, with all that was lost
/// since the line before.
#[derive(Debug, Default)]
pub(super) struct LossLog {
    last: Option<Instant>,
    bytes: u64,
}

impl LossLog {
    /// Adds `bytes`. Returns the number to log, if a line is due: the first loss, a second after
    /// the line before, or the last chance to log one.
    pub(super) fn add(&mut self, bytes: u64, is_last: bool) -> Option<u64> {
        self.add_at(Instant::now(), bytes, is_last)
    }

    fn add_at(&mut self, now: Instant, bytes: u64, is_last: bool) -> Option<u64> {
        self.bytes += bytes;
        let is_due = self.last.is_none_or(|last| now.saturating_duration_since(last) >= EVERY);
        if self.bytes == 0 || !(is_due || is_last) {
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_of_a_second_are_one_line() {
        let (mut log, begun) = (LossLog::default(), Instant::now());
        assert_eq!(log.add_at(begun, 0, false), None);
        assert_eq!(log.add_at(begun, 5, false), Some(5));
        assert_eq!(log.add_at(begun + EVERY / 2, 6, false), None);
        assert_eq!(log.add_at(begun + EVERY, 7, false), Some(13));
        assert_eq!(log.add_at(begun + EVERY, 8, false), None);
        assert_eq!(log.add_at(begun + EVERY, 0, true), Some(8));
        assert_eq!(log.add_at(begun + 3 * EVERY, 0, true), None);
    }
}
