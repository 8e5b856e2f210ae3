//! Reports a command that failed: its sentence on stderr, the object of `--json` on stdout, and the
//! exit code.

use std::env;
use std::process::ExitCode;

use serde_json::json;
use tracing::Level;

use super::failure::{Failure, USAGE};
use super::log;
use super::output::print_json;

/// Says what went wrong, and gives the process's exit code.
pub(super) fn report(failure: Failure) -> ExitCode {
    let Failure { code, word, message, mut beside } = failure;
    log::sentence(Level::ERROR, &message);
    if json_asked() {
        let error = json!({ "code": word, "message": message });
        beside.insert("error".to_owned(), error);
        // Where stdout is gone too, the exit code says it.
        let _ = print_json(&beside);
    }
    ExitCode::from(code)
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
