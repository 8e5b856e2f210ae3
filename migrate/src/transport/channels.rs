//! The channels of one migration: connections that stop together and wait together.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// State that several channels of one migration share.
#[derive(Debug, Default)]
pub(crate) struct ChannelGroup {
    halted: AtomicBool,
    /// Number of reads and writes on all channels.
    progress: AtomicU64,
}

impl ChannelGroup {
    /// Ends every wait on any channel within [`SLICE`](super::wait::SLICE).
    pub(crate) fn halt(&self) {
        self.halted.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_halted(&self) -> bool {
        self.halted.load(Ordering::Relaxed)
    }

    pub(super) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Counts a read or write that has ended.
    pub(super) fn note_progress(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }
}
