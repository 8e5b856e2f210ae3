//! The writes of each vCPU, and a limit on them: the interface between the policy that decides to
//! throttle a guest and the machine that throttles it.

use std::time::Duration;

use crate::delegate::Delegate;

/// Counts what each vCPU writes, and slows down those that write the most.
pub trait WriteThrottle: Send + Sync {
    /// Returns what each vCPU has written, as of the last collection, in the order of vCPUs. Empty
    /// if writes are not counted per vCPU.
    fn vcpu_writes(&self) -> Vec<VcpuWrites>;

    /// Throttles each vCPU that dirties more than this many frames a second; `None` ends the
    /// throttle. The stalls are too short to be noticed as pauses and never take all of the time. A
    /// vCPU that dirties fewer frames is not affected. A pause does not wait for a throttled vCPU.
    /// The caller that throttles must also end the throttle, which is not part of the guest's
    /// state. Does nothing if writes are not [counted per vCPU](Self::vcpu_writes).
    fn throttle(&self, frames_per_s: Option<u64>);
}

impl<T: Delegate<dyn WriteThrottle>> WriteThrottle for T {
    fn vcpu_writes(&self) -> Vec<VcpuWrites> {
        self.delegate().vcpu_writes()
    }

    fn throttle(&self, frames_per_s: Option<u64>) {
        self.delegate().throttle(frames_per_s);
    }
}

/// Totals of one vCPU since the guest was built here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VcpuWrites {
    /// Frames that it has dirtied. A frame that is drained and written again counts again.
    pub dirtied_frames: u64,
    /// Time for which [`WriteThrottle::throttle`] slowed it down.
    pub throttled: Duration,
}
