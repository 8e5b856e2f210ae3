//! Tests of rate limits, on a clock that the test sets.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::config::{LimitChange, LimitsChange, RateLimit, RateLimits};
use crate::devices::virtio::Transport;

const SECOND: u64 = 1_000_000_000;

fn limit(size: u64, one_time_burst: u64) -> Option<RateLimit> {
    Some(RateLimit { size, refill_ms: 1000, one_time_burst })
}

/// A limited disk, its driver, and the time in nanoseconds.
struct LimitedDisk {
    disk: Disk,
    driver: Driver,
    clock: Arc<AtomicU64>,
}

impl LimitedDisk {
    fn new(limits: RateLimits, with: EngineKind) -> Self {
        let mut disk = Disk::new();
        disk.config.limits = limits;
        let (driver, _) = disk.driver(with);
        let clock = Arc::<AtomicU64>::default();
        driver.transport.use_limiter_clock(clock.clone());
        Self { disk, driver, clock }
    }

    fn post(&mut self, queue: usize, kind: u32, len: u32) {
        let status = self.driver.writable(1);
        let data = match kind {
            VIRTIO_BLK_T_IN => vec![self.driver.writable(len)],
            VIRTIO_BLK_T_OUT => vec![self.driver.readable(&vec![1; len as usize])],
            _ => Vec::new(),
        };
        let header = header(&mut self.driver, kind, 0);
        self.driver.post(queue, &[&[header], &data[..], &[status]].concat());
    }

    /// Sets the time, and has the device process its queues. Returns the number of requests that
    /// have ended since the last call.
    fn ended_at<const N: usize>(&mut self, ns: u64, queues: [usize; N]) -> [usize; N] {
        self.clock.store(ns, Ordering::SeqCst);
        // Each resume processes all queues, and starts at least one request of a queue before the
        // device looks at others.
        for _ in 0..8 {
            self.driver.quiesce();
            self.driver.transport.resume();
        }
        self.driver.quiesce();
        let ended = queues
            .map(|queue| std::iter::from_fn(|| self.driver.has_used(queue).then_some(())).count());
        self.driver.transport.resume();
        ended
    }
}

#[test]
fn bytes_are_admitted_at_the_rate() {
    for with in engines() {
        let limits = RateLimits { bandwidth: limit(4096, 1024), operations: None };
        let mut disk = LimitedDisk::new(limits, with);
        for n in 0..10 {
            disk.post(0, n % 2, 1024);
        }
        for (ns, ended) in [
            (0, 5),
            (SECOND / 4 - 1, 0),
            (SECOND / 4, 1),
            (SECOND / 2, 1),
            (SECOND * 5 / 4, 3),
            (SECOND * 60, 0),
        ] {
            assert_eq!(disk.ended_at(ns, [0]), [ended], "at {ns} ns");
        }
    }
}

#[test]
fn requests_without_data_count_as_operations() {
    let limits = RateLimits { bandwidth: limit(512, 0), operations: limit(2, 0) };
    let mut disk = LimitedDisk::new(limits, EngineKind::Sync);
    for _ in 0..4 {
        disk.post(0, VIRTIO_BLK_T_FLUSH, 0);
    }
    // A request that the device refuses.
    disk.post(0, 99, 0);
    assert_eq!(disk.ended_at(0, [0]), [2]);
    assert_eq!(disk.ended_at(SECOND / 2, [0]), [1]);
    assert_eq!(disk.ended_at(10 * SECOND, [0]), [2]);
}

#[test]
fn zeros_count_as_bytes() {
    let limits = RateLimits { bandwidth: limit(4096, 0), operations: None };
    let mut disk = LimitedDisk::new(limits, EngineKind::Sync);
    for _ in 0..2 {
        let status = disk.driver.writable(1);
        let zeros = disk.driver.readable(&range(0, 8, 0));
        let header = header(&mut disk.driver, VIRTIO_BLK_T_WRITE_ZEROES, 0);
        disk.driver.post(0, &[header, zeros, status]);
    }
    assert_eq!(disk.ended_at(0, [0]), [1]);
    assert_eq!(disk.ended_at(SECOND - 1, [0]), [0]);
    assert_eq!(disk.ended_at(SECOND, [0]), [1]);
}

