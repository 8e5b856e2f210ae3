//! Owns the commands, and the options of those that have few.

use std::ffi::OsString;

use clap::{ArgAction, Args, Parser, Subcommand};
use driftline_machine::config::BackendKind;

use super::api::{BalloonArgs, QueryArgs, StopArgs};
use super::compare::CompareArgs;
use super::guest::{ReceiveArgs, RestoreArgs, RunArgs};
use super::log::GlobalArgs;
use super::migration::{ResolveArgs, SendArgs};
use super::plan::PlanArgs;
use super::serve::ServeArgs;
use super::store::{CheckpointArgs, StoreCommand};
use super::top::TopArgs;
use super::upgrade::{TakeOverArgs, UpgradeArgs};
use super::{examples, headings};
use crate::version::version;

/// A KVM virtual machine monitor that knows which guest pages have changed
///
/// Exit codes: 0 done, 1 error, 2 usage, 3 the host lacks something, 4 a migration or checkpoint
/// failed and the guest is still running where it was.
#[derive(Parser)]
#[command(name = "driftline", version = version())]
#[command(disable_help_flag = true, disable_version_flag = true)]
#[command(after_help = examples::DRIFTLINE)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Print the version
    #[arg(short = 'V', long, action = ArgAction::Version, help_heading = headings::OUTPUT)]
    pub(crate) version: Option<bool>,
    #[command(flatten)]
    pub(crate) output: GlobalArgs,
}

/// The command line of a guest's process.
#[derive(Parser)]
#[command(name = "driftline", version = version())]
#[command(disable_help_flag = true, disable_version_flag = true)]
struct StartCli {
    #[command(subcommand)]
    command: StartCommand,
    #[command(flatten)]
    output: GlobalArgs,
}

impl Cli {
    /// Parses the arguments of this process.
    ///
    /// A guest's process parses with its own commands first: the options of all commands cost 0.3
    /// ms of its start (`cargo bench -p driftline-cli --bench boot`).
    ///
    /// # Errors
    ///
    /// The arguments are wrong, or ask for help or the version.
    pub(crate) fn parse_line() -> Result<Self, clap::Error> {
        match StartCli::try_parse() {
            Ok(StartCli { command, output }) => {
                Ok(Self { command: Command::Start(command), version: None, output })
            }
            Err(_) => Self::try_parse(),
        }
    }

    /// Parses the arguments of a guest's process, which another process continues.
    ///
    /// # Errors
    ///
    /// They are not those of a guest's process.
    pub(crate) fn parse_guest(arguments: &[String]) -> Result<Self, clap::Error> {
        let line = std::iter::once("driftline").chain(arguments.iter().map(String::as_str));
        let StartCli { command, output } = StartCli::try_parse_from(line)?;
        Ok(Self { command: Command::Start(command), version: None, output })
    }
}

/// Arguments that another parser reads.
#[derive(Args)]
pub(crate) struct FirecrackerLine {
    /// Firecracker's arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    pub(crate) line: Vec<OsString>,
}

