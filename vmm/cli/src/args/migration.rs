//! Owns the options of the commands that are about migrations.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use driftline_migrate::{Compression, CopyDrives, TimeoutStrategy};

use super::api::QueryArgs;
use super::headings;
use crate::values;

#[derive(Args)]
pub(crate) struct SendArgs {
    /// Where a receiver listens: tcp:HOST:PORT
    #[arg(value_name = "ADDRESS", value_parser = values::tcp)]
    pub(crate) address: String,
    /// Longest acceptable pause, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 300, value_parser = values::downtime_ms,
          help_heading = headings::CONVERGENCE)]
    pub(crate) downtime_ms: u64,
    /// Time for copying while the guest runs, in seconds
    #[arg(long, value_name = "S", default_value_t = 3600, value_parser = values::timeout_s,
          help_heading = headings::CONVERGENCE)]
    pub(crate) timeout_s: u64,
    /// What to do after that time: cancel or switchover
    #[arg(long, value_name = "NAME", default_value_t = TimeoutStrategy::Cancel,
          help_heading = headings::CONVERGENCE)]
    pub(crate) timeout_strategy: TimeoutStrategy,
    /// Do not throttle vCPUs, even if the guest outruns the link
    ///
    /// Otherwise vCPUs that write are slowed down, by at most 20 ms at a time, when passes over
    /// memory do not get shorter.
    #[arg(long, help_heading = headings::CONVERGENCE)]
    pub(crate) no_throttle: bool,
    /// Limit while the guest runs, in bytes a second, such as 100M
    ///
    /// In the pause the whole link is used; this bandwidth predicts how long that will take.
    #[arg(long, value_name = "SIZE", value_parser = values::bandwidth,
          help_heading = headings::TRANSFER)]
    pub(crate) max_bandwidth: Option<u64>,
    /// Connections that share the sending of memory
    ///
    /// For links that one connection does not fill.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::connections,
          help_heading = headings::TRANSFER)]
    pub(crate) connections: u32,
    /// Compression of memory: none, lz4 or zstd
    ///
    /// It is applied message by message, where it makes a message smaller.
    #[arg(long, value_name = "NAME", default_value_t = Compression::None,
          help_heading = headings::TRANSFER)]
    pub(crate) compress: Compression,
    /// Compare a digest of all memory on both hosts
    ///
    /// That is in the pause, which is longer by the time to read all memory.
    #[arg(long, help_heading = headings::TRANSFER)]
    pub(crate) verify: bool,
    /// Copy the guest's disks, too: all, or those named
    ///
    /// They go into files that the receiver names (--disk path=FILE,id=NAME,copy). Without this
    /// option both hosts need access to the same disks. The source's files stay as the guest has
    /// left them.
    #[arg(long, value_name = "NAME,NAME", num_args = 0..=1, require_equals = true,
          default_missing_value = "", help_heading = headings::TRANSFER)]
    pub(crate) copy_disks: Option<CopyDrives>,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}

#[derive(Args)]
pub(crate) struct ResolveArgs {
    #[command(flatten)]
    pub(crate) action: ResolveAction,
    /// The API socket of the guest's VMM
    #[arg(long, value_name = "FILE", required_unless_present = "state_dir",
          help_heading = headings::API)]
    pub(crate) api_sock: Option<PathBuf>,
    /// Without a VMM: the directory with the record that its crash has left
    #[arg(long, value_name = "DIR", conflicts_with = "api_sock",
          help_heading = headings::MIGRATION)]
    pub(crate) state_dir: Option<PathBuf>,
    /// The guest's id, if several have records there
    #[arg(long, value_name = "ID", requires = "state_dir", help_heading = headings::MIGRATION)]
    pub(crate) vm: Option<String>,
    /// How long to wait for an answer: digits and ms or s
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = values::duration,
          help_heading = headings::WAITING)]
    pub(crate) timeout: Duration,
    /// Print one JSON object
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}

/// Exactly one of the two.
#[derive(Args)]
#[group(required = true, multiple = false)]
pub(crate) struct ResolveAction {
    /// Let the guest run here
    ///
    /// You assert that the destination does not run it and never will.
    #[arg(long, help_heading = headings::DECISION)]
    pub(crate) run: bool,
    /// End the guest here: it runs at the destination, or is lost
    #[arg(long, help_heading = headings::DECISION)]
    pub(crate) discard: bool,
}
