//! What is given to an interface when it is built: a tap that is attached to already, and an MTU.

use super::*;
use crate::testing::{TestTap, skip, soon};

#[test]
fn opened_tap_is_held_until_detached() {
    let name = match TestTap::new("op") {
        Ok(tap) => tap,
        Err(e) => return skip("opened_tap_is_held_until_detached", &e.to_string()),
    };
    let (tap, holder) = (&name.0, VmId::random());
    let opened = open_tap("n", tap, holder).unwrap();
    let in_use = |result: Result<_, TapError>| matches!(result, Err(TapError::InUse { .. }));
    assert!(in_use(open_tap("other", tap, VmId::random())));
    let (id, limits) = ("n".to_owned(), NetLimits::default());
    let config =
        NetConfig { id, tap: tap.clone(), mac: MAC, queues: 1, mtu: None, limits, metadata: None };
    let (opener, metadata) = (Opener::start().unwrap(), MetadataStore::default());
    // A build that fails leaves the tap to the next one.
    for _ in 0..2 {
        let mut net = Net::open(&config, holder, Some(&opened), &metadata, &opener).unwrap();
        net.acquire(NextHost::Another).unwrap();
    }
    let mut net = Net::open(&config, holder, Some(&opened), &metadata, &opener).unwrap();
    drop(opened);
    net.acquire(NextHost::Another).unwrap();
    assert!(in_use(open_tap("other", tap, VmId::random())));
    net.release(soon(), NextHost::Another).unwrap();
    net.detach(0, NextHost::Another);
    drop(open_tap("other", tap, VmId::random()).unwrap());
    // Attached again by its name.
    net.acquire(NextHost::Another).unwrap();
    assert!(in_use(open_tap("other", tap, VmId::random())));
}

#[test]
fn driver_is_told_the_mtu() {
    let network = TestNetwork::new(1);
    for mtu in [None, Some(1400)] {
        let mut net = network.net();
        net.config.mtu = mtu;
        let offers = net.features() & 1 << VIRTIO_NET_F_MTU != 0;
        assert_eq!(offers, mtu.is_some());
        let space = net.config_space();
        assert_eq!(space.get(10..), Some(mtu.map(u16::to_le_bytes).as_slice().as_flattened()));
    }
}
