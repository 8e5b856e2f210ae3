//! Owns the options of every command.
//!
//! The first sentence of an option is its line in `-h`, and so fits into one; the rest is for
//! `--help`.

mod examples;
mod guest;
pub(crate) mod headings;
mod hints;
mod migration;
mod store;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use driftline_machine::config::Backend;

use super::compare::CompareArgs;
use super::plan::PlanArgs;
use super::top::TopArgs;
use super::values;
pub(crate) use guest::{DeviceArgs, HostArgs, OnOff, ReceiveArgs, RestoreArgs, RunArgs};
pub(crate) use hints::with_hint;
pub(crate) use migration::{ResolveArgs, SendArgs};
pub(crate) use store::{
    CheckpointArgs, ExportArgs, ExportFormat, RepairArgs, StoreArgs, StoreCommand,
};

/// A KVM virtual machine monitor that knows which guest pages have changed
///
/// Exit codes: 0 done, 1 error, 2 usage, 3 the host lacks something, 4 a migration or checkpoint
/// failed and the guest is still running where it was.
#[derive(Parser)]
#[command(name = "driftline", version, disable_help_flag = true, disable_version_flag = true)]
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

/// Help, and what is logged, how, and where to.
#[derive(Args)]
pub(crate) struct GlobalArgs {
    #[command(flatten)]
    pub(crate) log: LogArgs,
    /// Print help; -h is short
    #[arg(short, long, global = true, action = ArgAction::Help, help_heading = headings::OUTPUT)]
    pub(crate) help: Option<bool>,
}

/// What is logged, how, and where to.
#[derive(Args)]
pub(crate) struct LogArgs {
    /// Log more: -v events, -vv details, -vvv everything
    #[arg(short, long, global = true, action = ArgAction::Count, help_heading = headings::OUTPUT)]
    pub(crate) verbose: u8,
    /// Log filter, such as debug or driftline_machine=trace,info
    ///
    /// Without it and -v, the environment variable RUST_LOG has the filter.
    #[arg(long, global = true, value_name = "FILTER", help_heading = headings::OUTPUT)]
    pub(crate) log: Option<String>,
    /// Log format: text or json
    ///
    /// With json each line is an object.
    #[arg(long, global = true, value_name = "FORMAT", value_enum, hide_possible_values = true,
          default_value_t = LogFormat::Text, help_heading = headings::OUTPUT)]
    pub(crate) log_format: LogFormat,
    /// Append the log to this file instead of writing it to stderr
    #[arg(long, global = true, value_name = "FILE", help_heading = headings::OUTPUT)]
    pub(crate) log_file: Option<PathBuf>,
}

/// How the log is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// For programs
    Json,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// See it work: launch, checkpoint, kill, restore, live-migrate, verify
    #[command(after_help = examples::DEMO)]
    Demo(DemoArgs),
    /// Start a guest and run it to its end
    #[command(after_help = examples::RUN)]
    Run(RunArgs),
    /// Show a guest's state and figures
    #[command(after_help = examples::INFO)]
    Info(QueryArgs),
    /// Show a guest's balloon, or change its size
    #[command(after_help = examples::BALLOON)]
    Balloon(BalloonArgs),
    /// Stop a guest's vCPUs
    #[command(after_help = examples::PAUSE)]
    Pause(ApiArgs),
    /// Let a paused guest run
    #[command(after_help = examples::RESUME)]
    Resume(ApiArgs),
    /// End a guest and its VMM
    #[command(after_help = examples::STOP)]
    Stop(StopArgs),
    /// Take checkpoints of a running guest into a store
    #[command(after_help = examples::CHECKPOINT)]
    Checkpoint(CheckpointArgs),
    /// Build a guest from a checkpoint and run it to its end
    #[command(after_help = examples::RESTORE)]
    Restore(RestoreArgs),
    /// Wait for a guest from another host, then run it to its end
    #[command(after_help = examples::RECEIVE)]
    ReceiveMigration(ReceiveArgs),
    /// Send a running guest to another host
    #[command(after_help = examples::SEND)]
    SendMigration(SendArgs),
    /// Predict how a migration of a running guest, and checkpoints of it, would go
    ///
    /// Watches the guest for about four seconds, which slows its writes down as a migration does.
    /// Nothing is begun.
    #[command(after_help = examples::PLAN)]
    Plan(PlanArgs),
    /// Watch live where, how fast and by which vCPU a guest's memory is written
    ///
    /// Shows a heat map of guest memory by write rate, the figures of each vCPU and its dirty ring,
    /// and the migration or the checkpoints that are under way, which miss nothing. Keys: q quits,
    /// p pauses the view, + and - change the interval. Watching slows the guest's writes down as a
    /// migration does, at any interval, and ends with this command. NO_COLOR shows signs instead of
    /// colours.
    #[command(after_help = examples::TOP)]
    Top(TopArgs),
    /// Cancel a migration; the guest stays where it is
    #[command(after_help = examples::CANCEL)]
    CancelMigration(ApiArgs),
    /// Resolve a migration in doubt: decide where the guest runs
    #[command(after_help = examples::RESOLVE)]
    Resolve(ResolveArgs),
    /// Measure the ways of tracking a guest's writes side by side, on this host
    #[command(after_help = examples::COMPARE)]
    Compare(CompareArgs),
    /// Show what this host offers, and what each missing thing costs
    #[command(after_help = examples::DOCTOR)]
    Doctor(DoctorArgs),
    /// Look at a store of checkpoints
    #[command(subcommand, after_help = examples::STORE)]
    Store(StoreCommand),
}

/// Where a running VMM listens.
#[derive(Args)]
pub(crate) struct ApiArgs {
    /// The API socket of the guest's VMM
    #[arg(long, value_name = "FILE", help_heading = headings::API)]
    pub(crate) api_sock: PathBuf,
    /// How long to wait for an answer: digits and ms or s
    ///
    /// It is for each request. What a command waits for on purpose (the end of a migration,
    /// checkpoints, the next look of top) has no limit.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = values::duration,
          help_heading = headings::WAITING)]
    pub(crate) timeout: Duration,
}

impl ApiArgs {
    /// A client of that VMM.
    pub(crate) fn client(&self) -> driftline_control::api::Client {
        driftline_control::api::Client::new(&self.api_sock).with_timeout(self.timeout)
    }
}

#[derive(Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Wait until the VMM's process has ended, for at most --timeout
    #[arg(long, help_heading = headings::WAITING)]
    pub(crate) wait: bool,
}

/// A question to a running VMM.
#[derive(Args)]
pub(crate) struct QueryArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Print one JSON object
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct BalloonArgs {
    /// Take this much memory from the guest: whole MiB, such as 256M
    #[arg(long, value_name = "SIZE", value_parser = values::size,
          help_heading = headings::MEMORY)]
    pub(crate) size: Option<u64>,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// What runs the vCPUs: kvm or threads
    ///
    /// By default it is kvm where that can be used.
    #[arg(long, value_name = "NAME", help_heading = headings::PROCESSORS)]
    pub(crate) backend: Option<Backend>,
    /// Print the figures as one JSON object
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Exit with 3 if something is missing that every KVM guest needs
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) check: bool,
    /// Print one JSON object
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}
