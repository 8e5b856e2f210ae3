//! The metadata service of an interface, through the driver's queues.

use std::net::Ipv4Addr;

use super::*;
use crate::config::{MetadataVersion, NetMetadata, RateLimit, RateLimits};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 7, 7);

/// Returns a frame that asks who has `address`.
fn who_has(address: Ipv4Addr) -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &MAC.0, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &MAC.0].concat();
    frame.extend([10, 0, 0, 2, 0, 0, 0, 0, 0, 0]);
    frame.extend(address.octets());
    frame
}

#[test]
fn frames_for_the_service_never_reach_the_tap() {
    let network = TestNetwork::new(1);
    let (id, tap) = ("n".to_owned(), "t".to_owned());
    // One frame for the tap, and no more.
    let one = RateLimit { size: 1, refill_ms: 3_600_000, one_time_burst: 0 };
    let transmit = RateLimits { bandwidth: None, operations: Some(one) };
    let limits = NetLimits { transmit, ..NetLimits::default() };
    let metadata =
        NetMetadata { address: ADDRESS, version: MetadataVersion::V2, imds_compat: false };
    let metadata = Some(metadata);
    let config = NetConfig { id, tap, mac: MAC, queues: 1, mtu: None, limits, metadata };
    let taps = network.taps.iter().map(|tap| tap.try_clone().unwrap()).collect();
    let mut net = Net::over_sockets(&config, taps).unwrap();
    net.acquire().unwrap();
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
        let sender = [6, 1, 0x23, 0x45, 0x67, 1, 169, 254, 7, 7];
        assert_eq!(frame[HEADER + 22..HEADER + 32], sender);
    }
}
