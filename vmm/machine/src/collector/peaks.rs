//! Owns the peak fill level of each dirty ring: the most entries found by a harvest in the last
//! second.
//!
//! Any thread may read the peaks, any number of times. A peak expires by itself, half a second to a
//! second after it occurred.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Length of one period. A peak covers the current period and the previous one.
const SPAN: Duration = Duration::from_millis(500);

/// The peaks of all rings.
pub(super) struct Peaks {
    /// The peaks, for other threads to read.
    published: Arc<[AtomicU64]>,
    before: Vec<u64>,
    now: Vec<u64>,
    /// Start of the current period; `None` before the first record.
    since: Option<Instant>,
}

impl Peaks {
    /// Creates the peaks of `rings` empty rings.
    pub(super) fn new(rings: usize) -> Self {
        let published = (0..rings).map(|_| AtomicU64::new(0)).collect();
        Self { published, before: vec![0; rings], now: vec![0; rings], since: None }
    }

    /// Returns the peaks for other threads to read.
    pub(super) fn published(&self) -> Arc<[AtomicU64]> {
        self.published.clone()
    }

    /// Records that the rings had these numbers of entries at time `at`.
    pub(super) fn record(&mut self, entries: &[u64], at: Instant) {
        let elapsed = at.saturating_duration_since(*self.since.get_or_insert(at));
        if elapsed >= SPAN {
            std::mem::swap(&mut self.before, &mut self.now);
            self.now.fill(0);
            self.since = Some(at);
        }
        if elapsed >= 2 * SPAN {
            self.before.fill(0);
        }
        for ((now, entries), (before, published)) in
            self.now.iter_mut().zip(entries).zip(self.before.iter().zip(&*self.published))
        {
            *now = (*now).max(*entries);
            published.store((*now).max(*before), Ordering::Relaxed);
        }
    }

    /// Clears the peaks, because tracking has ended.
    pub(super) fn clear(&mut self) {
        *self = Self { published: self.published.clone(), ..Self::new(self.now.len()) };
        self.published.iter().for_each(|published| published.store(0, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_expires_within_a_second() {
        let mut peaks = Peaks::new(2);
        let published = peaks.published();
        let read = || -> Vec<u64> { published.iter().map(|n| n.load(Ordering::Relaxed)).collect() };
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        peaks.record(&[5, 1], at(0));
        peaks.record(&[3, 2], at(499));
        assert_eq!(read(), [5, 2]);
        peaks.record(&[0, 7], at(500));
        assert_eq!(read(), [5, 7], "peaks of the previous period count");
        peaks.record(&[1, 0], at(1000));
        assert_eq!(read(), [1, 7]);
        peaks.record(&[1, 1], at(3000));
        assert_eq!(read(), [1, 1], "older peaks have expired");
        peaks.clear();
        assert_eq!(read(), [0, 0]);
        // A source without rings has no entries to record.
        Peaks::new(0).record(&[], at(0));
    }
}