/// Eight times the size takes as long as eight requests of the size.
#[test]
fn large_request_delays_the_next_in_proportion() {
    let limits = RateLimits { bandwidth: limit(512, 0), operations: None };
    let mut disk = LimitedDisk::new(limits, EngineKind::Sync);
    disk.post(0, VIRTIO_BLK_T_IN, 4096);
    disk.post(0, VIRTIO_BLK_T_IN, 512);
    assert_eq!(disk.ended_at(0, [0]), [1]);
    assert_eq!(disk.ended_at(8 * SECOND - 1, [0]), [0]);
    assert_eq!(disk.ended_at(8 * SECOND, [0]), [1]);
}

#[test]
fn queues_take_turns() {
    let limits = RateLimits { bandwidth: None, operations: limit(1, 0) };
    let mut disk = LimitedDisk::new(limits, EngineKind::Sync);
    for n in 0..6 {
        disk.post(n % 2, VIRTIO_BLK_T_IN, 512);
    }
    // The first queue has no rival at first.
    for (n, ended) in (0..).zip([[1, 0], [1, 0], [0, 1], [1, 0], [0, 1], [0, 1]]) {
        assert_eq!(disk.ended_at(n * SECOND, [0, 1]), ended, "after {n} s");
    }
}

/// A large request in one queue is not overtaken for ever by small ones in another.
#[test]
fn large_request_is_not_overtaken() {
    let limits = RateLimits { bandwidth: limit(8192, 0), operations: None };
    let mut disk = LimitedDisk::new(limits, EngineKind::Sync);
    disk.post(0, VIRTIO_BLK_T_IN, 512);
    disk.post(0, VIRTIO_BLK_T_IN, 8192);
    for _ in 0..20 {
        disk.post(1, VIRTIO_BLK_T_IN, 512);
    }
    assert_eq!(disk.ended_at(0, [0, 1]), [1, 0]);
    assert_eq!(disk.ended_at(SECOND / 32, [0, 1]), [0, 0]);
    assert_eq!(disk.ended_at(SECOND / 16, [0, 1]), [1, 0]);
    assert_eq!(disk.ended_at(SECOND / 8, [0, 1]), [0, 1]);
}

#[test]
fn reset_does_not_refill() {
    let limits = RateLimits { bandwidth: limit(512, 512), operations: None };
    let mut disk = LimitedDisk::new(limits, EngineKind::Sync);
    for ended in [2, 0, 0] {
        for _ in 0..3 {
            disk.post(0, VIRTIO_BLK_T_IN, 512);
        }
        assert_eq!(disk.ended_at(0, [0]), [ended]);
        disk.driver.start(!0);
    }
}

/// The tokens move with the guest: neither the next host's clock nor the time on the way adds any.
#[test]
fn tokens_move_with_the_guest() {
    let limits = RateLimits { bandwidth: limit(1024, 512), operations: None };
    let mut disk = LimitedDisk::new(limits, EngineKind::Sync);
    for _ in 0..6 {
        disk.post(0, VIRTIO_BLK_T_IN, 512);
    }
    assert_eq!(disk.ended_at(0, [0]), [3]);
    assert_eq!(disk.ended_at(SECOND / 4, [0]), [0]);
    disk.driver.quiesce();
    let state = disk.driver.transport.save().unwrap();
    // The limits of the state hold, and not those of the configuration.
    disk.disk.config.limits = RateLimits { bandwidth: limit(1 << 20, 0), operations: None };
    let ram = disk.driver.memory.ram().clone();
    let block = Box::new(disk.disk.block(EngineKind::Sync));
    let moved = Transport::spawn("moved", block, ram).unwrap();
    disk.clock = Arc::new(AtomicU64::new(7 * SECOND));
    moved.use_limiter_clock(disk.clock.clone());
    moved.restore(state.clone()).unwrap();
    assert_eq!(moved.save().unwrap(), state);
    disk.driver = disk.driver.moved_to(moved);
    disk.driver.transport.resume();
    for (ns, ended) in [(0, 0), (SECOND / 4 - 1, 0), (SECOND / 4, 1), (10 * SECOND, 2)] {
        assert_eq!(disk.ended_at(7 * SECOND + ns, [0]), [ended], "{ns} ns after the move");
    }
}

