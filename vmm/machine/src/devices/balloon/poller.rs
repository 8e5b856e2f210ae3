//! The queue by which a driver gives statistics, and the timer by which it is asked for them.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use driftline_guest::GuestRam;

use super::shared::SharedBalloonState;
use super::statistics::MAX_BYTES;
use crate::devices::timer::Timer;
use crate::devices::virtio::{Chain, DeviceRing, Violation};

/// Takes the driver's statistics, and asks for new ones.
pub(super) struct StatisticsPoller {
    shared: Arc<SharedBalloonState>,
    /// Readable when the driver is to give new statistics.
    timer: Timer,
    /// Whether the driver gives statistics.
    active: bool,
    /// Whether the first buffer in the queue has been read.
    is_read: bool,
}

impl StatisticsPoller {
    pub(super) fn new(shared: Arc<SharedBalloonState>) -> io::Result<Self> {
        Ok(Self { shared, timer: Timer::new()?, active: false, is_read: false })
    }

    /// Returns the timer to watch.
    pub(super) fn timer(&self) -> &Timer {
        &self.timer
    }

    /// Begins with another driver, which gives statistics if `active`.
    pub(super) fn begin(&mut self, active: bool) {
        (self.active, self.is_read) = (active, false);
        self.arm();
    }

    /// Arms the timer if the driver gives statistics.
    pub(super) fn arm(&self) {
        let interval_s = self.shared.statistics_interval_s();
        let armed = match self.active && interval_s > 0 {
            true => self.timer.set(Duration::from_secs(interval_s.into())),
            false => self.timer.clear(),
        };
        if let Err(e) = armed {
            tracing::error!("the guest is not asked for statistics of its memory: {e}");
        }
    }

    /// Handles a readiness event of the timer. Returns whether the interval is over.
    pub(super) fn is_due(&self) -> bool {
        // A timer that cannot be read is armed again.
        self.timer.take().unwrap_or(true)
    }

    /// Reads the driver's statistics. With `give_back`, the driver gets its buffer back and is to
    /// send new ones. Otherwise the buffer stays in the queue. A driver has one buffer. If there
    /// are more, all but the last are given back.
    pub(super) fn take(
        &mut self,
        ring: &mut DeviceRing,
        ram: &GuestRam,
        give_back: bool,
    ) -> Result<(), Violation> {
        let (mut held, mut is_read) = (None, std::mem::take(&mut self.is_read));
        // A round takes at most as many chains as the queue has entries. Another pop would exceed
        // that limit and request another round, for ever.
        for _ in 0..ring.size() {
            let Some(chain) = ring.pop(ram)? else { break };
            if let Some(earlier) = held.replace(chain.head) {
                ring.push(ram, earlier, 0)?;
            }
            if !std::mem::take(&mut is_read) {
                self.read(&chain, ram)?;
            }
        }
        match held {
            Some(head) if give_back => ring.push(ram, head, 0),
            Some(_) => {
                ring.unpop();
                self.is_read = true;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn read(&self, chain: &Chain, ram: &GuestRam) -> Result<(), Violation> {
        let len = chain.readable.len();
        let counters = &self.shared.counters;
        counters.statistics.add(1);
        if len > MAX_BYTES {
            counters.statistics_failures.add(1);
            return Ok(());
        }
        let mut bytes = vec![0; len as usize];
        chain.readable.read(ram, 0, &mut bytes)?;
        counters.statistics_failures.add(self.shared.add_statistics(&bytes));
        Ok(())
    }
}
