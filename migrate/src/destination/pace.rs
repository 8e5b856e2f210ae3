//! The minimum pace of a source, so that a slow peer cannot occupy the receiver.

use std::time::{Duration, Instant};

use crate::protocol::error::WireError;

/// Bytes of memory, disks and state that a source must move in each window of its [`PaceLimit`].
const MIN_PROGRESS: u64 = 256 << 10;

/// The minimum pace of a source. A new window begins whenever the source has moved [`MIN_PROGRESS`]
/// bytes.
pub(super) struct PaceLimit {
    window: Duration,
    until: Instant,
    /// Bytes that had arrived when the window began.
    before: u64,
}

impl PaceLimit {
    pub(super) fn begin(window: Duration) -> Self {
        Self { window, until: Instant::now() + window, before: 0 }
    }

    /// Returns the end of the window.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Lengthens all later windows, and begins one after `moved` bytes in total.
    pub(super) fn lengthen(&mut self, allowance: Duration, moved: u64) {
        self.window = self.window.saturating_add(allowance);
        self.renew(moved);
    }

    /// Records that `moved` bytes have arrived in total.
    pub(super) fn note(&mut self, moved: u64) {
        if moved - self.before >= MIN_PROGRESS {
            self.renew(moved);
        }
    }

    /// Begins a new window, after `moved` bytes in total.
    pub(super) fn renew(&mut self, moved: u64) {
        (self.until, self.before) = (Instant::now() + self.window, moved);
    }

    /// Extends the window by a time in which this side did not read.
    pub(super) fn allow(&mut self, waited: Duration) {
        self.until += waited;
    }

    /// Converts a timeout at the window's end into the error that the source was too slow.
    pub(super) fn judge(&self, e: WireError, moved: u64) -> WireError {
        if e.is_silence() && Instant::now() >= self.until {
            let (found, least) = (moved - self.before, MIN_PROGRESS);
            return WireError::TooSlow { found, window: self.window, least };
        }
        e
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use driftline_format::FormatError;

    use super::*;

    #[test]
    fn storage_waits_extend_the_pace_window() {
        let silence = || WireError::from(FormatError::Io(Error::from(ErrorKind::TimedOut)));
        let mut pace = PaceLimit::begin(Duration::ZERO);
        assert!(matches!(pace.judge(silence(), 0), WireError::TooSlow { .. }));
        pace.allow(Duration::from_secs(3600));
        assert!(pace.judge(silence(), 0).is_silence());
    }

    #[test]
    fn lengthened_window_counts_only_later_bytes() {
        let silence = WireError::from(FormatError::Io(Error::from(ErrorKind::TimedOut)));
        let mut pace = PaceLimit::begin(Duration::ZERO);
        pace.lengthen(Duration::ZERO, 1 << 30);
        let error = pace.judge(silence, (1 << 30) + 1);
        assert!(matches!(error, WireError::TooSlow { found: 1, .. }), "{error}");
    }
}
