//! Sizes of a balloon, in frames, and a flag that its thread shares with others.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Values that are shared without jobs. Each is independent of the others.
#[derive(Debug, Default)]
pub(super) struct BalloonSizes {
    target: AtomicU32,
    actual: AtomicU32,
    hinting: AtomicBool,
    discarded: AtomicU64,
}

impl BalloonSizes {
    pub(super) fn target(&self) -> u32 {
        self.target.load(Relaxed)
    }

    pub(super) fn set_target(&self, frames: u32) {
        self.target.store(frames, Relaxed);
    }

    pub(super) fn actual(&self) -> u32 {
        self.actual.load(Relaxed)
    }

    pub(super) fn set_actual(&self, frames: u32) {
        self.actual.store(frames, Relaxed);
    }

    /// Returns whether the driver supports hints.
    pub(super) fn hinting(&self) -> bool {
        self.hinting.load(Relaxed)
    }

    /// Sets whether the driver supports hints.
    pub(super) fn set_hinting(&self, hinting: bool) {
        self.hinting.store(hinting, Relaxed);
    }

    pub(super) fn discarded(&self) -> u64 {
        self.discarded.load(Relaxed)
    }

    pub(super) fn count_discarded(&self, frames: u64) {
        self.discarded.fetch_add(frames, Relaxed);
    }
}
