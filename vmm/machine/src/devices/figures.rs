//! What devices have done for their guest since this process has it: each figure by itself, written
//! by the device's thread and read by anyone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

/// One figure.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A disk's.
#[derive(Debug, Default)]
pub(crate) struct DiskCounters {
    pub(super) reads: Counter,
    pub(super) read_bytes: Counter,
    pub(super) writes: Counter,
    pub(super) written_bytes: Counter,
    pub(super) flushes: Counter,
    pub(super) errors: Counter,
}

/// A network interface's.
#[derive(Debug, Default)]
pub(crate) struct NetCounters {
    pub(super) received_frames: Counter,
    pub(super) received_bytes: Counter,
    pub(super) sent_frames: Counter,
    pub(super) sent_bytes: Counter,
    pub(super) lost_frames: Counter,
}

/// Where a device's figures are read.
#[derive(Clone, Debug)]
pub(crate) enum Meter {
    Disk(String, Arc<DiskCounters>),
    Net(String, Arc<NetCounters>),
}

/// A device's figures, with its name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum DeviceFigures {
    /// A disk.
    Disk {
        /// Its name.
        id: String,
        /// Requests that read.
        reads: u64,
        /// Bytes that they asked for.
        read_bytes: u64,
        /// Requests that wrote.
        writes: u64,
        /// Bytes that they gave.
        written_bytes: u64,
        /// Requests that made writes durable.
        flushes: u64,
        /// Requests that failed for the file's sake.
        errors: u64,
    },
    /// A network interface.
    Net {
        /// Its name.
        id: String,
        /// Frames that the guest was given.
        received_frames: u64,
        /// Their bytes.
        received_bytes: u64,
        /// Frames that the tap took, announcements of a move among them.
        sent_frames: u64,
        /// Their bytes.
        sent_bytes: u64,
        /// Frames that neither took.
        lost_frames: u64,
    },
}

impl Meter {
    /// The figures now.
    pub(crate) fn read(&self) -> DeviceFigures {
        match self {
            Self::Disk(id, c) => DeviceFigures::Disk {
                id: id.clone(),
                reads: c.reads.get(),
                read_bytes: c.read_bytes.get(),
                writes: c.writes.get(),
                written_bytes: c.written_bytes.get(),
                flushes: c.flushes.get(),
                errors: c.errors.get(),
            },
            Self::Net(id, c) => DeviceFigures::Net {
                id: id.clone(),
                received_frames: c.received_frames.get(),
                received_bytes: c.received_bytes.get(),
                sent_frames: c.sent_frames.get(),
                sent_bytes: c.sent_bytes.get(),
                lost_frames: c.lost_frames.get(),
            },
        }
    }
}
