//! Tests of rate limits, on a clock that the test sets.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::config::{LimitChange, LimitsChange, RateLimit, RateLimits};
use crate::testing::soon;

const SECOND: u64 = 1_000_000_000;

fn limit(size: u64) -> Option<RateLimit> {
    Some(RateLimit { size, refill_ms: 1000, one_time_burst: 0 })
}

fn both(bytes: u64, frames: u64) -> NetLimits {
    let limits = RateLimits { bandwidth: limit(bytes), operations: limit(frames) };
    NetLimits { receive: limits, transmit: limits }
}

fn limited(network: &TestNetwork, limits: NetLimits) -> (Driver, Arc<AtomicU64>) {
    let driver = Driver::started(Box::new(network.limited(limits)));
    let clock = Arc::<AtomicU64>::default();
    driver.transport.use_limiter_clock(clock.clone());
    (driver, clock)
}

/// Has the device process its queues.
fn process(driver: &Driver) {
    for _ in 0..2 {
        driver.quiesce();
        driver.transport.resume();
    }
}

#[test]
fn sent_frames_follow_the_rate() {
    let network = TestNetwork::new(1);
    let (mut driver, clock) = limited(&network, both(1000, 100));
    // With their headers, the frames have 400 and 60 bytes.
    let lengths = [400, 400, 400, 60, 60].map(|len| len - HEADER);
    for (n, len) in (0..).zip(lengths) {
        let piece = sent(&mut driver, &frame(n, len));
        driver.post(1, &[piece]);
    }
    let frames: Vec<_> = (0..).zip(lengths).map(|(n, len)| frame(n, len)).collect();
    for (ns, of) in [(0, 0..2), (SECOND / 5 - 1, 0..0), (SECOND / 5, 2..3), (SECOND, 3..5)] {
        clock.store(ns, Ordering::SeqCst);
        process(&driver);
        assert_eq!(network.frames(), frames[of], "at {ns} ns");
    }
}

#[test]
fn received_frames_wait_for_their_turn() {
    let network = TestNetwork::new(1);
    let (mut driver, clock) = limited(&network, both(1 << 20, 2));
    let rooms: Vec<DriverBuffer> = (0..5).map(|_| driver.writable(1526)).collect();
    let heads: Vec<u16> = rooms.iter().map(|room| driver.post(0, &[*room])).collect();
    (0..5).for_each(|n| network.send(0, &frame(n, 100 + n as usize)));
    let mut arrived = 0;
    for (ns, count) in [(0, 2), (SECOND / 2 - 1, 2), (SECOND / 2, 3), (3 * SECOND, 5)] {
        clock.store(ns, Ordering::SeqCst);
        process(&driver);
        while arrived < count {
            assert_eq!(driver.wait_used(0, heads[arrived]) as usize, HEADER + 100 + arrived);
            let bytes = driver.bytes(rooms[arrived]);
            let whole = &bytes[HEADER..HEADER + 100 + arrived];
            assert_eq!(whole, frame(arrived as u64, 100 + arrived));
            arrived += 1;
        }
        assert!(!driver.has_used(0), "at {ns} ns");
    }
}

#[test]
fn received_bytes_have_the_header() {
    let network = TestNetwork::new(1);
    let (mut driver, clock) = limited(&network, both(1000, 100));
    let rooms: Vec<DriverBuffer> = (0..3).map(|_| driver.writable(1526)).collect();
    let heads: Vec<u16> = rooms.iter().map(|room| driver.post(0, &[*room])).collect();
    (0..3).for_each(|n| network.send(0, &frame(n, 400 - HEADER)));
    process(&driver);
    heads[..2].iter().for_each(|head| assert_eq!(driver.wait_used(0, *head), 400));
    clock.store(SECOND / 5 - 1, Ordering::SeqCst);
    process(&driver);
    assert!(!driver.has_used(0));
    clock.store(SECOND / 5, Ordering::SeqCst);
    process(&driver);
    driver.wait_used(0, heads[2]);
}

/// A frame that was read before its turn came is part of the state.
#[test]
fn waiting_frame_moves_with_the_guest() {
    let network = TestNetwork::new(1);
    let (mut driver, _clock) = limited(&network, both(1 << 20, 1));
    let rooms: Vec<DriverBuffer> = (0..2).map(|_| driver.writable(1526)).collect();
    let heads: Vec<u16> = rooms.iter().map(|room| driver.post(0, &[*room])).collect();
    (0..2).for_each(|n| network.send(0, &frame(n, 100)));
    process(&driver);
    driver.wait_used(0, heads[0]);
    driver.quiesce();
    let state = driver.transport.save().unwrap();
    let moved = restored(&network, &driver, state.clone());
    assert_eq!(moved.save().unwrap(), state);
    let mut driver = driver.moved_to(moved);
    let clock = Arc::<AtomicU64>::default();
    driver.transport.use_limiter_clock(clock.clone());
    driver.transport.resume();
    process(&driver);
    assert!(!driver.has_used(0));
    clock.store(SECOND, Ordering::SeqCst);
    process(&driver);
    driver.wait_used(0, heads[1]);
    assert_eq!(driver.bytes(rooms[1])[HEADER..HEADER + 100], frame(1, 100));
}

/// Nothing but the resume brings the device back to the second pair: the timer is set to 11 days.
#[test]
fn limit_removed_in_pause_frees_all_queues() {
    let network = TestNetwork::new(2);
    let operations = Some(RateLimit { size: 1, refill_ms: 1_000_000_000, one_time_burst: 0 });
    let receive = RateLimits { bandwidth: None, operations };
    let limits = NetLimits { receive, ..NetLimits::default() };
    let mut driver = Driver::started(Box::new(network.limited(limits)));
    let pairs = [VIRTIO_NET_CTRL_MQ as u8, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET as u8, 2, 0];
    assert_eq!(control(&mut driver, 4, &pairs), VIRTIO_NET_OK as u8);
    driver.quiesce();
    let heads = [0, 0, 2].map(|queue| {
        let room = driver.writable(1526);
        (queue, driver.post(queue, &[room]))
    });
    [0, 0, 1].into_iter().for_each(|pair| network.send(pair, &frame(0, 100)));
    driver.transport.resume();
    driver.wait_used(0, heads[0].1);
    driver.quiesce();
    assert!(!driver.has_used(0));
    assert!(!driver.has_used(2));
    let change = LimitsChange { operations: LimitChange::Remove, ..LimitsChange::default() };
    driver.transport.rate_limits("n", 2).change(&[change], soon()).unwrap();
    driver.transport.resume();
    for (queue, head) in &heads[1..] {
        driver.wait_used(*queue, *head);
    }
}

#[test]
fn limited_interface_conforms_to_virtio() {
    let network = TestNetwork::new(1);
    let limit = |size| Some(RateLimit { size, refill_ms: 1, one_time_burst: 0 });
    let limits = RateLimits { bandwidth: limit(600), operations: limit(2) };
    let make = || -> Box<dyn Device> {
        Box::new(network.limited(NetLimits { receive: limits, transmit: limits }))
    };
    conformance::check(&TestedDevice {
        make: &make,
        queue: 1,
        request: &|driver, n| vec![sent(driver, &frame(n, 100))],
    });
    conformance::check(&TestedDevice {
        make: &make,
        queue: 0,
        request: &|driver, n| {
            network.send(0, &frame(n, 1000));
            vec![driver.writable(12), driver.writable(700), driver.writable(700)]
        },
    });
}
