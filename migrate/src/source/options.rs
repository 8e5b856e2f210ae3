//! How a guest is sent: the options, with their defaults and bounds.

use std::path::PathBuf;
use std::time::Duration;

use super::drives::CopyDrives;
use crate::policy::convergence::{Goals, Reason, TimeoutStrategy};
use crate::protocol::limits::MAX_PASSES;
use crate::transport::compression::Compression;

/// The least bandwidth, bytes/s, that a migration can be limited to: a message of memory takes a
/// second then, and a destination waits ten for one.
pub const MIN_BANDWIDTH: u64 = 1 << 20;

/// How a guest is sent. [`SendOptions::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct SendOptions {
    /// The directory of this host's hand-over records ([`Records`](crate::Records)).
    pub records: PathBuf,
    /// The pause that the last pass may take. 300 ms.
    pub downtime: Duration,
    /// Passes before the last one, at most. 30; more than 4095 count as 4095.
    pub max_passes: u32,
    /// Time for precopy. An hour.
    pub timeout: Duration,
    /// What to do when one of these two runs out. Cancel.
    pub timeout_strategy: TimeoutStrategy,
    /// Bytes/s at most while the guest runs. In the pause the link is used as it is, but what that
    /// will take is judged by this: how fast a link is that was never used so is not known.
    /// Less than [`MIN_BANDWIDTH`] counts as that; `None`, the default: as fast as it goes.
    pub max_bandwidth: Option<u64>,
    /// Connections that share in the sending of memory, 1 to
    /// [`MAX_CONNECTIONS`](crate::MAX_CONNECTIONS). 1. More of them pay where one does
    /// not fill the link: each costs a thread on either side.
    pub connections: u32,
    /// How contents are made smaller, message by message, where that wins an eighth at least. Not
    /// at all.
    pub compression: Compression,
    /// Whether both sides compare a digest of all memory in the pause: that costs the time to read
    /// it.
    pub verify: bool,
    /// Drives that go along, because the destination cannot reach them. None.
    pub copy_drives: CopyDrives,
    /// Whether vCPUs that write are throttled when passes do not shrink (see
    /// [`throttle`](crate::policy::throttle)). They are.
    pub throttle: bool,
    /// Time for a connection to be made. 10 s.
    pub connect_timeout: Duration,
    /// Time for the destination to build the machine. 30 s.
    pub setup_timeout: Duration,
    /// How long the destination may make no progress at all in any other phase. 10 s.
    pub progress_timeout: Duration,
    /// The longest pause until the destination is prepared, after which the guest continues here.
    /// `None`: ten times the downtime, or ten times what the pause was expected to take where the
    /// strategy is to pause anyway; at least 5 s.
    pub switch_over_limit: Option<Duration>,
    /// Time from COMMIT to the answer, after which the migration is in doubt. 10 s.
    pub settle_timeout: Duration,
    /// How often a destination is asked while in doubt. 500 ms.
    pub ask_every: Duration,
}

impl SendOptions {
    /// The defaults, with the directory for the hand-over record.
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
            connect_timeout: Duration::from_secs(10),
            setup_timeout: Duration::from_secs(30),
            progress_timeout: Duration::from_secs(10),
            switch_over_limit: None,
            settle_timeout: Duration::from_secs(10),
            ask_every: Duration::from_millis(500),
        }
    }

    /// How long the pause may be that `reason` led to.
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
