//! Reports of finished migrations. The name of every figure has its unit.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use driftline_guest::VmId;
use serde::{Deserialize, Serialize};

/// How a migration ended at its source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SendStatus {
    /// The destination confirmed that it has the guest.
    Completed,
    /// The operator resolved that the guest here ends.
    ResolvedDiscarded,
}

/// One pass over memory.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct PassReport {
    /// Frames sent, with and without content.
    pub frames: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// Bytes of blocks of copied disks, with and without content.
    pub disk_bytes: u64,
    /// Time from its start to its acknowledgement, ms. In the last pass this includes sending the
    /// state and releasing the disks.
    pub time_ms: f64,
    /// The guest's dirty rate during the pass, bytes/s of whole frames and of blocks of copied
    /// disks; 0 in the last pass, during which the guest is paused.
    pub dirty_rate_bytes_per_s: u64,
}

/// A vCPU's writes, and how far it was throttled.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct VcpuThrottle {
    /// Number of the vCPU.
    pub vcpu: u32,
    /// Its dirty rate during the last complete pass, bytes/s of whole frames.
    pub dirty_rate_bytes_per_s: u64,
    /// Upper bound on its dirty rate, bytes/s of whole frames; `None` without a throttle.
    pub most_bytes_per_s: Option<u64>,
    /// Time for which it was throttled up to the end of the last complete pass, ms.
    pub throttled_ms: f64,
    /// That time as a percentage of the time since the throttle began.
    pub throttled_percent: f64,
}

/// Report of `send`. The names are those of `send-migration --json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SendReport {
    /// How the migration ended.
    pub status: SendStatus,
    /// The guest that moved.
    pub vm_id: VmId,
    /// Time from the call of `send` to RUNNING, ms. The guest's resources here are freed after
    /// that.
    pub total_time_ms: f64,
    /// Downtime, from the pause here until the destination runs the guest, ms. It is the time to
    /// COMMIT by this host's clock, plus the time in RUNNING, plus half of the rest of the round
    /// trip. After a doubt it is the time until the answer that resolved it.
    pub downtime_ms: f64,
    /// When the pause was requested, by this host's clock, microseconds since 1970.
    pub paused_at_unix_us: u64,
    /// Time from the call of `send` to the first pass, ms.
    pub setup_time_ms: f64,
    /// Bytes sent over all connections, including headers.
    pub transferred_bytes: u64,
    /// Frames sent as zeros, including repetitions.
    pub zero_frames: u64,
    /// Frames sent with content, including repetitions.
    pub normal_frames: u64,
    /// Bytes of guest memory that were handed over as they are, by descriptor; 0 unless that was
    /// asked for (`--local`).
    pub shared_memory_bytes: u64,
    /// Bytes of blocks of copied disks sent with content, including repetitions.
    pub disk_bytes: u64,
    /// Bytes of blocks of copied disks sent as zeros, including repetitions; holes are not sent.
    pub disk_zero_bytes: u64,
    /// `transferred_bytes` over the time without setup.
    pub throughput_bytes_per_s: u64,
    /// Why pre-copy ended, in words.
    pub converged: String,
    /// All passes; during the last one the guest is paused.
    pub passes: Vec<PassReport>,
    /// All vCPUs, up to the last pass; empty if the tracking mode does not tell vCPUs apart (modes
    /// other than `dirty-ring`, the threads backend).
    pub throttle: Vec<VcpuThrottle>,
}

/// Report of `receive`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ReceiveReport {
    /// The guest that arrived.
    pub vm_id: VmId,
    /// Whether the guest runs; a guest that was paused at its source stays paused.
    pub running: bool,
    /// Time from the source's connection to the take-over, ms.
    pub total_time_ms: f64,
    /// Time from COMMIT to the take-over, ms.
    pub take_over_ms: f64,
    /// When the guest was taken over, by this host's clock, microseconds since 1970.
    pub taken_over_at_unix_us: u64,
    /// Bytes received over all connections, including headers.
    pub received_bytes: u64,
    /// Frames received as zeros, including repetitions.
    pub zero_frames: u64,
    /// Frames received with content, including repetitions.
    pub normal_frames: u64,
    /// Bytes of blocks of copied disks received with content, including repetitions.
    pub disk_bytes: u64,
    /// Passes, including the last one.
    pub passes: u32,
}

/// Returns a duration in ms with its fraction.
pub(crate) fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// Returns a time in microseconds since 1970; 0 if it is earlier.
pub(crate) fn unix_us(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}

/// Returns a rate in bytes/s; 0 if `time` is zero.
pub(crate) fn per_second(bytes: u64, time: Duration) -> u64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { (bytes as f64 / seconds) as u64 } else { 0 }
}
