//! Owns the options of the commands for checkpoints.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use driftline_control::model::DisksPolicy;

use super::api::ApiArgs;
use super::{examples, headings};
use crate::values;

#[derive(Args)]
pub(crate) struct CheckpointArgs {
    /// The store's directory; created if it does not exist
    #[arg(long, value_name = "DIR", required_unless_present_any = ["stop", "status"],
          help_heading = headings::STORE)]
    pub(crate) store: Option<PathBuf>,
    /// Create the store; its directory must be absent or empty
    ///
    /// A clone needs a store of its own: its parent's store does not accept its checkpoints.
    #[arg(long, help_heading = headings::STORE)]
    pub(crate) new_store: bool,
    /// Keep this many checkpoints and drop older ones
    ///
    /// Without this option all are kept. A checkpoint that is being read is dropped later.
    #[arg(long, value_name = "N", value_parser = values::at_least_one,
          help_heading = headings::STORE)]
    pub(crate) keep: Option<NonZeroU64>,
    /// Write memory past the host's page cache (O_DIRECT)
    ///
    /// Direct I/O takes less processor time and leaves the page cache to others.
    #[arg(long, help_heading = headings::STORE)]
    pub(crate) direct_io: bool,
    /// Writable disks in checkpoints: include or external
    ///
    /// With include, each checkpoint includes the disk blocks that changed up to its pause, and
    /// restore writes them back. With external, a checkpoint has memory and devices only. For each
    /// one you keep copies of the disks as they were in its pause: copies made while the guest is
    /// paused, or a snapshot of the storage from that moment.
    #[arg(long, value_name = "POLICY", default_value = "include", help_heading = headings::STORE)]
    pub(crate) disks: DisksPolicy,
    /// Interval between checkpoints, such as 200ms; without it, one is taken
    #[arg(long, value_name = "TIME", value_parser = values::interval,
          help_heading = headings::SCHEDULE)]
    pub(crate) every: Option<Duration>,
    /// Stop after this many checkpoints
    #[arg(long, value_name = "N", requires = "every",
          value_parser = clap::value_parser!(u64).range(1..), help_heading = headings::SCHEDULE)]
    pub(crate) count: Option<u64>,
    /// Longest pause of the guest for one checkpoint
    ///
    /// A checkpoint is taken early if so many pages have changed that the pause would be longer, or
    /// that the memory for copies would not suffice.
    #[arg(long, value_name = "TIME", requires = "every", value_parser = values::duration,
          help_heading = headings::SCHEDULE)]
    pub(crate) max_pause: Option<Duration>,
    /// Keep the run active after this command has ended
    ///
    /// The run then ends at --count, at --stop or with the guest. Without this option it ends with
    /// this command.
    #[arg(long, requires = "every", help_heading = headings::SCHEDULE)]
    pub(crate) detach: bool,
    /// End the active run after its current checkpoint
    #[arg(long, conflicts_with_all = ["store", "status", "every", "count", "detach"],
          help_heading = headings::RUN)]
    pub(crate) stop: bool,
    /// Show the active run, or the last one
    #[arg(long, conflicts_with_all = ["store", "every", "count", "detach"],
          help_heading = headings::RUN)]
    pub(crate) status: bool,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Print one JSON object a line for each checkpoint
    ///
    /// With --every, the last line has the totals of the run. --detach, --stop and --status print
    /// one object.
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}

#[derive(Subcommand)]
pub(crate) enum StoreCommand {
    /// List the checkpoints
    #[command(after_help = examples::STORE_LS)]
    Ls(StoreArgs),
    /// Read and check all checkpoints
    #[command(after_help = examples::STORE_VERIFY)]
    Verify(StoreArgs),
    /// Make a damaged store usable again
    ///
    /// Sound checkpoints stay. Replaced files are kept as damaged-N.*. The store must have no
    /// writer meanwhile.
    #[command(after_help = examples::STORE_REPAIR)]
    Repair(RepairArgs),
    /// Rewrite the store without the space of dropped checkpoints
    ///
    /// The store must have no writer meanwhile.
    #[command(after_help = examples::STORE_COMPACT)]
    Compact(StoreArgs),
    /// Write a checkpoint to a file
    #[command(after_help = examples::STORE_EXPORT)]
    Export(ExportArgs),
}

#[derive(Args)]
pub(crate) struct ExportArgs {
    /// The store's directory
    #[arg(value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// The checkpoint's number; the latest by default
    #[arg(long, value_name = "N", value_parser = values::checkpoint,
          help_heading = headings::CHECKPOINT)]
    pub(crate) checkpoint: Option<u64>,
    /// The file to write
    #[arg(long, value_name = "FILE", help_heading = headings::FILE)]
    pub(crate) output: PathBuf,
    /// Format
    ///
    /// raw and elf-core have holes where memory is zero.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = ExportFormat::Raw,
          help_heading = headings::FILE)]
    pub(crate) format: ExportFormat,
    /// Overwrite the file if it exists
    #[arg(long, help_heading = headings::FILE)]
    pub(crate) force: bool,
    /// Print one JSON object
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}

/// Format of an exported checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ExportFormat {
    /// Memory, each byte at its guest physical address
    Raw,
    /// An ELF core with memory and the registers of every vCPU, for gdb and crash
    ElfCore,
    /// An archive of memory, state and disks, for restore --store FILE
    DriftlineZstd,
}

#[derive(Args)]
pub(crate) struct RepairArgs {
    /// The store's directory
    #[arg(value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// Report which checkpoints are sound, and change nothing
    #[arg(long, help_heading = headings::STORE)]
    pub(crate) dry_run: bool,
    /// Print one JSON object
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct StoreArgs {
    /// The store's directory; for ls and verify, an archive too
    #[arg(value_name = "PATH")]
    pub(crate) store: PathBuf,
    /// Print one JSON object
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}
