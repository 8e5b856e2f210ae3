//! Counters of what devices have done for their guest in this process. Each counter is independent:
//! the device's thread writes it, and any thread may read it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

/// One counter.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Counters of a disk.
#[derive(Debug, Default)]
pub(crate) struct DiskCounters {
    pub(super) reads: Counter,
    pub(super) read_bytes: Counter,
    pub(super) writes: Counter,
    pub(super) written_bytes: Counter,
    pub(super) flushes: Counter,
    pub(super) errors: Counter,
    pub(super) stalls: Counter,
}

/// Counters of a network interface.
#[derive(Debug, Default)]
pub(crate) struct NetCounters {
    pub(super) received_frames: Counter,
    pub(super) received_bytes: Counter,
    pub(super) sent_frames: Counter,
    pub(super) sent_bytes: Counter,
    pub(super) lost_frames: Counter,
    pub(super) stalls: Counter,
}

/// Handle for reading a device's counters.
#[derive(Clone, Debug)]
pub(crate) enum StatsHandle {
    Disk(String, Arc<DiskCounters>),
    Net(String, Arc<NetCounters>),
}

/// Counters of one device, with its name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum DeviceStats {
    /// A disk.
    Disk {
        /// Name of the disk.
        id: String,
        /// Number of read requests.
        reads: u64,
        /// Bytes requested by reads.
        read_bytes: u64,
        /// Number of write requests.
        writes: u64,
        /// Bytes written by them.
        written_bytes: u64,
        /// Number of flush requests.
        flushes: u64,
        /// Number of requests that failed because of the file.
        errors: u64,
        /// Number of times that a queue waited because too many bytes were in flight.
        #[serde(default)]
        stalls: u64,
    },
    /// A network interface.
    Net {
        /// Name of the interface.
        id: String,
        /// Frames given to the guest.
        received_frames: u64,
        /// Bytes of those frames.
        received_bytes: u64,
        /// Frames given to the tap, including announcements after a move.
        sent_frames: u64,
        /// Bytes of those frames.
        sent_bytes: u64,
        /// Frames that neither the guest nor the tap took.
        lost_frames: u64,
        /// Number of times that a frame waited because the driver had too few buffers.
        #[serde(default)]
        stalls: u64,
    },
}

impl StatsHandle {
    /// Returns the current counters.
    pub(crate) fn read(&self) -> DeviceStats {
        match self {
            Self::Disk(id, c) => DeviceStats::Disk {
                id: id.clone(),
                reads: c.reads.get(),
                read_bytes: c.read_bytes.get(),
                writes: c.writes.get(),
                written_bytes: c.written_bytes.get(),
                flushes: c.flushes.get(),
                errors: c.errors.get(),
                stalls: c.stalls.get(),
            },
            Self::Net(id, c) => DeviceStats::Net {
                id: id.clone(),
                received_frames: c.received_frames.get(),
                received_bytes: c.received_bytes.get(),
                sent_frames: c.sent_frames.get(),
                sent_bytes: c.sent_bytes.get(),
                lost_frames: c.lost_frames.get(),
                stalls: c.stalls.get(),
            },
        }
    }
}
