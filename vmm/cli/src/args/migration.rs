//! Owns the options of the commands for migrations.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use driftline_guest::VmId;
use driftline_migrate::{Address, Compression, CopyDrives, PeerName, TimeoutStrategy};

use super::api::QueryArgs;
use super::headings;
use crate::values;

#[derive(Args)]
pub(crate) struct SendArgs {
    /// Address of the receiver: tcp:HOST:PORT or unix:PATH
    #[arg(value_name = "ADDRESS", value_parser = values::address)]
    pub(crate) address: Address,
    /// Longest acceptable downtime, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 300, value_parser = values::downtime_ms,
          help_heading = headings::CONVERGENCE)]
    pub(crate) downtime_ms: u64,
    /// Longest time for pre-copy, in seconds
    #[arg(long, value_name = "S", default_value_t = 3600, value_parser = values::timeout_s,
          help_heading = headings::CONVERGENCE)]
    pub(crate) timeout_s: u64,
    /// Action after that time: cancel or switchover
    #[arg(long, value_name = "NAME", default_value_t = TimeoutStrategy::Cancel,
          help_heading = headings::CONVERGENCE)]
    pub(crate) timeout_strategy: TimeoutStrategy,
    /// Do not throttle vCPUs, even if the guest outruns the link
    ///
    /// Without this option, if passes over memory do not get shorter, the source throttles the
    /// vCPUs that write, by at most 20 ms at a time.
    #[arg(long, help_heading = headings::CONVERGENCE)]
    pub(crate) no_throttle: bool,
    /// Limit of pre-copy, in bytes a second, such as 100M
    ///
    /// The pause uses the whole link. Its length is predicted from this limit.
    #[arg(long, value_name = "SIZE", value_parser = values::bandwidth,
          help_heading = headings::TRANSFER)]
    pub(crate) max_bandwidth: Option<u64>,
    /// Number of connections that send memory
    ///
    /// More than one is for links that one connection does not fill.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::connections,
          help_heading = headings::TRANSFER)]
    pub(crate) connections: u32,
    /// Compression of memory: none, lz4 or zstd
    ///
    /// A message is compressed where that saves an eighth of it.
    #[arg(long, value_name = "NAME", default_value_t = Compression::None,
          help_heading = headings::TRANSFER)]
    pub(crate) compress: Compression,
    /// Compare a digest of all memory on both hosts
    ///
    /// The comparison takes place in the pause, which is longer by the time to read all memory.
    #[arg(long, help_heading = headings::TRANSFER)]
    pub(crate) verify: bool,
    /// Copy the guest's disks, too: all, or the named ones
    ///
    /// The receiver names the files for the copies (--disk path=FILE,id=NAME,copy). Without this
    /// option both hosts need access to the same disks. The source's files keep their content.
    #[arg(long, value_name = "NAME,NAME", num_args = 0..=1, require_equals = true,
          default_missing_value = "", help_heading = headings::TRANSFER)]
    pub(crate) copy_disks: Option<CopyDrives>,
    /// Hand the guest over on this host, without copying memory
    ///
    /// ADDRESS is the receiver's unix:PATH. Both processes map the same memory, so the guest must
    /// have been started with --memory-backing memfd. The receiver gets its open disks and taps and
    /// the connections of its vsock. It must run as the same user, or this process as root.
    #[arg(long, conflicts_with_all = ["max_bandwidth", "connections", "compress", "verify",
          "copy_disks", "tls_dir", "insecure"], help_heading = headings::TRANSFER)]
    pub(crate) local: bool,
    /// Use mutual TLS with the files in this directory
    ///
    /// The guest's VMM reads ca-cert.pem, client-cert.pem and client-key.pem for each connection.
    #[arg(long, value_name = "DIR", help_heading = headings::PROTECTION)]
    pub(crate) tls_dir: Option<PathBuf>,
    /// Name in the receiver's certificate; by default the host dialled
    ///
    /// A DNS name, an IP address or a SPIFFE id (spiffe://DOMAIN/PATH). unix:PATH has no host, so
    /// it needs this option.
    #[arg(long, value_name = "NAME", requires = "tls_dir", help_heading = headings::PROTECTION)]
    pub(crate) peer: Option<PeerName>,
    /// Connect to another host without encryption and authentication
    ///
    /// Every host on the way can then read and change the guest. Loopback and unix sockets need no
    /// such option.
    #[arg(long, conflicts_with = "tls_dir", help_heading = headings::PROTECTION)]
    pub(crate) insecure: bool,
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
    /// After a crash of the VMM: the directory with its hand-over record
    #[arg(long, value_name = "DIR", conflicts_with = "api_sock",
          help_heading = headings::MIGRATION)]
    pub(crate) state_dir: Option<PathBuf>,
    /// The guest's id, if the directory has records of several guests
    #[arg(long, value_name = "ID", requires = "state_dir", help_heading = headings::MIGRATION)]
    pub(crate) vm: Option<VmId>,
    /// How long to wait for an answer, such as 500ms, 30s or 5m
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
    /// Run the guest here
    ///
    /// You assert that the destination does not run the guest and never will.
    #[arg(long, help_heading = headings::DECISION)]
    pub(crate) run: bool,
    /// End the guest here: the destination runs it, or it is lost
    #[arg(long, help_heading = headings::DECISION)]
    pub(crate) discard: bool,
}
