//! A callback that reports the end of an operation.

use std::fmt;

/// Runs a closure exactly once, on drop, whether the operation succeeded or not.
pub(crate) struct Completion(Option<Box<dyn FnOnce() + Send>>);

impl Completion {
    /// Creates a value that calls `on_drop` on drop. `on_drop` must not wait.
    pub(crate) fn new(on_drop: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(on_drop)))
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completion")
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if let Some(on_drop) = self.0.take() {
            on_drop();
        }
    }
}
