//! virtio-rng: random numbers from the host's kernel.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use vmm_sys_util::epoll::EventSet;

use super::counts::RngCounters;
use super::error::{DeviceError, StateError};
use super::misfit::DeviceMisfit;
use super::virtio::{
    Device, DeviceIo, DeviceKind, HandOverNeeds, QuiesceError, RequestDefect, Violation, Watcher,
};
use crate::config::{RateLimits, RngConfig};

const QUEUE_SIZE: u16 = 64;
/// Most bytes given for one chain. A driver may ask for 4 GiB; it asks again for more.
const MAX_BYTES_PER_CHAIN: u32 = 4096;

/// The device. It has no state of its own to save: bytes that it gave belong to the guest, and
/// later bytes do not exist yet.
#[derive(Debug, Default)]
pub(super) struct Rng {
    limits: RateLimits,
    counters: Arc<RngCounters>,
}

impl Rng {
    pub(super) fn new(config: &RngConfig) -> Self {
        Self { limits: config.limits, counters: Arc::default() }
    }

    /// Returns the device's counters.
    pub(super) fn counters(&self) -> &Arc<RngCounters> {
        &self.counters
    }

    /// Counts a failure. Only the first one is logged as a warning, because the driver asks again.
    fn note_failure(&self, e: Errno) {
        self.counters.failures.add(1);
        match self.counters.failures.get() {
            1 => tracing::warn!(
                "the host has no randomness for the guest: {e}; later failures are only counted"
            ),
            n => tracing::debug!("failure {n} of the guest's source of randomness: {e}"),
        }
    }
}

impl Device for Rng {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Rng
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn limits(&self) -> Vec<RateLimits> {
        vec![self.limits]
    }

    fn config_space(&self) -> Vec<u8> {
        Vec::new()
    }

    fn write_config(&mut self, _: usize, _: &[u8], _: &mut DeviceIo<'_>) {}

    fn start(&mut self, _: &Watcher) -> io::Result<()> {
        Ok(())
    }

    fn activate(&mut self, _: u64) {}

    fn reset(&mut self, _: &mut DeviceIo<'_>) {}

    fn process(&mut self, queue: usize, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let Some(ring) = io.rings.get_mut(queue) else { return Ok(()) };
        let mut bytes = [0; MAX_BYTES_PER_CHAIN as usize];
        while let Some(chain) = ring.pop(io.ram)? {
            let wanted = chain.writable.len().min(MAX_BYTES_PER_CHAIN) as usize;
            if wanted == 0 {
                let cause = RequestDefect::NoRandomness { head: chain.head };
                return Err(Violation::Malformed { queue: 0, cause });
            }
            if !io.limiters.admit(0, queue, wanted as u64) {
                ring.unpop();
                return Ok(());
            }
            self.counters.requests.add(1);
            let given = match getrandom(&mut bytes[..wanted], GetRandomFlags::empty()) {
                Ok(given) => given,
                Err(e) => {
                    // The driver asks again. A kernel without randomness will soon have some.
                    self.note_failure(e);
                    0
                }
            };
            let written = chain.writable.write(io.ram, 0, &bytes[..given])?;
            self.counters.bytes.add(written as u64);
            ring.push(io.ram, chain.head, written as u32)?;
        }
        Ok(())
    }

    fn backend_ready(
        &mut self,
        _: u32,
        _: EventSet,
        _: &mut DeviceIo<'_>,
    ) -> Result<(), Violation> {
        Ok(())
    }

    fn quiesce(&mut self, _: Instant, _: &mut DeviceIo<'_>) -> Result<(), QuiesceError> {
        Ok(())
    }

    fn resume(&mut self, _: bool, _: &mut DeviceIo<'_>) -> Result<(), Violation> {
        Ok(())
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        Ok(Vec::new())
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        match state.len() {
            0 => Ok(()),
            bytes => Err(StateError::from(DeviceMisfit::NotEmpty { bytes }).into()),
        }
    }

    fn hand_over(&self) -> HandOverNeeds {
        HandOverNeeds::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RateLimit;
    use crate::devices::log_capture::warnings;
    use crate::devices::virtio::conformance::{self, TestedDevice};
    use crate::devices::virtio::driver::Driver;

    #[test]
    fn only_first_failure_is_a_warning() {
        let rng = Rng::default();
        let logged = warnings(|| (0..3).for_each(|_| rng.note_failure(Errno::AGAIN)));
        assert_eq!((logged.len(), rng.counters().failures.get()), (1, 3), "{logged:?}");
    }

    #[test]
    fn conforms_to_virtio() {
        conformance::check(&TestedDevice {
            make: &|| Box::new(Rng::default()),
            queue: 0,
            request: &|driver, n| vec![driver.writable(16 + n as u32)],
        });
    }

    #[test]
    fn limited_device_conforms_to_virtio() {
        let limit = |size| Some(RateLimit { size, refill_ms: 1, one_time_burst: 0 });
        let config =
            RngConfig { limits: RateLimits { bandwidth: limit(40), operations: limit(2) } };
        conformance::check(&TestedDevice {
            make: &|| Box::new(Rng::new(&config)),
            queue: 0,
            request: &|driver, n| vec![driver.writable(16 + n as u32)],
        });
    }

    #[test]
    fn random_bytes_do_not_repeat() {
        let rng = Rng::default();
        let counters = rng.counters().clone();
        let mut driver = Driver::started(Box::new(rng));
        let mut seen = std::collections::HashSet::new();
        for _ in 0..50 {
            let piece = driver.writable(32);
            assert_eq!(driver.request(0, &[piece]), 32);
            assert!(seen.insert(driver.bytes(piece)));
        }
        let large = driver.writable(1 << 20);
        assert_eq!(driver.request(0, &[large]), MAX_BYTES_PER_CHAIN, "bounded");
        let bytes = 50 * 32 + u64::from(MAX_BYTES_PER_CHAIN);
        let (requests, failures) = (counters.requests.get(), counters.failures.get());
        assert_eq!((requests, counters.bytes.get(), failures), (51, bytes, 0));
    }
}
