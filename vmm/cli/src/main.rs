//! The `driftline` binary: parses options, calls the libraries, prints results on stdout and
//! everything else on stderr. Owns the process, its exit code and its log.
#![forbid(unsafe_code)]

mod args;
mod balloon;
mod bounded_file;
mod checkpoint;
mod checkpoint_source;
mod client;
mod colour;
mod compare;
mod config_file;
mod demo;
mod doctor;
mod end;
mod failure;
mod firecracker;
mod firecracker_log;
mod hand_overs;
mod interrupts;
mod line_file;
mod log;
mod migration;
mod notify;
mod output;
mod paths;
mod plan;
mod process_line;
mod progress;
mod receive;
mod receiver_socket;
mod report;
mod restore;
mod run;
mod serve;
mod setup;
mod status_line;
mod store;
mod take_over;
mod top;
mod upgrade;
mod values;
mod version;

use std::env;
use std::process::ExitCode;
use std::time::Instant;

use args::{Cli, Command, StartCommand};
use failure::Failure;

/// musl's allocator returns memory to the system with almost every free, which slows the start of a
/// process down: 18.5 ms to a guest's first byte, and 16.3 ms with this allocator (`cargo bench
/// --bench boot`, built as by packaging/build.sh).
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

fn main() -> ExitCode {
    let started = Instant::now();
    driftline_machine::limits::raise_open_files();
    driftline_machine::schedule::short_slices();
    if let Some(line) = firecracker::invoked(env::args_os()) {
        let code = firecracker::main(line);
        driftline_machine::log::flush();
        return code;
    }
    let cli = match Cli::parse_line() {
        Ok(cli) => cli,
        Err(e) => return report::refuse_usage(&args::with_hint(e)),
    };
    let (cli, taken) = match cli.command {
        Command::TakeOver(args) => match take_over::begin(&args) {
            Ok((cli, taken)) => (cli, Some(taken)),
            Err(e) => return report::report(e),
        },
        command => (Cli { command, ..cli }, None),
    };
    let verbose = cli.output.log.verbose > 0;
    let logs = match cli.command {
        Command::Start(StartCommand::Serve(_)) => log::Logs::OwnAndClients,
        _ => log::Logs::Own,
    };
    let done = match (log::start(&cli.output.log, logs), taken) {
        (Ok(()), None) => run(cli.command, verbose, started),
        (Ok(()), Some(taken)) => take_over::take_over(cli.command, taken),
        (Err(e), taken) => {
            taken.into_iter().for_each(|taken| take_over::refuse(taken, &e));
            Err(e)
        }
    };
    let code = done.unwrap_or_else(report::report);
    driftline_machine::log::flush();
    code
}

fn run(command: Command, verbose: bool, started: Instant) -> Result<ExitCode, Failure> {
    match command {
        Command::Start(StartCommand::Run(args)) => run::run(*args, started),
        Command::Start(StartCommand::Serve(args)) => serve::serve(args),
        Command::Start(StartCommand::Restore(args)) => restore::restore(args, started),
        Command::Start(StartCommand::ReceiveMigration(args)) => receive::receive(args),
        // Its line has been taken above if it is the first argument.
        Command::Firecracker(args) => Err(Failure::usage(format_args!(
            "firecracker takes none of Driftline's options: write it first, as in driftline \
             firecracker{}",
            args.line.iter().map(|arg| format!(" {}", arg.display())).collect::<String>()
        ))),
        Command::Info(args) => client::info(&args),
        Command::Balloon(args) => balloon::balloon(&args),
        Command::Pause(args) => client::pause(&args),
        Command::Resume(args) => client::resume(&args),
        Command::Nmi(args) => client::nmi(&args),
        Command::Stop(args) => client::stop(&args),
        Command::Checkpoint(args) => checkpoint::checkpoint(&args),
        Command::SendMigration(args) => migration::send(&args),
        Command::Upgrade(args) => upgrade::upgrade(&args),
        // `take_over::begin` has replaced it by the command of the guest's process.
        Command::TakeOver(_) => Err(Failure::usage("take-over cannot continue another take-over")),
        Command::Plan(args) => plan::plan(&args),
        Command::Top(args) => top::top(&args),
        Command::CancelMigration(args) => migration::cancel(&args),
        Command::Resolve(args) => migration::resolve(&args),
        Command::Doctor(args) => doctor::doctor(&args, verbose),
        Command::Compare(args) => compare::compare(args),
        Command::Demo(args) => demo::demo(&args),
        Command::Store(command) => store::store(&command),
    }
}
