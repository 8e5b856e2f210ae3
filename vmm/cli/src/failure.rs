//! Owns how a command fails: the exit code, the sentence on stderr, and the object of `--json`.

use std::env;
use std::error::Error;
use std::process::ExitCode;

use driftline_control::api::ClientError;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tracing::Level;

use super::log;
use super::output::print_json;

/// The exit code of [`Failure::usage`].
const USAGE: u8 = 2;
/// The exit code of [`Failure::still_running`].
const STILL_RUNNING: u8 = 4;

/// A command that did not do what it was asked.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    /// What went wrong in a word that stays the same, for programs.
    word: &'static str,
    message: String,
    /// What `--json` prints beside the error.
    beside: Map<String, Value>,
}

impl Failure {
    fn new(code: u8, word: &'static str, message: impl ToString) -> Self {
        Self { code, word, message: message.to_string(), beside: Map::new() }
    }

    /// 1: an error.
    pub(crate) fn error(message: impl ToString) -> Self {
        Self::new(1, "failed", message)
    }

    /// 2: the command line, or the environment that stands for it, is wrong.
    pub(crate) fn usage(message: impl ToString) -> Self {
        Self::new(USAGE, "usage", message)
    }

    /// 3: the host lacks something.
    pub(crate) fn host_lacks(message: impl ToString) -> Self {
        Self::new(3, "host-lacks", message)
    }

    /// 4: a migration or checkpoint failed, and the guest is still running where it was.
    pub(crate) fn still_running(message: impl ToString) -> Self {
        Self::new(STILL_RUNNING, "guest-still-runs", message)
    }

    /// The same failure, its sentence behind these words.
    pub(crate) fn behind(mut self, words: impl ToString) -> Self {
        self.message.insert_str(0, &words.to_string());
        self
    }

    /// The same failure, in other words.
    pub(crate) fn reworded(self, message: impl ToString) -> Self {
        Self { message: message.to_string(), ..self }
    }

    /// The same failure, with these words behind its sentence.
    pub(crate) fn followed_by(mut self, words: &str) -> Self {
        self.message.push_str(words);
        self
    }

    /// The same failure, with an object whose fields `--json` prints beside the error.
    pub(crate) fn with(mut self, result: &impl Serialize) -> Self {
        if let Ok(Value::Object(fields)) = serde_json::to_value(result) {
            self.beside.extend(fields);
        }
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
    pub(crate) fn report(mut self) -> ExitCode {
        log::sentence(Level::ERROR, &self.message);
        if json_asked() {
            let error = json!({ "code": self.word, "message": self.message });
            self.beside.insert("error".to_owned(), error);
            // Where stdout is gone too, the exit code says it.
            let _ = print_json(&self.beside);
        }
        ExitCode::from(self.code)
    }
}

/// What clap says of a command line, which is no error where help was asked for.
pub(super) fn refuse_usage(e: &clap::Error) -> ExitCode {
    // There is nowhere to say that stderr is closed.
    let _ = e.print();
    if e.exit_code() == i32::from(USAGE) && json_asked() {
        let said = e.to_string();
        let message = said.split("\n\n").next().unwrap_or_default();
        let message = message.trim_start_matches("error: ");
        let _ = print_json(&json!({ "error": { "code": "usage", "message": message } }));
    }
    u8::try_from(e.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Whether the command line has `--json`, read or not.
fn json_asked() -> bool {
    env::args_os().skip(1).take_while(|arg| arg != "--").any(|arg| arg == "--json")
}

/// Any error that has no exit code of its own.
impl<E: Error + 'static> From<E> for Failure {
    fn from(e: E) -> Self {
        let word = match (&e as &dyn Error).downcast_ref() {
            Some(ClientError::Connect { .. }) => "no-vmm",
            Some(ClientError::Broken { .. }) => "vmm-lost",
            Some(ClientError::Silent { .. }) => "no-answer",
            Some(ClientError::Fault(_)) => "refused",
            _ => "failed",
        };
        Self::new(1, word, e)
    }
}
