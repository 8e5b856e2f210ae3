//! The command line: options in, a job done by the library, results on stdout, all else on stderr.

pub(crate) mod args;
mod balloon;
mod checkpoint;
mod client;
mod compare;
mod doctor;
mod end;
pub(crate) mod failure;
mod live;
mod migration;
pub(crate) mod output;
mod pending;
mod plan;
mod progress;
mod store;
mod stored;
mod top;
mod values;

use std::io;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{Cli, Command, LogArgs};
use failure::Failure;

/// Reads the command line and does what it says, in a process that has `started` then.
pub fn main(started: Instant) -> ExitCode {
    let cli = Cli::parse();
    if let Err(e) = start_log(&cli.log) {
        return e.report();
    }
    match run(cli.command, started) {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}

fn run(command: Command, started: Instant) -> Result<ExitCode, Failure> {
    match command {
        Command::Run(args) => live::run(args, started),
        Command::Info(args) => client::info(&args),
        Command::Balloon(args) => balloon::balloon(&args),
        Command::Pause(args) => client::pause(&args),
        Command::Resume(args) => client::resume(&args),
        Command::Stop(args) => client::stop(&args),
        Command::Checkpoint(args) => checkpoint::checkpoint(&args),
        Command::Restore(args) => live::restore(args, started),
        Command::ReceiveMigration(args) => live::receive(args),
        Command::SendMigration(args) => migration::send(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Top(args) => top::top(&args),
        Command::CancelMigration(args) => migration::cancel(&args),
        Command::Resolve(args) => migration::resolve(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Compare(args) => compare::compare(args),
        Command::Demo(args) => crate::demo::demo(&args),
        Command::Store(command) => store::store(&command),
    }
}

/// The log goes to stderr: what `--log` says, else more with each `-v`, else what `RUST_LOG` says, else warnings.
fn start_log(args: &LogArgs) -> Result<(), Failure> {
    let chosen = match (&args.log, args.verbose) {
        (Some(filter), _) => Some(filter.as_str()),
        (None, 0) => None,
        (None, 1) => Some("info"),
        (None, 2) => Some("debug"),
        (None, _) => Some("trace"),
    };
    let filter = match chosen {
        Some(filter) => EnvFilter::try_new(filter)
            .map_err(|e| Failure::error(format!("\"{filter}\" is no log filter: {e}")))?,
        None => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn")),
    };
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    Ok(())
}
