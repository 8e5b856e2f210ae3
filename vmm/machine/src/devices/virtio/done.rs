//! How whoever began something hears that it is over.

use std::fmt;

/// Calls a function once: when this goes, whatever became of what it stands for.
pub(crate) struct Done(Option<Box<dyn FnOnce() + Send>>);

impl Done {
    /// Calls `say`, which does not wait.
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
