//! Options of `send`, with their defaults and bounds.

use std::path::PathBuf;
use std::time::Duration;

use super::drives::CopyDrives;
use crate::policy::convergence::{Goals, Reason, TimeoutStrategy};
use crate::protocol::limits::MAX_PASSES;
use crate::transport::compression::Compression;
use crate::transport::protection::SendTls;

/// Lower bound on [`SendOptions::max_bandwidth`], bytes/s: one message of memory then takes a
/// second, and a destination waits ten seconds for one.
pub const MIN_BANDWIDTH: u64 = 1 << 20;

/// Options of [`send`](crate::send). [`SendOptions::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct SendOptions {
    /// Directory of this host's hand-over records ([`Records`](crate::Records)).
    pub records: PathBuf,
    /// Target of the pause. Default: 300 ms.
    pub downtime: Duration,
    /// Upper bound on passes before the last one; more than 4095 count as 4095. Default: 30.
    pub max_passes: u32,
    /// Upper bound on pre-copy. Default: one hour.
    pub timeout: Duration,
    /// Action at either of these two bounds. Default: cancel.
    pub timeout_strategy: TimeoutStrategy,
    /// Bandwidth limit while the guest runs, bytes/s; at least [`MIN_BANDWIDTH`]. `None`, the
    /// default: no limit. The last pass ignores it. The expected pause is computed with it, because
    /// the rate of a link that was never used fully is not known.
    pub max_bandwidth: Option<u64>,
    /// Number of connections that send memory, 1 to [`MAX_CONNECTIONS`](crate::MAX_CONNECTIONS).
    /// Default: 1. More connections help if one does not fill the link; each costs a thread at
    /// either end.
    pub connections: u32,
    /// Compression of contents; a message is sent uncompressed unless it shrinks by at least an
    /// eighth. Default: none.
    pub compression: Compression,
    /// Whether both ends compare a digest of all memory in the pause, which takes the time to read
    /// all memory. Default: false.
    pub verify: bool,
    /// Disks to copy, because the destination cannot reach them. Default: none.
    pub copy_drives: CopyDrives,
    /// Whether vCPUs are throttled if passes do not shrink. Default: true.
    pub throttle: bool,
    /// TLS of all connections. `None`, the default: no TLS, and only loopback and unix sockets are
    /// dialled, unless [`insecure`](Self::insecure) is set.
    pub tls: Option<SendTls>,
    /// Whether to connect to another host without TLS. Default: false.
    pub insecure: bool,
    /// Whether the guest is handed over to a receiver on this host at a unix socket, with its
    /// memory as it is: nothing is copied. The guest's memory must be in files. Cannot be combined
    /// with several connections, compression, `verify`, copied disks, a bandwidth limit or TLS.
    /// Default: false.
    pub local: bool,
    /// Upper bound on opening a connection, and again on its HELLO and its JOIN. Default: 10 s.
    pub connect_timeout: Duration,
    /// Upper bound on building the machine at the destination. Default: 30 s.
    pub setup_timeout: Duration,
    /// Longest time without any progress of the destination in any other phase. Default: 10 s.
    pub progress_timeout: Duration,
    /// Upper bound on one call that reads a copied disk, after which the migration fails. Default:
    /// 8 s, which is less than a destination waits for progress, so that it receives the reason.
    pub disk_limit: Duration,
    /// Upper bound on the pause until PREPARED, after which the guest resumes here. `None`, the
    /// default: ten times the target, or ten times the expected pause if the strategy is to pause
    /// in any case; at least 5 s.
    pub switch_over_limit: Option<Duration>,
    /// Upper bound on the time from COMMIT to its answer, after which the migration is in doubt.
    /// Default: 10 s.
    pub commit_timeout: Duration,
    /// Interval between questions to the destination while in doubt. Default: 500 ms.
    pub ask_interval: Duration,
}

impl SendOptions {
    /// Returns the defaults, with the directory of hand-over records.
    pub fn new(records: impl Into<PathBuf>) -> Self {
        let Goals { downtime, max_passes, timeout, strategy } = Goals::default();
        Self {
            records: records.into(),
            downtime,
            max_passes,
            timeout,
            timeout_strategy: strategy,
            max_bandwidth: None,
            connections: 1,
            compression: Compression::None,
            verify: false,
            copy_drives: CopyDrives::None,
            throttle: true,
            tls: None,
            insecure: false,
            local: false,
            connect_timeout: Duration::from_secs(10),
            setup_timeout: Duration::from_secs(30),
            progress_timeout: Duration::from_secs(10),
            disk_limit: Duration::from_secs(8),
            switch_over_limit: None,
            commit_timeout: Duration::from_secs(10),
            ask_interval: Duration::from_millis(500),
        }
    }

    /// Returns the defaults for a hand-over on this host, during which clients of the guest may
    /// wait: a receiver that hangs before COMMIT is given up after at most 10 s.
    pub fn on_this_host(records: impl Into<PathBuf>) -> Self {
        Self {
            local: true,
            connect_timeout: Duration::from_secs(5),
            // The memory exists.
            setup_timeout: Duration::from_secs(10),
            ..Self::new(records)
        }
    }

    /// Returns the upper bound on the pause that `reason` led to.
    pub(super) fn pause_limit(&self, reason: &Reason) -> Duration {
        let expected = reason.expected().unwrap_or_default().max(self.downtime);
        let usual = expected.saturating_mul(10).max(Duration::from_secs(5));
        self.switch_over_limit.unwrap_or(usual)
    }

    pub(super) fn goals(&self) -> Goals {
        Goals {
            downtime: self.downtime,
            max_passes: self.max_passes.min(MAX_PASSES - 1),
            timeout: self.timeout,
            strategy: self.timeout_strategy,
        }
    }
}