#[test]
fn changed_limits_hold_immediately() {
    let limits = RateLimits { bandwidth: limit(512, 0), operations: limit(100, 0) };
    let mut disk = LimitedDisk::new(limits, EngineKind::Sync);
    let control = disk.driver.transport.rate_limits("d", 1);
    for _ in 0..6 {
        disk.post(0, VIRTIO_BLK_T_IN, 512);
    }
    assert_eq!(control.throttles(), [0]);
    assert_eq!(disk.ended_at(0, [0]), [1]);
    assert!(control.throttles()[0] > 0, "the second request had to wait");
    let bandwidth = LimitChange::Set(RateLimit { size: 1024, refill_ms: 1, one_time_burst: 512 });
    let change = LimitsChange { bandwidth, ..LimitsChange::default() };
    control.change(&[change], soon()).unwrap();
    assert_eq!(disk.ended_at(0, [0]), [3], "a full bucket with its burst");
    let removed = LimitsChange { bandwidth: LimitChange::Remove, ..change };
    control.change(&[removed], soon()).unwrap();
    assert_eq!(disk.ended_at(0, [0]), [2]);
    let now = control.limits(soon()).unwrap();
    assert_eq!(now, [RateLimits { bandwidth: None, ..limits }]);
    let refused =
        |changes: &[LimitsChange]| control.change(changes, soon()).unwrap_err().to_string();
    assert!(
        refused(&[removed; 2]).contains("2 rate limits are given for device \"d\", which has 1")
    );
    let bandwidth = LimitChange::Set(RateLimit { size: 0, refill_ms: 1, one_time_burst: 0 });
    let empty = refused(&[LimitsChange { bandwidth, ..change }]);
    assert!(empty.contains("the bandwidth limit of device \"d\" has 0 bytes"), "{empty}");
    assert_eq!(control.limits(soon()).unwrap(), now);
}

/// Nothing but the change brings the device back to its queues: the timer is set to 11 days.
#[test]
fn removed_limit_frees_requests_that_wait() {
    let mut disk = Disk::new();
    disk.config.limits.operations =
        Some(RateLimit { size: 1, refill_ms: 1_000_000_000, one_time_burst: 0 });
    let (mut driver, _) = disk.driver(EngineKind::Sync);
    driver.quiesce();
    let heads = [0, 0, 1].map(|queue| {
        let status = driver.writable(1);
        let pieces = [header(&mut driver, VIRTIO_BLK_T_FLUSH, 0), status];
        (queue, driver.post(queue, &pieces))
    });
    driver.transport.resume();
    let change = LimitsChange { operations: LimitChange::Remove, ..LimitsChange::default() };
    driver.transport.rate_limits("d", 1).change(&[change], soon()).unwrap();
    for (queue, head) in heads {
        driver.wait_used(queue, head);
    }
}

/// Only the timer brings the device back to its queues.
#[test]
fn timer_wakes_the_device() {
    let mut disk = Disk::new();
    disk.config.limits.operations = Some(RateLimit { size: 1, refill_ms: 2, one_time_burst: 0 });
    let (mut driver, _) = disk.driver(EngineKind::Sync);
    let mut heads = Vec::new();
    for n in 0..20 {
        let status = driver.writable(1);
        let pieces = [header(&mut driver, VIRTIO_BLK_T_FLUSH, 0), status];
        heads.push((n % 2, driver.post(n % 2, &pieces)));
    }
    driver.kick(0);
    driver.kick(1);
    for (queue, head) in heads {
        driver.wait_used(queue, head);
    }
}

#[test]
fn limited_disk_conforms_to_virtio() {
    let mut disk = Disk::new();
    let limit = |size| Some(RateLimit { size, refill_ms: 1, one_time_burst: 0 });
    disk.config.limits = RateLimits { bandwidth: limit(1000), operations: limit(2) };
    conformance::check(&TestedDevice {
        make: &|| Box::new(disk.block(EngineKind::Sync)),
        queue: 1,
        request: &|driver, n| {
            let (status, data) = (driver.writable(1), driver.writable(1024));
            vec![header(driver, VIRTIO_BLK_T_IN, n * 2 % 1000), data, status]
        },
    });
}
