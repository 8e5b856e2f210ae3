//! Ctrl-C for commands that follow a job.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Listens for Ctrl-C. A Ctrl-C that arrives while the command does something else is not lost.
pub(super) struct Interrupts {
    /// `None` if there is no handler: Ctrl-C then ends the process.
    signals: Option<Signal>,
    was_pressed: bool,
}

impl Interrupts {
    /// Listens from now on. The caller runs on a tokio runtime.
    pub(super) fn listen() -> Self {
        Self { signals: signal(SignalKind::interrupt()).ok(), was_pressed: false }
    }

    /// Waits for Ctrl-C. Returns whether this is the first one.
    pub(super) async fn pressed(&mut self) -> bool {
        if let Some(signals) = &mut self.signals
            && signals.recv().await.is_some()
        {
            return !std::mem::replace(&mut self.was_pressed, true);
        }
        std::future::pending().await
    }
}
