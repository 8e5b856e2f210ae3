//! The JSON of `/migration`.

use driftline_migrate::{
    Compression, CopyDrives, MAX_CONNECTIONS, MIN_BANDWIDTH, Phase, Progress, Resolution,
    SendReport, TimeoutStrategy,
};
use serde::{Deserialize, Serialize};

/// `POST /migration`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationRequest {
    /// Where a driftline waits: `tcp:HOST:PORT`.
    pub to: String,
    /// The pause that the guest may notice.
    #[serde(default = "default_downtime_ms")]
    pub downtime_ms: u64,
    /// Time for copying while the guest runs.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: u64,
    /// What to do when that has passed.
    #[serde(default)]
    pub timeout_strategy: TimeoutStrategy,
    /// Bytes/s at most for copying while the guest runs; without it, as fast as it goes.
    #[serde(default)]
    pub max_bandwidth_bytes_per_s: Option<u64>,
    /// Connections that share in the sending of memory.
    #[serde(default = "one")]
    pub connections: u32,
    /// How contents are made smaller where that wins.
    #[serde(default)]
    pub compression: Compression,
    /// Whether both sides compare a digest of all memory in the pause.
    #[serde(default)]
    pub verify: bool,
    /// Disks that go along: "none", "all" or {"named": [..]}.
    #[serde(default)]
    pub copy_disks: CopyDrives,
    /// Whether vCPUs that outrun the link are held back; they are where nothing is said.
    #[serde(default = "default_throttle")]
    pub throttle: bool,
}

/// The longest downtime target that makes sense: an hour.
pub const MAX_DOWNTIME_MS: u64 = 3_600_000;
/// The longest time for copying: thirty days.
pub const MAX_TIMEOUT_S: u64 = 30 * 24 * 3600;

impl MigrationRequest {
    /// Refuses times that nobody means.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Self { downtime_ms, timeout_s, max_bandwidth_bytes_per_s: bandwidth, .. } = self;
        if *downtime_ms > MAX_DOWNTIME_MS {
            return Err(format!("downtime_ms is {downtime_ms}; it is at most {MAX_DOWNTIME_MS}"));
        }
        if *timeout_s > MAX_TIMEOUT_S {
            return Err(format!("timeout_s is {timeout_s}; it is at most {MAX_TIMEOUT_S}"));
        }
        if !(1..=MAX_CONNECTIONS).contains(&self.connections) {
            return Err(format!(
                "connections is {}; it is 1 to {MAX_CONNECTIONS}",
                self.connections
            ));
        }
        if let Some(bandwidth) = bandwidth.filter(|b| *b < MIN_BANDWIDTH) {
            return Err(format!(
                "max_bandwidth_bytes_per_s is {bandwidth}; it is at least {MIN_BANDWIDTH}"
            ));
        }
        Ok(())
    }
}

fn one() -> u32 {
    1
}

fn default_downtime_ms() -> u64 {
    300
}

fn default_throttle() -> bool {
    true
}

fn default_timeout_s() -> u64 {
    3600
}

/// `GET /migration?job=N&wait_ms=N`: at once if it is over, else then, or when the wait is; without
/// `job`, the latest.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MigrationPage {
    /// The migration's number.
    pub job: u64,
    /// How it stands.
    pub state: MigrationState,
    /// Where to.
    pub to: String,
    /// What has been done so far.
    pub progress: Progress,
    /// What was done, once it is completed.
    pub report: Option<SendReport>,
    /// Why it has failed, once it has.
    pub failure: Option<MigrationFailure>,
}

/// How a migration stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationState {
    /// Under way; the guest is here.
    Sending,
    /// Handed over to a host that does not answer.
    InDoubt,
    /// The guest is there, or the operator has resolved that it shall not run here.
    Completed,
    /// The guest is here.
    Failed,
}

/// Why a migration has failed, and where that leaves the guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MigrationFailure {
    /// As a sentence, with phase and place.
    pub message: String,
    /// Because someone cancelled it.
    pub cancelled: bool,
    /// In which phase.
    pub phase: Phase,
    /// Where the guest is.
    pub guest: GuestWhere,
}

/// Where the guest of a failed migration is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestWhere {
    /// Here, as before.
    Here,
    /// Here, but it could not be resumed.
    PausedHere,
    /// Nowhere: it has ended here.
    Ended,
}

/// `POST /migration/resolve`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolveRequest {
    /// Where the guest shall be.
    pub action: Resolution,
}
