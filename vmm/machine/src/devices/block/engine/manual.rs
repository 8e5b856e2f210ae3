//! An engine for tests that does no work: an operation ends when the test says so.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::devices::block::operation::DiskOperation;
use crate::devices::latched_event::LatchedEvent;

/// The engine, and the handle by which a test controls it.
#[derive(Clone)]
pub(in crate::devices::block) struct ManualEngine {
    completion_event: Arc<LatchedEvent>,
    inner: Arc<Mutex<ManualEngineState>>,
}

#[derive(Default)]
struct ManualEngineState {
    /// Time that each operation takes; it then ends within `submit`.
    delay: Option<Duration>,
    /// Whether operations with a delay wait in `submit`.
    blocked: bool,
    completes: bool,
    /// Whether the device waits, or has waited, for the end of an operation.
    waited_for: bool,
    pending: Vec<u64>,
    /// All operations that were ever submitted.
    submitted: Vec<DiskOperation>,
}

impl ManualEngine {
    pub(in crate::devices::block) fn new() -> Self {
        let completion_event = Arc::new(LatchedEvent::new().unwrap());
        Self { completion_event, inner: Arc::default() }
    }

    /// Creates an engine that ends each operation within `submit`, after `delay`.
    pub(in crate::devices::block) fn slow(delay: Duration) -> Self {
        let new = Self::new();
        new.inner().delay = Some(delay);
        new
    }

    /// Makes operations with a delay wait in `submit`, or lets them continue.
    pub(in crate::devices::block) fn block(&self, blocked: bool) {
        self.inner().blocked = blocked;
    }

    fn inner(&self) -> MutexGuard<'_, ManualEngineState> {
        self.inner.lock().unwrap()
    }

    /// Ends all pending operations, and those that are submitted later.
    pub(in crate::devices::block) fn complete_all(&self) {
        self.inner().completes = true;
        self.completion_event.signal();
    }

    /// Returns whether the device waits, or has waited, for the end of an operation.
    pub(in crate::devices::block) fn is_waited_for(&self) -> bool {
        self.inner().waited_for
    }

    /// Returns the number of pending operations.
    pub(in crate::devices::block) fn pending(&self) -> usize {
        self.inner().pending.len()
    }

    /// Returns all operations that were ever submitted.
    pub(in crate::devices::block) fn submitted(&self) -> Vec<DiskOperation> {
        self.inner().submitted.clone()
    }

    pub(in crate::devices::block) fn completion_event(&self) -> &LatchedEvent {
        &self.completion_event
    }

    pub(in crate::devices::block) fn submit(
        &self,
        operation: DiskOperation,
    ) -> Option<io::Result<()>> {
        let mut inner = self.inner();
        let token = operation.token;
        inner.submitted.push(operation);
        if let Some(delay) = inner.delay {
            drop(inner);
            while self.inner().blocked {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(delay);
            return Some(Ok(()));
        }
        inner.pending.push(token);
        if inner.completes {
            self.completion_event.signal();
        }
        None
    }

    pub(in crate::devices::block) fn completions(&self) -> Vec<(u64, io::Result<()>)> {
        self.completion_event.clear();
        let mut inner = self.inner();
        let ended = if inner.completes { std::mem::take(&mut inner.pending) } else { Vec::new() };
        ended.into_iter().map(|token| (token, Ok(()))).collect()
    }

    pub(in crate::devices::block) fn wait(&self, deadline: Option<Instant>) -> bool {
        self.inner().waited_for = true;
        loop {
            if self.inner().completes {
                return true;
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
