//! The channels of one migration: connections that stop together and wait together.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What the connections of one migration share, while there are several.
#[derive(Debug, Default)]
pub(crate) struct ChannelGroup {
    halted: AtomicBool,
    /// Grows with every read and write of any of them.
    progress: AtomicU64,
}

impl ChannelGroup {
    /// Ends any wait of any of them, within [`SLICE`](super::link::SLICE).
    pub(crate) fn halt(&self) {
        self.halted.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_halted(&self) -> bool {
        self.halted.load(Ordering::Relaxed)
    }

    pub(super) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// A read or write of one of them has ended.
    pub(super) fn note_progress(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }
}