// The commands that are the process of a guest. A doc comment would be part of the help.
#[derive(Subcommand)]
pub(crate) enum StartCommand {
    /// Start a guest and run it to its end
    #[command(after_help = examples::RUN)]
    Run(Box<RunArgs>),
    /// Run a guest that a client of Firecracker's API configures
    ///
    /// The client sets kernel, drives and the like, and starts the guest. A request for what
    /// Driftline does not have, or not yet, is refused by name.
    #[command(after_help = examples::SERVE)]
    Serve(ServeArgs),
    /// Build a guest from a checkpoint and run it to its end
    #[command(after_help = examples::RESTORE)]
    Restore(RestoreArgs),
    /// Wait for a guest from another host, then run it to its end
    #[command(after_help = examples::RECEIVE)]
    ReceiveMigration(ReceiveArgs),
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Run a demonstration: launch, checkpoint, kill, restore, live-migrate, verify
    #[command(after_help = examples::DEMO)]
    Demo(DemoArgs),
    #[command(flatten)]
    Start(StartCommand),
    /// Behave like `firecracker`: its arguments, messages and exit codes
    ///
    /// The arguments are Firecracker's; no option of Driftline may precede them. The program does
    /// the same if it is started under the name `firecracker`.
    #[command(after_help = examples::FIRECRACKER)]
    Firecracker(FirecrackerLine),
    /// Show a guest's state and figures
    #[command(after_help = examples::INFO)]
    Info(QueryArgs),
    /// Show a guest's balloon, or change its size
    #[command(after_help = examples::BALLOON)]
    Balloon(BalloonArgs),
    /// Pause a guest
    #[command(after_help = examples::PAUSE)]
    Pause(QueryArgs),
    /// Resume a paused guest
    #[command(after_help = examples::RESUME)]
    Resume(QueryArgs),
    /// Send a non-maskable interrupt to a guest that does not respond
    ///
    /// Linux logs the interrupt. With kernel.unknown_nmi_panic=1 it panics, and can write a crash
    /// dump.
    #[command(after_help = examples::NMI)]
    Nmi(QueryArgs),
    /// End a guest and its VMM
    #[command(after_help = examples::STOP)]
    Stop(StopArgs),
    /// Take checkpoints of a running guest into a store
    #[command(after_help = examples::CHECKPOINT)]
    Checkpoint(CheckpointArgs),
    /// Send a running guest to another host
    #[command(after_help = examples::SEND)]
    SendMigration(SendArgs),
    /// Replace the VMM of a running guest by another process or version
    ///
    /// The next process continues with the guest's memory, its open files, the API socket and its
    /// connections; nothing is copied or closed. It gets the command line of the process that it
    /// replaces. If it cannot take the guest, the guest stays where it is. Needs the memory backing
    /// memfd.
    #[command(after_help = examples::UPGRADE)]
    Upgrade(UpgradeArgs),
    /// Continue with the guest of another process; started by upgrade
    #[command(hide = true, after_help = examples::TAKE_OVER)]
    TakeOver(TakeOverArgs),
    /// Predict a migration and checkpoints of a running guest
    ///
    /// Watches the guest's writes for about four seconds, which slows them down as a migration
    /// does. Starts neither a migration nor a checkpoint.
    #[command(after_help = examples::PLAN)]
    Plan(PlanArgs),
    /// Show live where, how fast and by which vCPU a guest's memory is written
    ///
    /// Shows a heat map of guest memory by write rate, the figures of each vCPU and its dirty ring,
    /// and a migration or checkpoints under way. Watching makes neither of them miss a page. Keys:
    /// q quits, p pauses the view, + and - change the interval. Watching slows the guest's writes
    /// down as a migration does, at any interval, and ends with this command. With NO_COLOR set,
    /// signs replace colours.
    #[command(after_help = examples::TOP)]
    Top(TopArgs),
    /// Cancel a migration; the guest continues at the source
    #[command(after_help = examples::CANCEL)]
    CancelMigration(QueryArgs),
    /// Resolve a migration in doubt: decide where the guest runs
    #[command(after_help = examples::RESOLVE)]
    Resolve(ResolveArgs),
    /// Measure the ways of tracking a guest's writes on this host, side by side
    #[command(after_help = examples::COMPARE)]
    Compare(CompareArgs),
    /// Show the features of this host, and the cost of each missing one
    #[command(after_help = examples::DOCTOR)]
    Doctor(DoctorArgs),
    /// Inspect and maintain a store of checkpoints
    #[command(subcommand, after_help = examples::STORE)]
    Store(StoreCommand),
}

#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Backend of the vCPUs: kvm or threads
    ///
    /// The default is kvm where the host has it.
    #[arg(long, value_name = "NAME", help_heading = headings::PROCESSORS)]
    pub(crate) backend: Option<BackendKind>,
    /// Print the figures as one JSON object
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Exit with 3 if the host lacks a feature that every KVM guest needs
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) check: bool,
    /// Print one JSON object
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}
