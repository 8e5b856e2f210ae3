//! The machine's methods for measurements: see [`measure`](crate::measure).

use std::time::Duration;

use driftline_dirty_tracker::FrameRun;

use super::KvmMachine;

impl KvmMachine {
    /// Returns the total time for which the vCPUs waited for room in their dirty rings.
    pub fn ring_full_time(&self) -> Duration {
        self.counters.iter().map(|c| c.ring_full_time()).sum()
    }

    /// Populates these frames with host memory, in pages of the size that the guest's own first
    /// writes would get.
    pub fn fault_in(&self, frames: FrameRun) {
        self.memory.fault_in(frames);
    }
}
