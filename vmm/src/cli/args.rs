//! Owns the options of every command.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, ArgGroup, Args, Parser, Subcommand};
use dirty_tracker::TrackingMode;
use vmm::config::{Backend, DEFAULT_RING_ENTRIES, MAX_VCPUS, SerialSink};

use super::values;

/// A small KVM virtual machine monitor that knows which guest frames changed.
///
/// Exit codes: 0 done, 1 error, 2 usage, 3 the host lacks something, 4 a migration or checkpoint
/// failed and the guest is still running where it was.
#[derive(Parser)]
#[command(name = "driftline", version)]
pub(super) struct Cli {
    #[command(subcommand)]
    pub(super) command: Command,
    #[command(flatten)]
    pub(super) log: LogArgs,
}

/// What is logged; on stderr.
#[derive(Args)]
pub(super) struct LogArgs {
    /// Log more: -v what happens, -vv details, -vvv everything
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(super) verbose: u8,
    /// Log by this filter, such as debug or vmm=trace,info; RUST_LOG is the default
    #[arg(long, global = true, value_name = "FILTER")]
    pub(super) log: Option<String>,
}

#[derive(Subcommand)]
pub(super) enum Command {
    /// Start a guest and run it to its end
    Run(RunArgs),
    /// Show a guest's state and figures
    Info(QueryArgs),
    /// Stop a guest's vCPUs
    Pause(ApiArgs),
    /// Let a paused guest run
    Resume(ApiArgs),
    /// End a guest and its VMM
    Stop(ApiArgs),
    /// Take checkpoints of a running guest into a store
    Checkpoint(CheckpointArgs),
    /// Build a guest from a checkpoint and run it to its end
    Restore(RestoreArgs),
    /// Look at a store of checkpoints
    #[command(subcommand)]
    Store(StoreCommand),
}

/// Where a running driftline listens.
#[derive(Args)]
pub(super) struct ApiArgs {
    /// The API socket of the driftline that has the guest
    #[arg(long, value_name = "FILE")]
    pub(super) api_sock: PathBuf,
}

/// A question to a running driftline.
#[derive(Args)]
pub(super) struct QueryArgs {
    #[command(flatten)]
    pub(super) api: ApiArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

/// How a process that has a guest behaves on its host.
#[derive(Args)]
pub(super) struct HostArgs {
    /// Where the guest's first serial port goes: stdio, null or file:PATH
    #[arg(long, value_name = "SINK", default_value = "stdio")]
    pub(super) serial: SerialSink,
    /// Listen for API requests on this unix socket
    #[arg(long, value_name = "FILE")]
    pub(super) api_sock: Option<PathBuf>,
    /// End at once when the process that started this one ends
    #[arg(long, hide = true)]
    pub(super) die_with_parent: bool,
}

#[derive(Args)]
#[command(group(ArgGroup::new("boot").required(true).args(["kernel", "guest"])))]
pub(super) struct RunArgs {
    /// Boot this static PVH ELF
    #[arg(long, value_name = "FILE")]
    pub(super) kernel: Option<PathBuf>,
    /// Give the kernel this initial RAM disk
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub(super) initrd: Option<PathBuf>,
    /// The kernel's command line
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    pub(super) cmdline: Option<String>,
    /// Boot the embedded guest: payload[,ws=64M][,rate=320M|max][,pattern=seq|random|zipf|stride|once][,seed=N]
    #[arg(long, value_name = "SPEC", value_parser = values::guest_spec)]
    pub(super) guest: Option<String>,
    /// Guest memory
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = values::memory)]
    pub(super) mem: u64,
    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u8).range(1..=i64::from(MAX_VCPUS)))]
    pub(super) vcpus: u8,
    /// How writes are tracked: dirty-ring, dirty-bitmap or none
    #[arg(long, value_name = "MODE", default_value_t = TrackingMode::DirtyRing)]
    pub(super) tracking: TrackingMode,
    /// Entries of each vCPU's dirty ring, a power of two
    #[arg(long, value_name = "N", default_value_t = DEFAULT_RING_ENTRIES,
          value_parser = values::ring_entries)]
    pub(super) ring_entries: u32,
    /// What runs the vCPUs: kvm, or threads for hosts without it (payload only)
    #[arg(long, value_name = "NAME", default_value_t = Backend::Kvm)]
    pub(super) backend: Backend,
    #[command(flatten)]
    pub(super) host: HostArgs,
}

#[derive(Args)]
pub(super) struct CheckpointArgs {
    #[command(flatten)]
    pub(super) api: ApiArgs,
    /// The store's directory, created if need be
    #[arg(long, value_name = "DIR")]
    pub(super) store: PathBuf,
    /// Take one at this interval until --count or Ctrl-C; without it, take one
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    pub(super) every: Option<Duration>,
    /// Stop after so many
    #[arg(long, value_name = "N", requires = "every", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) count: Option<u64>,
    /// Print one JSON object a line for each checkpoint
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Args)]
pub(super) struct RestoreArgs {
    /// The store's directory
    #[arg(long, value_name = "DIR")]
    pub(super) store: PathBuf,
    /// The checkpoint's number; the latest by default
    #[arg(long, value_name = "N")]
    pub(super) epoch: Option<u64>,
    #[command(flatten)]
    pub(super) host: HostArgs,
}

#[derive(Subcommand)]
pub(super) enum StoreCommand {
    /// List the checkpoints
    Ls(StoreArgs),
    /// Read everything and check it
    Verify(StoreArgs),
}

#[derive(Args)]
pub(super) struct StoreArgs {
    /// The store's directory
    #[arg(value_name = "DIR")]
    pub(super) store: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
}
