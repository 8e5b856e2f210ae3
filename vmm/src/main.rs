//! The `driftline` binary: owns the process, its exit code and its log; everything else is in [`cli`]
//! and [`demo`].
#![forbid(unsafe_code)]

mod cli;
mod demo;

use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let started = Instant::now();
    vmm::limits::raise_open_files();
    vmm::schedule::short_slices();
    cli::main(started)
}
