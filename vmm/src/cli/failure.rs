//! Owns how a command fails: the exit code, and the sentence on stderr.

use std::process::ExitCode;

use tracing::Level;

use super::log;

/// The exit code of [`Failure::still_running`].
const STILL_RUNNING: u8 = 4;

/// A command that did not do what it was asked.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    /// 1: an error.
    pub(crate) fn error(message: impl ToString) -> Self {
        Self { code: 1, message: message.to_string() }
    }

    /// 2: the command line, or the environment that stands for it, is wrong.
    pub(crate) fn usage(message: impl ToString) -> Self {
        Self { code: 2, message: message.to_string() }
    }

    /// 3: the host lacks something.
    pub(crate) fn host_lacks(message: impl ToString) -> Self {
        Self { code: 3, message: message.to_string() }
    }

    /// 4: a migration or checkpoint failed, and the guest is still running where it was.
    pub(crate) fn still_running(message: impl ToString) -> Self {
        Self { code: STILL_RUNNING, message: message.to_string() }
    }

    /// The same failure, its sentence behind these words.
    pub(crate) fn behind(mut self, words: impl ToString) -> Self {
        self.message.insert_str(0, &words.to_string());
        self
    }

    /// The sentence.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Whether the guest is still running where it was.
    pub(crate) fn is_still_running(&self) -> bool {
        self.code == STILL_RUNNING
    }

    /// Says it, and gives the process's exit code.
    pub(crate) fn report(self) -> ExitCode {
        log::sentence(Level::ERROR, &self.message);
        ExitCode::from(self.code)
    }
}

/// Any error that has no exit code of its own.
impl<E: std::error::Error> From<E> for Failure {
    fn from(e: E) -> Self {
        Self::error(e)
    }
}
