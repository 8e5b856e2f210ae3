//! What a finished migration reports, with the unit of every figure in its name.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use driftline_guest::VmId;
use serde::{Deserialize, Serialize};

/// How a migration ended for its source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SendStatus {
    /// The destination has the guest and said so.
    Completed,
    /// Nobody could say so; the operator resolved that the guest here ends.
    ResolvedDiscarded,
}

/// One pass over memory.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct PassReport {
    /// Frames sent, with and without content.
    pub frames: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// Of drives that go along: bytes of blocks sent, with and without content.
    #[serde(default)]
    pub disk_bytes: u64,
    /// From its begin to its acknowledgement, ms; that of the last pass is heard after the guest's
    /// state was sent and its drives were let go of.
    pub time_ms: f64,
    /// Whole frames, and blocks of drives that go along, that the guest wrote meanwhile, bytes/s;
    /// 0 in the last pass, when it was paused.
    pub dirty_rate_bytes_per_s: u64,
}

/// One vCPU, and how it was held back so that precopy could get ahead of the guest.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct VcpuThrottle {
    /// Its number.
    pub vcpu: u32,
    /// Whole frames that it made dirty during the last complete pass, bytes/s.
    pub dirty_rate_bytes_per_s: u64,
    /// What it may make dirty, bytes/s of whole frames; `None` as long as no vCPU is held.
    pub most_bytes_per_s: Option<u64>,
    /// How long it was held in this migration, until the end of the last complete pass, ms.
    pub held_ms: f64,
    /// The part that this is of the time since the first vCPU was held, percent.
    pub held_percent: f64,
}

/// What `send` did. The names are those of `send-migration --json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SendReport {
    /// How it ended.
    pub status: SendStatus,
    /// The guest that moved.
    pub vm_id: VmId,
    /// From the call of `send` to RUNNING heard here, ms; what was the guest's here ends after
    /// that.
    pub total_time_ms: f64,
    /// From the pause here to the guest's first instruction there, ms: to COMMIT by this host's
    /// clock, then what RUNNING says, and half of what the way there and back took besides. In
    /// doubt, to the answer that settled it.
    pub downtime_ms: f64,
    /// When the pause was asked for, by this host's clock, microseconds since 1970.
    #[serde(default)]
    pub paused_at_unix_us: u64,
    /// From the call of `send` to the first pass, ms.
    pub setup_time_ms: f64,
    /// Bytes sent, everything included.
    pub transferred_bytes: u64,
    /// Frames sent as zeros, repetitions included.
    pub zero_frames: u64,
    /// Frames sent with content, repetitions included.
    pub normal_frames: u64,
    /// Of drives that went along: bytes of blocks sent with content, repetitions included.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Of drives that went along: bytes of blocks sent as zeros, repetitions included; their holes
    /// are not sent.
    #[serde(default)]
    pub disk_zero_bytes: u64,
    /// `transferred_bytes` over the time without setup.
    pub throughput_bytes_per_s: u64,
    /// Why precopy ended, in words.
    pub converged: String,
    /// Every pass, the last one with the guest paused.
    pub passes: Vec<PassReport>,
    /// Every vCPU, until the last pass; empty where it is not known which of them write (tracking
    /// modes other than `dirty-ring`, the threads backend).
    #[serde(default)]
    pub throttle: Vec<VcpuThrottle>,
}

/// What `receive` did.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ReceiveReport {
    /// The guest that arrived.
    pub vm_id: VmId,
    /// Whether it runs; a guest that was paused on its source stays so.
    pub running: bool,
    /// From the source's connection to the guest taken over, ms.
    pub total_time_ms: f64,
    /// From COMMIT heard to the guest taken over, ms.
    pub take_over_ms: f64,
    /// When that was, by this host's clock, microseconds since 1970.
    #[serde(default)]
    pub taken_over_at_unix_us: u64,
    /// Bytes received, everything included.
    pub received_bytes: u64,
    /// Frames received as zeros, repetitions included.
    pub zero_frames: u64,
    /// Frames received with content, repetitions included.
    pub normal_frames: u64,
    /// Of drives that came along: bytes of blocks received with content, repetitions included.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Passes, the last one included.
    pub passes: u32,
}

/// A duration in ms with its fraction.
pub(crate) fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// The clock's time, microseconds since 1970.
pub(crate) fn unix_us(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}

/// A rate in bytes/s; 0 for no time at all.
pub(crate) fn per_second(bytes: u64, time: Duration) -> u64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { (bytes as f64 / seconds) as u64 } else { 0 }
}
