//! The metadata service of an interface, through the driver's queues.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::config::{MetadataVersion, NetMetadata, RateLimit, RateLimits};
use crate::devices::virtio::encode_state;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 7, 7);

/// What a frame of the service says of its sender.
const SENDER: [u8; 10] = [6, 1, 0x23, 0x45, 0x67, 1, 169, 254, 7, 7];

/// Returns a frame that asks who has `address`.
fn who_has(address: Ipv4Addr) -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &MAC.0, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &MAC.0].concat();
    frame.extend([10, 0, 0, 2, 0, 0, 0, 0, 0, 0]);
    frame.extend(address.octets());
    frame
}

/// Returns an interface with the service and these limits.
fn with_service(network: &TestNetwork, limits: NetLimits) -> Net {
    let (id, tap) = ("n".to_owned(), "t".to_owned());
    let metadata =
        NetMetadata { address: ADDRESS, version: MetadataVersion::V2, imds_compat: false };
    let metadata = Some(metadata);
    let config = NetConfig { id, tap, mac: MAC, queues: 1, mtu: None, limits, metadata };
    let taps = network.taps.iter().map(|tap| tap.try_clone().unwrap()).collect();
    let mut net = Net::over_sockets(&config, taps).unwrap();
    net.acquire(NextHost::Another).unwrap();
    net
}

#[test]
fn frames_for_the_service_never_reach_the_tap() {
    let network = TestNetwork::new(1);
    // One frame for the tap, and no more.
    let one = RateLimit { size: 1, refill_ms: 3_600_000, one_time_burst: 0 };
    let transmit = RateLimits { bandwidth: None, operations: Some(one) };
    let net = with_service(&network, NetLimits { transmit, ..NetLimits::default() });
    let mut driver = Driver::started(Box::new(net));
    let other = who_has(Ipv4Addr::new(10, 0, 0, 1));
    for frame in [who_has(ADDRESS), who_has(ADDRESS), other.clone()] {
        let frame = sent(&mut driver, &frame);
        driver.request(1, &[frame]);
    }
    assert_eq!(network.frames(), [other]);
    for _ in 0..2 {
        let room = driver.writable(200);
        assert_eq!(driver.request(0, &[room]), HEADER as u32 + 42);
        let frame = driver.bytes(room);
        assert_eq!(num_buffers(&frame), 1);
        assert_eq!(frame[HEADER..HEADER + 6], MAC.0);
        assert_eq!(frame[HEADER + 22..HEADER + 32], SENDER);
    }
}

#[test]
fn waiting_frame_of_the_service_is_not_saved() {
    let network = TestNetwork::new(1);
    let one = RateLimit { size: 1, refill_ms: 1000, one_time_burst: 0 };
    let receive = RateLimits { bandwidth: None, operations: Some(one) };
    let net = with_service(&network, NetLimits { receive, ..NetLimits::default() });
    let mut driver = Driver::started(Box::new(net));
    let clock = Arc::<AtomicU64>::default();
    driver.transport.use_limiter_clock(clock.clone());
    let rooms = [driver.writable(200), driver.writable(200)];
    let heads = rooms.map(|room| driver.post(0, &[room]));
    for _ in 0..2 {
        let frame = sent(&mut driver, &who_has(ADDRESS));
        driver.request(1, &[frame]);
    }
    assert_eq!(driver.wait_used(0, heads[0]), HEADER as u32 + 42);
    driver.quiesce();
    assert!(!driver.has_used(0), "the second one waits for the limit");
    let state = encode_state(&driver.transport.save().unwrap()).unwrap();
    assert!(!state.windows(SENDER.len()).any(|bytes| bytes == SENDER));
    clock.store(1_000_000_000, Ordering::SeqCst);
    driver.transport.resume();
    assert_eq!(driver.wait_used(0, heads[1]), HEADER as u32 + 42);
    assert_eq!(driver.bytes(rooms[1])[HEADER + 22..HEADER + 32], SENDER);
}
