//! Reports a command's failure: the sentence on stderr, the object of `--json` on stdout, and the
//! exit code.

use std::env;
use std::process::ExitCode;

use serde_json::json;
use tracing::Level;

use super::failure::{Failure, USAGE};
use super::log;
use super::output::print_json;

/// Reports the failure and returns the process's exit code.
pub(super) fn report(failure: Failure) -> ExitCode {
    let Failure { code, kind, message, mut fields } = failure;
    log::message(Level::ERROR, &message);
    if wants_json() {
        let error = json!({ "code": kind, "message": message });
        fields.insert("error".to_owned(), error);
        // If stdout is closed too, the exit code still reports the failure.
        let _ = print_json(&fields);
    }
    ExitCode::from(code)
}

/// Prints clap's message for a command line. A request for help is not an error.
pub(super) fn refuse_usage(e: &clap::Error) -> ExitCode {
    // If stderr is closed, there is no place to report that.
    let _ = e.print();
    if e.exit_code() == i32::from(USAGE) && wants_json() {
        let text = e.to_string();
        let message = text.split("\n\n").next().unwrap_or_default();
        let message = message.trim_start_matches("error: ");
        let _ = print_json(&json!({ "error": { "code": "usage", "message": message } }));
    }
    u8::try_from(e.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Returns whether the command line contains `--json`, even if it was not parsed.
fn wants_json() -> bool {
    env::args_os().skip(1).take_while(|arg| arg != "--").any(|arg| arg == "--json")
}
