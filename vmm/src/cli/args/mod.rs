//! Owns the options of every command.
#![allow(rustdoc::broken_intra_doc_links, reason = "help texts: brackets are what can be left out")]

mod guest;
mod migration;
mod store;

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use vmm::config::Backend;

use super::compare::CompareArgs;
use super::values;
pub(crate) use guest::{DeviceArgs, HostArgs, OnOff, ReceiveArgs, RestoreArgs, RunArgs};
pub(crate) use migration::{ResolveArgs, SendArgs};
pub(crate) use store::{
    CheckpointArgs, ExportArgs, ExportFormat, RepairArgs, StoreArgs, StoreCommand,
};

/// A small KVM virtual machine monitor that knows which guest frames changed.
///
/// Exit codes: 0 done, 1 error, 2 usage, 3 the host lacks something, 4 a migration or checkpoint
/// failed and the guest is still running where it was.
#[derive(Parser)]
#[command(name = "driftline", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// What is logged, how, and where to.
#[derive(Args)]
pub(crate) struct LogArgs {
    /// Log more: -v what happens, -vv details, -vvv everything
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Log by this filter, such as debug or vmm=trace,info; RUST_LOG is the default
    #[arg(long, global = true, value_name = "FILTER")]
    pub(crate) log: Option<String>,
    /// How the log is written; json is one object a line
    #[arg(long, global = true, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
    /// Append the log to this file instead of writing it to stderr
    #[arg(long, global = true, value_name = "FILE")]
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
    Demo(DemoArgs),
    /// Start a guest and run it to its end
    Run(RunArgs),
    /// Show a guest's state and figures
    Info(QueryArgs),
    /// Show a guest's balloon, or change its size
    Balloon(BalloonArgs),
    /// Stop a guest's vCPUs
    Pause(ApiArgs),
    /// Let a paused guest run
    Resume(ApiArgs),
    /// End a guest and its VMM
    Stop(StopArgs),
    /// Take checkpoints of a running guest into a store
    Checkpoint(CheckpointArgs),
    /// Build a guest from a checkpoint and run it to its end
    Restore(RestoreArgs),
    /// Wait for a guest from another host, then run it to its end
    ReceiveMigration(ReceiveArgs),
    /// Send a running guest to another host
    SendMigration(SendArgs),
    /// Say what a migration of a running guest, and checkpoints of it, would come to
    ///
    /// Watches the guest for about four seconds, in which following its writes costs it what it does in a migration. Nothing is begun.
    Plan(super::plan::PlanArgs),
    /// Watch live what a guest writes: where in its memory, how fast, by which vCPU; and how its migration or checkpoints go
    ///
    /// A heat map of guest memory by the rate at which it is written, the figures of each vCPU and of its dirty ring, and what is under way. Keys: q quits, p
    /// pauses the view, + and - change the interval. Watching costs the guest what following its writes does in a migration, however seldom you
    /// look, and ends with this command. A migration and checkpoints may be under way meanwhile; they miss nothing. NO_COLOR has signs instead of colours.
    Top(super::top::TopArgs),
    /// Give up a migration; the guest stays where it is
    CancelMigration(ApiArgs),
    /// Settle a migration in doubt: say where the guest shall be
    Resolve(ResolveArgs),
    /// Measure the ways of tracking a guest's writes side by side, on this host
    Compare(CompareArgs),
    /// Show what this host offers, and what each missing thing costs
    Doctor(DoctorArgs),
    /// Look at a store of checkpoints
    #[command(subcommand)]
    Store(StoreCommand),
}

/// Where a running driftline listens.
#[derive(Args)]
pub(crate) struct ApiArgs {
    /// The API socket of the driftline that has the guest
    #[arg(long, value_name = "FILE")]
    pub(crate) api_sock: PathBuf,
    /// How long to wait for an answer: digits and ms or s
    ///
    /// For each request. What a command waits for on purpose (the end of a migration, checkpoints, the next look of top) has no limit.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = values::duration)]
    pub(crate) timeout: Duration,
}

impl ApiArgs {
    /// A client of that driftline.
    pub(crate) fn client(&self) -> vmm::api::Client {
        vmm::api::Client::new(&self.api_sock).with_timeout(self.timeout)
    }
}

#[derive(Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Wait until the process of the VMM has ended, in the time of --timeout
    #[arg(long)]
    pub(crate) wait: bool,
}

/// A question to a running driftline.
#[derive(Args)]
pub(crate) struct QueryArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct BalloonArgs {
    #[command(flatten)]
    pub(crate) query: QueryArgs,
    /// Want this much of the guest's memory back: whole MiB
    #[arg(long, value_name = "SIZE", value_parser = values::size)]
    pub(crate) size: Option<u64>,
}
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// What runs the vCPUs: kvm where it can be used, else threads
    #[arg(long, value_name = "NAME")]
    pub(crate) backend: Option<Backend>,
    /// Print the figures as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Exit with 3 if something is missing that every KVM guest needs
    #[arg(long)]
    pub(crate) check: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
