//! JSON of `/v1/migration`.

use std::path::PathBuf;

use driftline_migrate::{
    Compression, CopyDrives, Goals, MAX_CONNECTIONS, MIN_BANDWIDTH, Phase, Progress, Resolution,
    SendReport, SendTls, TimeoutStrategy,
};
use serde::{Deserialize, Serialize};

use super::limit::{LimitError, at_least, at_most, one_to};

/// Body of `POST /v1/migration`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationRequest {
    /// Address of the waiting destination: `tcp:HOST:PORT` or `unix:PATH`.
    pub to: String,
    /// Downtime target, in ms.
    #[serde(default = "default_downtime_ms")]
    pub downtime_ms: u64,
    /// Time limit for copying while the guest runs, in s.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: u64,
    /// Action when that limit is reached.
    #[serde(default)]
    pub timeout_strategy: TimeoutStrategy,
    /// Bandwidth limit for copying while the guest runs, in bytes/s; none by default.
    #[serde(default)]
    pub max_bandwidth_bytes_per_s: Option<u64>,
    /// Number of connections over which memory is sent.
    #[serde(default = "one")]
    pub connections: u32,
    /// Compression of page contents, used where it reduces their size.
    #[serde(default)]
    pub compression: Compression,
    /// Whether both hosts compare a digest of all memory during the pause.
    #[serde(default)]
    pub verify: bool,
    /// Disks that are copied to the destination: "none", "all" or {"named": [..]}.
    #[serde(default)]
    pub copy_disks: CopyDrives,
    /// TLS of all connections; none by default. The directory's path is absolute.
    #[serde(default)]
    pub tls: Option<SendTls>,
    /// Whether the destination may be on another host without TLS.
    #[serde(default)]
    pub insecure: bool,
    /// Whether the guest is handed over to a receiver on this host, at unix:PATH, with its memory
    /// as it is: nothing is copied. The guest needs the memory backing "memfd".
    #[serde(default)]
    pub local: bool,
    /// Whether vCPUs that outrun the link are throttled; by default they are.
    #[serde(default = "default_throttle")]
    pub throttle: bool,
}

/// The longest accepted downtime target, in ms: an hour.
pub const MAX_DOWNTIME_MS: u64 = 3_600_000;
/// The longest accepted time limit for copying, in s: thirty days.
pub const MAX_TIMEOUT_S: u64 = 30 * 24 * 3600;

/// Body of `POST /v1/upgrade`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpgradeRequest {
    /// The unix socket at which the next process listens; `driftline upgrade` starts it.
    pub socket: PathBuf,
}

impl MigrationRequest {
    /// Returns the request to hand the guest over to the process of this host at `to`.
    pub(crate) fn on_this_host(to: &str) -> Self {
        Self {
            to: to.to_owned(),
            downtime_ms: default_downtime_ms(),
            timeout_s: default_timeout_s(),
            timeout_strategy: TimeoutStrategy::default(),
            max_bandwidth_bytes_per_s: None,
            connections: one(),
            compression: Compression::default(),
            verify: false,
            copy_disks: CopyDrives::default(),
            tls: None,
            insecure: false,
            local: true,
            throttle: default_throttle(),
        }
    }

    /// Refuses values outside their limits.
    pub(crate) fn check(&self) -> Result<(), LimitError> {
        at_most("downtime_ms", self.downtime_ms, MAX_DOWNTIME_MS)?;
        at_most("timeout_s", self.timeout_s, MAX_TIMEOUT_S)?;
        one_to("connections", self.connections.into(), MAX_CONNECTIONS.into())?;
        self.max_bandwidth_bytes_per_s
            .map_or(Ok(()), |b| at_least("max_bandwidth_bytes_per_s", b, MIN_BANDWIDTH))
    }
}

fn one() -> u32 {
    1
}

fn default_downtime_ms() -> u64 {
    Goals::default().downtime.as_millis() as u64
}

fn default_throttle() -> bool {
    true
}

fn default_timeout_s() -> u64 {
    Goals::default().timeout.as_secs()
}

/// Answer to `GET /v1/migration?job=N&wait_ms=N`, by default for the latest migration. The answer
/// comes immediately if the migration is over. Otherwise it comes when the migration ends or
/// `wait_ms` have passed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MigrationPage {
    /// The migration's number.
    pub job: u64,
    /// The migration's state.
    pub state: MigrationState,
    /// Address of the destination.
    pub to: String,
    /// Progress so far.
    pub progress: Progress,
    /// The final report, once the migration is completed.
    pub report: Option<SendReport>,
    /// The failure, once the migration has failed.
    pub failure: Option<MigrationFailure>,
}

/// The state of a migration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationState {
    /// It is under way, and the guest is on this host.
    Sending,
    /// The guest has been handed over to a host that does not answer.
    InDoubt,
    /// The guest is on the destination, or the operator has resolved that it must not run here.
    Completed,
    /// The guest has remained on this host, or has ended here: see [`GuestLocation`].
    Failed,
}

/// The reason why a migration failed, and where the guest is now.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MigrationFailure {
    /// The reason as a sentence, with phase and place.
    pub message: String,
    /// Whether an operator cancelled the migration.
    pub cancelled: bool,
    /// The phase in which it failed.
    pub phase: Phase,
    /// Location of the guest.
    pub guest: GuestLocation,
}

/// Location of the guest after a failed migration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestLocation {
    /// On this host, as before.
    Here,
    /// On this host, paused because it could not be resumed.
    PausedHere,
    /// Nowhere: the guest has ended on this host.
    Ended,
}

/// Body of `POST /v1/migration/resolve`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolveRequest {
    /// Where the guest is to run.
    pub action: Resolution,
}
