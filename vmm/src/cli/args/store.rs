//! Owns the options of the commands that are about checkpoints.
#![allow(rustdoc::broken_intra_doc_links, reason = "help texts: brackets are what can be left out")]

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use vmm::api::model::DisksPolicy;

use super::{ApiArgs, values};

#[derive(Args)]
pub(crate) struct CheckpointArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// The store's directory, created if need be
    #[arg(long, value_name = "DIR", required_unless_present_any = ["stop", "status"])]
    pub(crate) store: Option<PathBuf>,
    /// End the checkpoint run that is active, after the checkpoint under way
    #[arg(long, conflicts_with_all = ["store", "status", "every", "count", "detach"])]
    pub(crate) stop: bool,
    /// Show the checkpoint run that is active, or was last
    #[arg(long, conflicts_with_all = ["store", "every", "count", "detach"])]
    pub(crate) status: bool,
    /// Leave the run to itself: it goes on until --count, --stop or the guest's end. Without it a run ends with this command
    #[arg(long, requires = "every")]
    pub(crate) detach: bool,
    /// Make the store: its directory does not exist yet, or is empty. A clone needs one of its own, beside its parent's
    #[arg(long)]
    pub(crate) new_store: bool,
    /// Take one at this interval until --count or Ctrl-C; without it, take one
    #[arg(long, value_name = "TIME", value_parser = values::interval)]
    pub(crate) every: Option<Duration>,
    /// How long the guest may stand still for one: when so much has changed that the next would take longer, or would not
    /// fit into the memory kept for copies, it is taken early
    #[arg(long, value_name = "TIME", requires = "every", value_parser = values::duration)]
    pub(crate) max_pause: Option<Duration>,
    /// Keep so many, and drop older ones: the store stays as large as it is with them. Without it all are kept
    ///
    /// One that is being restored or read in another way is dropped later.
    #[arg(long, value_name = "N", value_parser = values::at_least_one)]
    pub(crate) keep: Option<NonZeroU64>,
    /// Write memory past the host's page cache (O_DIRECT): less of the processor's time, and what others have in that cache stays
    #[arg(long)]
    pub(crate) direct_io: bool,
    /// What becomes of disks that the guest can write to: epoch or external
    ///
    /// With epoch, what changed of them is in each checkpoint, as it was in that pause, and restore writes it back. With external
    /// checkpoints have memory and devices, and you keep, for each, copies of the disks as they were in its pause: made while the guest
    /// is paused, or by a snapshot of the storage at that moment.
    #[arg(long, value_name = "POLICY", default_value = "epoch")]
    pub(crate) disks: DisksPolicy,
    /// Stop after so many
    #[arg(long, value_name = "N", requires = "every", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// Print one JSON object a line for each checkpoint; with --every, a last one says what was achieved
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Subcommand)]
pub(crate) enum StoreCommand {
    /// List the checkpoints
    Ls(StoreArgs),
    /// Read everything and check it
    Verify(StoreArgs),
    /// Make a damaged store usable again: sound checkpoints stay, what is replaced is kept in files named damaged-N.*
    Repair(RepairArgs),
    /// Write the store anew, without the room that dropped checkpoints have left; nobody may be writing to it
    Compact(StoreArgs),
    /// Write a checkpoint to a file
    Export(ExportArgs),
}

#[derive(Args)]
pub(crate) struct ExportArgs {
    /// The store's directory
    #[arg(value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// raw: each byte at its guest physical address; elf-core: that as a core, with the registers of every vCPU; both with holes where memory
    /// is zero. driftline-zstd: an archive of memory, state and disks, packed, for restore --store FILE
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = ExportFormat::Raw)]
    pub(crate) format: ExportFormat,
    /// The checkpoint's number; the latest by default
    #[arg(long, value_name = "N", value_parser = values::checkpoint)]
    pub(crate) epoch: Option<u64>,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Write over a file that is there
    #[arg(long)]
    pub(crate) force: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// What an exported checkpoint is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ExportFormat {
    /// A flat memory file
    Raw,
    /// An ELF core with the registers of every vCPU, for gdb and crash
    ElfCore,
    /// Memory and state in a packed file of Driftline's own, which `restore` takes
    DriftlineZstd,
}

#[derive(Args)]
pub(crate) struct RepairArgs {
    /// The store's directory; nobody may be writing to it
    #[arg(value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// Only say what is sound and what is not; change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct StoreArgs {
    /// The store's directory; to list and to verify, an archive too
    #[arg(value_name = "PATH")]
    pub(crate) store: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
