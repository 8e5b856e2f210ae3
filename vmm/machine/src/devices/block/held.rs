//! An engine for tests that does no work: it holds operations until a test releases them.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::operation::Operation;

/// The engine, and the handle that a test controls it with.
#[derive(Clone)]
pub(in crate::devices) struct Held {
    announcer: Arc<EventFd>,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    /// Time that each operation takes; it then ends within `submit`.
    takes: Option<Duration>,
    let_go: bool,
    held: Vec<u64>,
    /// All operations that were ever submitted.
    given: Vec<Operation>,
}

impl Held {
    pub(in crate::devices) fn new() -> Self {
        let announcer = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        Self { announcer, inner: Arc::default() }
    }

    /// Creates an engine that ends each operation within `submit`, after `takes`.
    pub(super) fn slow(takes: Duration) -> Self {
        let new = Self::new();
        new.inner().takes = Some(takes);
        new
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    /// Ends all held operations, and those that are submitted later.
    pub(in crate::devices) fn let_go(&self) {
        self.inner().let_go = true;
        self.announcer.write(1).unwrap();
    }

    /// Returns the number of held operations.
    pub(in crate::devices) fn count(&self) -> usize {
        self.inner().held.len()
    }

    /// Returns all operations that were ever submitted.
    pub(super) fn given(&self) -> Vec<Operation> {
        self.inner().given.clone()
    }

    pub(super) fn announcer(&self) -> &EventFd {
        &self.announcer
    }

    pub(super) fn submit(&self, operation: Operation) -> Option<io::Result<()>> {
        let mut inner = self.inner();
        let token = operation.token;
        inner.given.push(operation);
        if let Some(takes) = inner.takes {
            drop(inner);
            std::thread::sleep(takes);
            return Some(Ok(()));
        }
        inner.held.push(token);
        if inner.let_go {
            self.announcer.write(1).unwrap();
        }
        None
    }

    pub(super) fn completions(&self) -> Vec<(u64, io::Result<()>)> {
        let _ = self.announcer.read();
        let mut inner = self.inner();
        let ended = if inner.let_go { std::mem::take(&mut inner.held) } else { Vec::new() };
        ended.into_iter().map(|token| (token, Ok(()))).collect()
    }

    pub(super) fn wait(&self, deadline: Option<Instant>) -> bool {
        loop {
            if self.inner().let_go {
                return true;
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
