//! A callback that reports the end of an operation.

use std::fmt;

/// Runs a closure exactly once, on drop, whether the operation succeeded or not.
pub(crate) struct Done(Option<Box<dyn FnOnce() + Send>>);

impl Done {
    /// Creates a value that calls `say` on drop. `say` must not wait.
    pub(crate) fn new(say: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(say)))
    }
}

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Done")
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(say) = self.0.take() {
            say();
        }
    }
}
