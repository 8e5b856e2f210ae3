//! The handle through which the collector stalls a vCPU.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Counters, Vcpu};
use crate::actor::Handle;
use crate::throttle::StallTarget;

/// Stalls one vCPU.
#[derive(Debug)]
pub(crate) struct ThrottleHandle {
    /// The handle that kicks.
    pub(crate) vcpu: Handle<Vcpu>,
    pub(crate) counters: Arc<Counters>,
}

impl StallTarget for ThrottleHandle {
    fn stall(&self, until: Instant, slice: Duration) {
        // A vCPU that has ended writes nothing.
        self.vcpu.tell(move |vcpu| vcpu.begin_stall(until, slice));
    }

    fn end_stall(&self) {
        self.vcpu.tell(Vcpu::end_stall);
    }

    fn stalls(&self) -> u64 {
        self.counters.throttled.stalls()
    }
}
