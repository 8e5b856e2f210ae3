//! The line on stderr that shows what a command is doing.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Interval at which the spinner and the clock move.
const TICK: Duration = Duration::from_millis(100);

/// A line that changes in place, until it is dropped. It is shown only if stderr is a terminal.
pub(crate) struct StatusLine {
    bar: ProgressBar,
    is_shown: bool,
}

impl StatusLine {
    /// Creates a line with a spinner, for work of unknown length.
    pub(crate) fn spinner() -> Self {
        let line = Self::with(ProgressBar::new_spinner(), "{spinner} {elapsed_precise} {wide_msg}");
        if line.is_shown {
            line.bar.enable_steady_tick(TICK);
        }
        line
    }

    /// Creates a line with a bar, for work in steps.
    pub(crate) fn bar() -> Self {
        Self::with(ProgressBar::new(0), "{elapsed_precise} [{bar:30}] {pos}/{len} {msg}")
    }

    fn with(bar: ProgressBar, template: &str) -> Self {
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { is_shown: !bar.is_hidden(), bar }
    }

    /// Returns whether the line is shown. If it is not, a command prints a few whole lines instead.
    pub(crate) fn is_shown(&self) -> bool {
        self.is_shown
    }

    /// Replaces the text.
    pub(crate) fn show(&self, text: String) {
        self.bar.set_message(text);
    }

    /// Moves the bar.
    pub(crate) fn step(&self, done: usize, of: usize) {
        self.bar.set_length(of as u64);
        self.bar.set_position(done as u64);
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
