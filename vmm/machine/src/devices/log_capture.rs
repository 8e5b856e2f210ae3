//! The log of a test.

use std::io::{self, Write};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use tracing::{Dispatch, Level};

/// The lines that were logged.
#[derive(Clone, Default)]
struct LogLines(Arc<Mutex<Vec<u8>>>);

impl Write for LogLines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps call sites enabled that another test reaches before any test listens.
static ENABLED: LazyLock<Dispatch> = LazyLock::new(|| {
    let subscriber = tracing_subscriber::fmt().with_max_level(Level::WARN).with_writer(io::sink);
    Dispatch::new(subscriber.finish())
});

/// Runs `f`, and returns the warnings and errors that it logs on this thread.
pub(super) fn warnings(f: impl FnOnce()) -> Vec<String> {
    LazyLock::force(&ENABLED);
    let lines = LogLines::default();
    let to = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(Level::WARN)
        .with_ansi(false)
        .with_writer(move || to.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, f);
    let logged = lines.0.lock();
    String::from_utf8_lossy(&logged).lines().map(str::to_owned).collect()
}
