//! Counters of what the interfaces have done for the guest's metadata.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of all interfaces together.
#[derive(Debug, Default)]
pub(crate) struct MetadataCounters {
    /// Frames that did not go to the tap.
    pub(crate) taken_frames: AtomicU64,
    /// Of those: packets that are not TCP.
    pub(crate) other_packets: AtomicU64,
    /// Of those: packets that are malformed, or for another port.
    pub(crate) bad_packets: AtomicU64,
    /// Of those: TCP segments for the service's port.
    pub(crate) segments: AtomicU64,
    /// Requests without a token.
    pub(crate) without_token: AtomicU64,
    /// Requests with a token that is not valid.
    pub(crate) invalid_tokens: AtomicU64,
    /// Frames that were made for the guest.
    pub(crate) made_frames: AtomicU64,
    /// Frames that were given to the guest.
    pub(crate) given_frames: AtomicU64,
    /// Bytes of those frames.
    pub(crate) given_bytes: AtomicU64,
    /// Connections that the guest began.
    pub(crate) connections_begun: AtomicU64,
    /// Connections that have ended.
    pub(crate) connections_ended: AtomicU64,
}

/// What has been counted since the process began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MetadataCounts {
    /// Frames of the guest that did not go to the tap.
    pub taken_frames: u64,
    /// Of those: packets that are not TCP.
    pub other_packets: u64,
    /// Of those: packets that are malformed, or for another port.
    pub bad_packets: u64,
    /// Of those: TCP segments for the service's port.
    pub segments: u64,
    /// Requests without a token.
    pub without_token: u64,
    /// Requests with a token that is not valid.
    pub invalid_tokens: u64,
    /// Frames that were made for the guest.
    pub made_frames: u64,
    /// Frames that were given to the guest.
    pub given_frames: u64,
    /// Bytes of those frames.
    pub given_bytes: u64,
    /// Connections that the guest began.
    pub connections_begun: u64,
    /// Connections that have ended.
    pub connections_ended: u64,
}

impl MetadataCounters {
    pub(super) fn read(&self) -> MetadataCounts {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        MetadataCounts {
            taken_frames: get(&self.taken_frames),
            other_packets: get(&self.other_packets),
            bad_packets: get(&self.bad_packets),
            segments: get(&self.segments),
            without_token: get(&self.without_token),
            invalid_tokens: get(&self.invalid_tokens),
            made_frames: get(&self.made_frames),
            given_frames: get(&self.given_frames),
            given_bytes: get(&self.given_bytes),
            connections_begun: get(&self.connections_begun),
            connections_ended: get(&self.connections_ended),
        }
    }
}

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Relaxed);
}
