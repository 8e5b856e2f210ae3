//! A callback that reports the end of an operation.

use std::fmt;

/// Runs a closure exactly once, on drop, whether the operation succeeded or not.
pub(crate) struct Completion(Option<Box<dyn FnOnce() + Send>>);

impl Completion {
    /// Creates a value that calls `say` on drop. `say` must not wait.
    pub(crate) fn new(say: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(say)))
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completion")
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if let Some(say) = self.0.take() {
            say();
        }
    }
}
