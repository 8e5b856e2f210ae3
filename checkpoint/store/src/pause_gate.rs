//! The pause gate: low-priority store work yields while the guest is paused for an epoch.
//! Otherwise, the work may have the processor that a vCPU needs to notice the pause request. Hosts
//! preempt a running thread only at a scheduler tick, which may take 4 ms.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// Maximum time for which store work yields. A pause that takes longer has another problem, and the
/// work does not wait for its end.
const LIMIT: Duration = Duration::from_millis(100);

/// The gate, which tells other threads whether the guest is paused. Clones share one state.
#[derive(Clone, Debug)]
pub struct PauseGate(Arc<GateState>);

#[derive(Debug)]
struct GateState {
    closings: Mutex<GateClosings>,
    free: Condvar,
    limit: Duration,
}

#[derive(Default, Debug)]
struct GateClosings {
    count: u32,
    /// Time of the first of them.
    since: Option<Instant>,
}

/// Keeps the gate closed: other threads yield until this is dropped.
#[derive(Debug)]
pub struct ClosedGate<'c>(&'c PauseGate);

impl Default for PauseGate {
    fn default() -> Self {
        Self::with_limit(LIMIT)
    }
}

impl PauseGate {
    fn with_limit(limit: Duration) -> Self {
        let (closings, free) = Default::default();
        Self(Arc::new(GateState { closings, free, limit }))
    }

    /// Makes other threads yield from now on.
    pub fn close(&self) -> ClosedGate<'_> {
        let mut closings = self.lock();
        closings.count += 1;
        closings.since.get_or_insert_with(Instant::now);
        ClosedGate(self)
    }

    /// Returns when the gate is open, or has been closed for a tenth of a second. To be called
    /// between pieces of work.
    pub(crate) fn wait_until_open(&self) {
        let GateState { free, limit, .. } = &*self.0;
        let mut closings = self.lock();
        while let Some(since) = closings.since {
            let left = limit.saturating_sub(since.elapsed());
            if left.is_zero() {
                return;
            }
            free.wait_for(&mut closings, left);
        }
    }

    fn lock(&self) -> MutexGuard<'_, GateClosings> {
        self.0.closings.lock()
    }
}

impl Drop for ClosedGate<'_> {
    fn drop(&mut self) {
        let mut closings = self.0.lock();
        closings.count -= 1;
        if closings.count == 0 {
            closings.since = None;
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
    fn work_yields_until_the_last_holder_ends() {
        // No test waits that long.
        let pause_gate = PauseGate::with_limit(Duration::from_secs(600));
        pause_gate.wait_until_open();
        let (first, second) = (pause_gate.close(), pause_gate.close());
        let (began, passed) = (AtomicBool::new(false), AtomicBool::new(false));
        let since = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                began.store(true, Ordering::SeqCst);
                pause_gate.wait_until_open();
                passed.store(true, Ordering::SeqCst);
            });
            while !began.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            drop(first);
            thread::sleep(Duration::from_millis(20));
            assert!(!passed.load(Ordering::SeqCst), "one keeps it closed");
            drop(second);
        });
        assert!(since.elapsed() < Duration::from_secs(300), "it was woken");
        pause_gate.wait_until_open();
    }

    #[test]
    fn work_yields_for_limited_time() {
        let pause_gate = PauseGate::with_limit(Duration::from_millis(5));
        let since = Instant::now();
        let _closed = pause_gate.close();
        pause_gate.wait_until_open();
        assert!(since.elapsed() >= Duration::from_millis(5));
        // Otherwise, each call in a pause of minutes would wait again.
        let again = Instant::now();
        (0..1000).for_each(|_| pause_gate.wait_until_open());
        assert!(again.elapsed() < Duration::from_secs(5));
    }
}
