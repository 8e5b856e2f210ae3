//! How long the process took to start, for a starter that has measured when it began.

use driftline_control::firecracker::ApiCounts;
use rustix::time::{ClockId, clock_gettime};

/// Times of the process's start as its starter measured them, in microseconds.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct StartTimes {
    /// The monotonic clock.
    pub(crate) wall_us: Option<u64>,
    /// The processor time of this process.
    pub(crate) cpu_us: Option<u64>,
    /// Processor time of the starter, which counts as well.
    pub(crate) parent_cpu_us: Option<u64>,
}

impl StartTimes {
    /// Prepares for [`record`](Self::record). Call it before the process is restricted: the first
    /// use of a clock makes a system call that is forbidden later.
    pub(crate) fn prepare(self) -> Self {
        now_us(ClockId::ProcessCPUTime);
        self
    }

    /// Records how long the start has taken until now, and logs it.
    pub(super) fn record(&self, counts: &ApiCounts) {
        let wall_us = self.wall_us.map(|start| {
            let us = now_us(ClockId::Monotonic).saturating_sub(start);
            tracing::info!("start-up took {us} us");
            us
        });
        let cpu_us = self.cpu_us.map(|start| {
            let own_us = now_us(ClockId::ProcessCPUTime).saturating_sub(start);
            let us = own_us.saturating_add(self.parent_cpu_us.unwrap_or(0));
            tracing::info!("start-up took {us} us of processor time");
            us
        });
        counts.set_start_up(wall_us, cpu_us);
    }
}

fn now_us(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000
        + u64::try_from(now.tv_nsec).unwrap_or(0) / 1000
}
