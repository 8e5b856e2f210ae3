//! Counters of the parts of a machine that [`DeviceStats`](super::DeviceStats) does not cover. Each
//! counter is independent: the threads that serve the part write it, and any thread may read it.

use std::sync::Arc;

use super::stats::Counter;

/// Counters of COM1.
#[derive(Debug, Default)]
pub(crate) struct SerialCounters {
    pub(super) read_bytes: Counter,
    pub(super) written_bytes: Counter,
    pub(super) limited_bytes: Counter,
    pub(super) lost_bytes: Counter,
    pub(super) errors: Counter,
}

/// Counters of the source of randomness.
#[derive(Debug, Default)]
pub(crate) struct RngCounters {
    pub(super) requests: Counter,
    pub(super) bytes: Counter,
    pub(super) failures: Counter,
}

/// Counters of the vsock.
#[derive(Debug, Default)]
pub(crate) struct VsockCounters {
    pub(super) given_packets: Counter,
    pub(super) given_bytes: Counter,
    pub(super) taken_packets: Counter,
    pub(super) taken_bytes: Counter,
    pub(super) connections_begun: Counter,
    pub(super) connections_ended: Counter,
}

/// Handles for reading these counters. A machine without the device has its counters, too.
#[derive(Clone, Debug, Default)]
pub(crate) struct MachineCounters {
    serial: Arc<SerialCounters>,
    pub(super) rng: Arc<RngCounters>,
    pub(super) vsock: Arc<VsockCounters>,
}

/// What COM1 has done in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SerialCounts {
    /// Bytes of input that the guest has read.
    pub read_bytes: u64,
    /// Bytes that the guest has written, including the limited and the lost ones.
    pub written_bytes: u64,
    /// Bytes of these that exceeded the rate limit.
    pub limited_bytes: u64,
    /// Bytes of these that their destination did not take.
    pub lost_bytes: u64,
    /// Accesses of the guest that failed.
    pub errors: u64,
}

/// What the source of randomness has done in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RngCounts {
    /// Requests.
    pub requests: u64,
    /// Random bytes given to the guest.
    pub bytes: u64,
    /// Requests for which the host had no randomness.
    pub failures: u64,
}

/// What the vsock has done in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VsockCounts {
    /// Packets given to the guest.
    pub given_packets: u64,
    /// Bytes of data in them.
    pub given_bytes: u64,
    /// Packets taken from the guest.
    pub taken_packets: u64,
    /// Bytes of data in those of them that belong to a connection.
    pub taken_bytes: u64,
    /// Connections that have begun.
    pub connections_begun: u64,
    /// Connections that have ended.
    pub connections_ended: u64,
}

/// Counts, in this process, of the parts of a machine that [`DeviceStats`](super::DeviceStats) does
/// not cover.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MachineCounts {
    /// COM1.
    pub serial: SerialCounts,
    /// The source of randomness.
    pub rng: RngCounts,
    /// The vsock.
    pub vsock: VsockCounts,
    /// By name of the device: the number of times that each of its rate limits made a queue wait.
    pub throttles: Vec<(String, Vec<u64>)>,
}

impl MachineCounters {
    /// Returns these handles with those of COM1.
    pub(crate) fn with_serial(&self, serial: &Arc<SerialCounters>) -> Self {
        Self { serial: serial.clone(), ..self.clone() }
    }

    /// Returns the current counters, without throttles.
    pub(crate) fn read(&self) -> MachineCounts {
        let Self { serial, rng, vsock } = self;
        MachineCounts {
            serial: SerialCounts {
                read_bytes: serial.read_bytes.get(),
                written_bytes: serial.written_bytes.get(),
                limited_bytes: serial.limited_bytes.get(),
                lost_bytes: serial.lost_bytes.get(),
                errors: serial.errors.get(),
            },
            rng: RngCounts {
                requests: rng.requests.get(),
                bytes: rng.bytes.get(),
                failures: rng.failures.get(),
            },
            vsock: VsockCounts {
                given_packets: vsock.given_packets.get(),
                given_bytes: vsock.given_bytes.get(),
                taken_packets: vsock.taken_packets.get(),
                taken_bytes: vsock.taken_bytes.get(),
                connections_begun: vsock.connections_begun.get(),
                connections_ended: vsock.connections_ended.get(),
            },
            throttles: Vec::new(),
        }
    }
}
