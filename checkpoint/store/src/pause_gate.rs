//! Work on the store that can wait stands aside while the guest stands for an epoch: else it may
//! have the processor that a vCPU needs to hear that it is to stop, and hosts take a processor away
//! from who has it only at a tick, which may be 4 ms.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A pause that takes longer has other troubles, and the store does not wait for its end.
const LIMIT: Duration = Duration::from_millis(100);

/// Whether the guest stands, for who works meanwhile. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Calm(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    holders: Mutex<Holders>,
    free: Condvar,
    limit: Duration,
}

#[derive(Default, Debug)]
struct Holders {
    count: u32,
    /// When the first of them came.
    since: Option<Instant>,
}

/// Until this is dropped others stand aside.
#[derive(Debug)]
pub struct Held<'c>(&'c Calm);

impl Default for Calm {
    fn default() -> Self {
        Self::with_limit(LIMIT)
    }
}

impl Calm {
    fn with_limit(limit: Duration) -> Self {
        let (holders, free) = Default::default();
        Self(Arc::new(Inner { holders, free, limit }))
    }

    /// From now on others stand aside.
    pub fn hold(&self) -> Held<'_> {
        let mut holders = self.lock();
        holders.count += 1;
        holders.since.get_or_insert_with(Instant::now);
        Held(self)
    }

    /// Returns when nobody holds it, or has held it for a tenth of a second. To be called between
    /// pieces of work.
    pub fn stand_aside(&self) {
        let Inner { free, limit, .. } = &*self.0;
        let mut holders = self.lock();
        while let Some(since) = holders.since {
            let left = limit.saturating_sub(since.elapsed());
            if left.is_zero() {
                return;
            }
            let woken = free.wait_timeout(holders, left);
            holders = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Holders> {
        self.0.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut holders = self.0.lock();
        holders.count -= 1;
        if holders.count == 0 {
            holders.since = None;
            self.0.0.free.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    #[test]
    fn who_works_stands_aside_until_the_last_has_let_go() {
        // Nobody waits for so long.
        let calm = Calm::with_limit(Duration::from_secs(600));
        calm.stand_aside();
        let (first, second) = (calm.hold(), calm.hold());
        let (began, passed) = (AtomicBool::new(false), AtomicBool::new(false));
        let since = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                began.store(true, Ordering::SeqCst);
                calm.stand_aside();
                passed.store(true, Ordering::SeqCst);
            });
            while !began.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            drop(first);
            thread::sleep(Duration::from_millis(20));
            assert!(!passed.load(Ordering::SeqCst), "one holds it still");
            drop(second);
        });
        assert!(since.elapsed() < Duration::from_secs(300), "it was woken");
        calm.stand_aside();
    }

    #[test]
    fn who_has_stood_aside_for_long_enough_goes_on() {
        let calm = Calm::with_limit(Duration::from_millis(5));
        let since = Instant::now();
        let _held = calm.hold();
        calm.stand_aside();
        assert!(since.elapsed() >= Duration::from_millis(5));
        // Else each call would be another wait for a pause of minutes.
        let again = Instant::now();
        (0..1000).for_each(|_| calm.stand_aside());
        assert!(again.elapsed() < Duration::from_secs(5));
    }
}
