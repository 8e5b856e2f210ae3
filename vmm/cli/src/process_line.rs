//! The command line of this guest's process, with which another process can continue.

use std::env;
use std::io::{self, IsTerminal};
use std::sync::OnceLock;

use driftline_control::api::{NoProcessLine, ProcessLine};
use driftline_machine::config::SerialSink;

use super::args::HostArgs;

/// The command line of the first process of the guest, if this one continues another.
static CONTINUED: OnceLock<ProcessLine> = OnceLock::new();

/// Records that this process continues one with `line`.
pub(super) fn continues(line: ProcessLine) {
    let _ = CONTINUED.set(line);
}

/// Returns the command line with which another process can continue, or why none can.
pub(super) fn process_line(host: &HostArgs) -> Result<ProcessLine, NoProcessLine> {
    if host.die_with_parent {
        return Err(NoProcessLine::EndsWithParent);
    }
    if std::process::id() == 1 {
        return Err(NoProcessLine::FirstOfNamespace);
    }
    if host.serial == SerialSink::Stdio && io::stdin().is_terminal() {
        return Err(NoProcessLine::Terminal);
    }
    if let Some(line) = CONTINUED.get() {
        return Ok(line.clone());
    }
    let arguments = env::args_os().skip(1).map(|argument| argument.into_string().ok());
    let arguments = arguments.collect::<Option<Vec<_>>>();
    let mut arguments = arguments.ok_or(NoProcessLine::Arguments)?;
    let state_dir = "--state-dir";
    if !arguments.iter().any(|argument| argument.starts_with(state_dir)) {
        // The default is one of this process's environment.
        let default = host.state_dir.to_str().ok_or(NoProcessLine::StateDirectory)?;
        arguments.extend([state_dir.to_owned(), default.to_owned()]);
    }
    let directory = env::current_dir().map_err(|_| NoProcessLine::WorkingDirectory)?;
    Ok(ProcessLine { arguments, directory })
}
