//! The balloon and the requests about it.

use serde::{Deserialize, Serialize};

/// Body of `PUT /balloon`, and the answer to `GET /balloon`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonDeviceConfig {
    /// Target size, in MiB.
    pub amount_mib: u32,
    /// Whether the guest may take memory back from the balloon rather than kill a program.
    pub deflate_on_oom: bool,
    /// Interval of the statistics, in s; 0 switches them off.
    #[serde(default)]
    pub stats_polling_interval_s: u16,
    /// Whether the guest reports which pages are free when it is asked.
    #[serde(default)]
    pub free_page_hinting: bool,
    /// Whether the guest reports pages that it has freed.
    #[serde(default)]
    pub free_page_reporting: bool,
}

/// Body of `PATCH /balloon`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonUpdateConfig {
    /// New target size, in MiB.
    pub amount_mib: u32,
}

/// Body of `PATCH /balloon/statistics`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonUpdateStatsConfig {
    /// New interval of the statistics, in s.
    pub stats_polling_interval_s: u16,
}

/// Body of `PATCH /balloon/hinting/start`, which may be absent. Firecracker ignores unknown fields
/// here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub struct StartHintingCmd {
    /// Whether the device acknowledges the end of the run when the guest ends it.
    #[serde(default = "yes")]
    pub acknowledge_on_stop: bool,
}

impl Default for StartHintingCmd {
    fn default() -> Self {
        Self { acknowledge_on_stop: true }
    }
}

fn yes() -> bool {
    true
}
