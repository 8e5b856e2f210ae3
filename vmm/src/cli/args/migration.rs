//! Owns the options of the commands that are about migrations.
#![allow(rustdoc::broken_intra_doc_links, reason = "help texts: brackets are what can be left out")]

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use migrate::{Compression, CopyDrives, TimeoutStrategy};

use super::{QueryArgs, values};

#[derive(Args)]
pub(crate) struct SendArgs {
    /// Where a driftline waits: tcp:HOST:PORT
    #[arg(value_name = "ADDRESS", value_parser = values::tcp)]
    pub(crate) address: String,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
    /// The pause that the guest may notice, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 300,
          value_parser = values::downtime_ms)]
    pub(crate) downtime_ms: u64,
    /// Time for copying while the guest runs, in seconds
    #[arg(long, value_name = "S", default_value_t = 3600,
          value_parser = values::timeout_s)]
    pub(crate) timeout_s: u64,
    /// What to do when that has passed: cancel or switchover
    #[arg(long, value_name = "NAME", default_value_t = TimeoutStrategy::Cancel)]
    pub(crate) timeout_strategy: TimeoutStrategy,
    /// Bytes a second to copy at most while the guest runs, such as 100M
    ///
    /// In the pause the link is used as it is; what that will take is judged by this bandwidth.
    #[arg(long, value_name = "SIZE", value_parser = values::bandwidth)]
    pub(crate) max_bandwidth: Option<u64>,
    /// Connections that share in the sending of memory, for links that one does not fill
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::connections)]
    pub(crate) connections: u32,
    /// How contents are made smaller, message by message, where that wins: none, lz4 or zstd
    #[arg(long, value_name = "NAME", default_value_t = Compression::None)]
    pub(crate) compress: Compression,
    /// Compare a digest of all memory on both sides, in the pause: it takes the time to read memory
    #[arg(long)]
    pub(crate) verify: bool,
    /// Copy the guest's disks along, all or those with these names, into files that the receiver names
    /// (--disk path=FILE,id=NAME,copy)
    ///
    /// Without, both hosts need the same disks. The files here stay, as the guest has left them, and are
    /// out of date from then on.
    #[arg(long, value_name = "NAME,NAME", num_args = 0..=1, require_equals = true,
          default_missing_value = "")]
    pub(crate) copy_disks: Option<CopyDrives>,
    /// Hold no vCPU back, also if the guest outruns the link
    ///
    /// Otherwise vCPUs that write are slowed down, in holds of 20 ms at most, when passes over memory do not get shorter.
    #[arg(long)]
    pub(crate) no_throttle: bool,
}

#[derive(Args)]
pub(crate) struct ResolveArgs {
    #[command(flatten)]
    pub(crate) action: ResolveAction,
    /// The API socket of the driftline that has the guest
    #[arg(long, value_name = "FILE", required_unless_present = "state_dir")]
    pub(crate) api_sock: Option<PathBuf>,
    /// How long to wait for an answer of that driftline: digits and ms or s
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = values::duration)]
    pub(crate) timeout: Duration,
    /// Without a driftline that has the guest: settle the record that its crash left in this directory
    #[arg(long, value_name = "DIR", conflicts_with = "api_sock")]
    pub(crate) state_dir: Option<PathBuf>,
    /// The guest, where several have records there
    #[arg(long, value_name = "ID", requires = "state_dir")]
    pub(crate) vm: Option<String>,
}

/// Exactly one of the two.
#[derive(Args)]
#[group(required = true, multiple = false)]
pub(crate) struct ResolveAction {
    /// The guest goes on here: you assert that the destination does not run it and never will
    #[arg(long)]
    pub(crate) run: bool,
    /// The guest here ends: it runs at the destination, or is lost
    #[arg(long)]
    pub(crate) discard: bool,
}
