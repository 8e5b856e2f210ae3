//! Ctrl-C for commands that follow a job.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Listens for Ctrl-C. What the user presses while the command does something else is not lost.
pub(super) struct Interrupts {
    /// `None` if there is no handler: Ctrl-C then ends the process.
    signals: Option<Signal>,
    have_come: bool,
}

impl Interrupts {
    /// Listens from now on. The caller runs on a tokio runtime.
    pub(super) fn listen() -> Self {
        Self { signals: signal(SignalKind::interrupt()).ok(), have_come: false }
    }

    /// Waits for Ctrl-C. Returns whether this is the first one.
    pub(super) async fn pressed(&mut self) -> bool {
        if let Some(signals) = &mut self.signals
            && signals.recv().await.is_some()
        {
            return !std::mem::replace(&mut self.have_come, true);
        }
        std::future::pending().await
    }
}
