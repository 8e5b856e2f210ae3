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

/// See the module.
pub(super) struct Peaks {
    /// The peaks, for other threads to read.
    shown: Arc<[AtomicU64]>,
    before: Vec<u64>,
    now: Vec<u64>,
    /// Start of the current period; `None` if nothing has been noted.
    since: Option<Instant>,
}

impl Peaks {
    /// Creates the peaks of `rings` empty rings.
    pub(super) fn new(rings: usize) -> Self {
        let shown = (0..rings).map(|_| AtomicU64::new(0)).collect();
        Self { shown, before: vec![0; rings], now: vec![0; rings], since: None }
    }

    /// Returns the peaks for other threads to read.
    pub(super) fn shown(&self) -> Arc<[AtomicU64]> {
        self.shown.clone()
    }

    /// Notes that the rings had these numbers of entries at time `at`.
    pub(super) fn note(&mut self, entries: &[u64], at: Instant) {
        let spans = at.saturating_duration_since(*self.since.get_or_insert(at));
        if spans >= SPAN {
            std::mem::swap(&mut self.before, &mut self.now);
            self.now.fill(0);
            self.since = Some(at);
        }
        if spans >= 2 * SPAN {
            self.before.fill(0);
        }
        for ((now, entries), (before, shown)) in
            self.now.iter_mut().zip(entries).zip(self.before.iter().zip(&*self.shown))
        {
            *now = (*now).max(*entries);
            shown.store((*now).max(*before), Ordering::Relaxed);
        }
    }

    /// Clears the peaks, because tracking has ended.
    pub(super) fn forget(&mut self) {
        *self = Self { shown: self.shown.clone(), ..Self::new(self.now.len()) };
        self.shown.iter().for_each(|shown| shown.store(0, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_expires_within_a_second() {
        let mut peaks = Peaks::new(2);
        let shown = peaks.shown();
        let read = || -> Vec<u64> { shown.iter().map(|n| n.load(Ordering::Relaxed)).collect() };
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        peaks.note(&[5, 1], at(0));
        peaks.note(&[3, 2], at(499));
        assert_eq!(read(), [5, 2]);
        peaks.note(&[0, 7], at(500));
        assert_eq!(read(), [5, 7], "those of the time before count");
        peaks.note(&[1, 0], at(1000));
        assert_eq!(read(), [1, 7]);
        peaks.note(&[1, 1], at(3000));
        assert_eq!(read(), [1, 1], "after a long time nothing of before is left");
        peaks.forget();
        assert_eq!(read(), [0, 0]);
        // A source without rings has none to note.
        Peaks::new(0).note(&[], at(0));
    }
}
