//! The machine's methods for measurements: see [`measure`](crate::measure).

use std::sync::Arc;
use std::time::Duration;

use driftline_dirty_tracker::FrameRun;
use driftline_guest::VmId;

use super::build::BuildInputs;
use super::{KvmMachine, MachineError};
use crate::config::{HostConfig, MachineConfig};
use crate::measure::MeasureOptions;

impl KvmMachine {
    /// Boots the guest that `config` describes, for a measurement.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch).
    pub fn launch_measured(
        config: MachineConfig,
        host: &HostConfig,
        measured: MeasureOptions,
    ) -> Result<Arc<Self>, MachineError> {
        let inputs = BuildInputs { load: true, measured, ..BuildInputs::default() };
        Self::build(VmId::random(), config, host, inputs)
    }

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
