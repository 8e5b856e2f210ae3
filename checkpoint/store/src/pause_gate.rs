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
    holders: Mutex<GateHolders>,
    free: Condvar,
    limit: Duration,
}

#[derive(Default, Debug)]
struct GateHolders {
    count: u32,
    /// Time at which the first of them came.
    since: Option<Instant>,
}

/// Holds the gate: other threads yield until this is dropped.
#[derive(Debug)]
pub struct GateHold<'c>(&'c PauseGate);

impl Default for PauseGate {
    fn default() -> Self {
        Self::with_limit(LIMIT)
    }
}

impl PauseGate {
    fn with_limit(limit: Duration) -> Self {
        let (holders, free) = Default::default();
        Self(Arc::new(GateState { holders, free, limit }))
    }

    /// Makes other threads yield from now on.
    pub fn hold(&self) -> GateHold<'_> {
        let mut holders = self.lock();
        holders.count += 1;
        holders.since.get_or_insert_with(Instant::now);
        GateHold(self)
    }

    /// Returns when the gate is not held, or has been held for a tenth of a second. To be called
    /// between pieces of work.
    pub(crate) fn wait_until_open(&self) {
        let GateState { free, limit, .. } = &*self.0;
        let mut holders = self.lock();
        while let Some(since) = holders.since {
            let left = limit.saturating_sub(since.elapsed());
            if left.is_zero() {
                return;
            }
            free.wait_for(&mut holders, left);
        }
    }

    fn lock(&self) -> MutexGuard<'_, GateHolders> {
        self.0.holders.lock()
    }
}

impl Drop for GateHold<'_> {
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
    fn work_yields_until_the_last_holder_ends() {
        // No test waits that long.
        let pause_gate = PauseGate::with_limit(Duration::from_secs(600));
        pause_gate.wait_until_open();
        let (first, second) = (pause_gate.hold(), pause_gate.hold());
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
            assert!(!passed.load(Ordering::SeqCst), "one holds it still");
            drop(second);
        });
        assert!(since.elapsed() < Duration::from_secs(300), "it was woken");
        pause_gate.wait_until_open();
    }

    #[test]
    fn work_yields_for_limited_time() {
        let pause_gate = PauseGate::with_limit(Duration::from_millis(5));
        let since = Instant::now();
        let _held = pause_gate.hold();
        pause_gate.wait_until_open();
        assert!(since.elapsed() >= Duration::from_millis(5));
        // Otherwise, each call in a pause of minutes would wait again.
        let again = Instant::now();
        (0..1000).for_each(|_| pause_gate.wait_until_open());
        assert!(again.elapsed() < Duration::from_secs(5));
    }
}
