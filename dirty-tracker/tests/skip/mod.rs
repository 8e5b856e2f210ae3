//! Reports tests that cannot run on this host.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::Write;

/// Reports on stderr, and in the file that `DRIFTLINE_SKIP_LOG` names, that `test` did not run.
pub fn skipped(test: &str, why: &str) {
    let line = format!("{test}: {why}\n");
    eprint!("SKIPPED: {line}");
    if let Some(path) = std::env::var_os("DRIFTLINE_SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        log.write_all(line.as_bytes()).unwrap();
    }
}
