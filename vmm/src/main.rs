//! The `driftline` binary: owns the process, its exit code and its log; everything else is in [`cli`].
#![forbid(unsafe_code)]

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
