//! The failure of a command: an exit code, a sentence, and additional fields for `--json`.

use std::error::Error;

use driftline_control::api::ClientError;
use serde::Serialize;
use serde_json::{Map, Value};

/// The exit code of [`Failure::usage`].
pub(crate) const USAGE: u8 = 2;
/// The exit code of [`Failure::still_running`].
const STILL_RUNNING: u8 = 4;

/// A command's failure to do what was requested.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    /// The kind of failure, as a word that programs can rely on.
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    /// Fields that `--json` prints beside the error.
    pub(crate) fields: Map<String, Value>,
}

impl Failure {
    fn new(code: u8, kind: &'static str, message: impl ToString) -> Self {
        Self { code, kind, message: message.to_string(), fields: Map::new() }
    }

    /// Exit code 1: an error.
    pub(crate) fn error(message: impl ToString) -> Self {
        Self::new(1, "failed", message)
    }

    /// Exit code 2: the command line, or an environment variable that replaces an option, is wrong.
    pub(crate) fn usage(message: impl ToString) -> Self {
        Self::new(USAGE, "usage", message)
    }

    /// Exit code 3: the host lacks a feature.
    pub(crate) fn host_lacks(message: impl ToString) -> Self {
        Self::new(3, "host-lacks", message)
    }

    /// Exit code 4: a migration or checkpoint failed, and the guest is still running where it was.
    pub(crate) fn still_running(message: impl ToString) -> Self {
        Self::new(STILL_RUNNING, "guest-still-runs", message)
    }

    /// Returns the same failure with `text` before its sentence.
    pub(crate) fn prefixed(mut self, text: impl ToString) -> Self {
        self.message.insert_str(0, &text.to_string());
        self
    }

    /// Returns the same failure with another sentence.
    pub(crate) fn with_message(self, message: impl ToString) -> Self {
        Self { message: message.to_string(), ..self }
    }

    /// Returns the same failure with `text` after its sentence.
    pub(crate) fn followed_by(mut self, text: &str) -> Self {
        self.message.push_str(text);
        self
    }

    /// Returns the same failure with an object whose fields `--json` prints beside the error.
    pub(crate) fn with(mut self, result: &impl Serialize) -> Self {
        if let Ok(Value::Object(fields)) = serde_json::to_value(result) {
            self.fields.extend(fields);
        }
        self
    }

    /// Returns the sentence.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Returns whether the guest is still running where it was.
    pub(crate) fn is_still_running(&self) -> bool {
        self.code == STILL_RUNNING
    }
}

/// Converts any error that has no exit code of its own.
impl<E: Error + 'static> From<E> for Failure {
    fn from(e: E) -> Self {
        let kind = match (&e as &dyn Error).downcast_ref() {
            Some(ClientError::Connect { .. }) => "no-vmm",
            Some(ClientError::Broken { .. }) => "vmm-lost",
            Some(ClientError::Silent { .. }) => "no-answer",
            Some(ClientError::Fault(_)) => "refused",
            _ => "failed",
        };
        Self::new(1, kind, e)
    }
}
