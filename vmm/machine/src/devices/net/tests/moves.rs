//! Moves of an interface to another host.

use super::*;

#[test]
fn interface_announces_itself_after_a_move() {
    let network = TestNetwork::new(1);
    let mut driver = Driver::started(Box::new(network.net()));
    let piece = sent(&mut driver, &frame(1, 60));
    driver.request(1, &[piece]);
    driver.quiesce();
    driver.transport.resume();
    assert_eq!(network.frames(), [frame(1, 60)], "not after a pause");
    assert_eq!(status(&driver), 1);
    driver.quiesce();
    let state = driver.transport.save().unwrap();
    let moved = restored(&network, &driver, state);
    let mut driver = driver.moved_to(moved);
    driver.write(VIRTIO_MMIO_INTERRUPT_ACK, 3);
    driver.transport.resume();
    let want = frame::announcement(MAC)[HEADER..].to_vec();
    let mut seen = Vec::new();
    let end = Instant::now() + Duration::from_secs(20);
    while seen.len() < 6 {
        assert!(Instant::now() < end, "it announced itself {} times", seen.len());
        seen.extend(network.frames());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(seen.iter().all(|frame| *frame == want));
    assert_eq!(status(&driver), 3, "and asks its driver to");
    assert_ne!(driver.read(VIRTIO_MMIO_INTERRUPT_STATUS) & VIRTIO_MMIO_INT_CONFIG, 0);
    driver.write(VIRTIO_MMIO_INTERRUPT_ACK, 3);
    assert_eq!(control(&mut driver, 2, &[3, 0]), 0);
    assert_eq!(status(&driver), 1, "which has done so");
    assert_eq!(driver.read(VIRTIO_MMIO_INTERRUPT_STATUS) & VIRTIO_MMIO_INT_CONFIG, 0);
    assert_eq!(network.frames(), Vec::<Vec<u8>>::new());
}

#[test]
fn queued_frames_arrive_first_after_a_move() {
    let network = TestNetwork::new(1);
    let driver = Driver::started(Box::new(network.net()));
    let needs = driver.transport.hand_over();
    assert!(needs.detach && needs.acquire, "the set of devices must ask it");
    driver.quiesce();
    let state = driver.transport.save().unwrap();
    for n in 1..=3 {
        network.send(0, &frame(n, 100));
    }
    let moved = restored(&network, &driver, state);
    driver.transport.release().unwrap();
    moved.attach(driver.transport.detach(1 << 20)).unwrap();
    assert_eq!(network.frames(), [&frame::announcement(MAC)[HEADER..]], "before it resumes");
    moved.acquire().unwrap();
    let mut driver = driver.moved_to(moved);
    driver.transport.resume();
    network.send(0, &frame(4, 100));
    let mut received = Vec::new();
    for _ in 1..=4 {
        let room = driver.writable(200);
        driver.request(0, &[room]);
        received.push(driver.bytes(room)[HEADER..HEADER + 100].to_vec());
    }
    assert_eq!(received, (1..=4).map(|n| frame(n, 100)).collect::<Vec<_>>());
}

#[test]
fn tap_of_the_last_host_is_left_alone() {
    let network = TestNetwork::new(1);
    let mut net = network.net();
    net.detach(0, NextHost::Another);
    // As if the restore had found the tap in use, because both hosts are the same.
    net.attach(&[]).unwrap();
    assert!(net.tap.is_none());
    assert_eq!(network.frames(), Vec::<Vec<u8>>::new());
    net.acquire(NextHost::Another).unwrap();
    assert!(net.tap.is_some());
}

#[test]
fn queued_frames_keep_their_queue_pair() {
    let network = TestNetwork::new(2);
    let mut driver = Driver::started(Box::new(network.net()));
    let control_queue = driver.queue_count() - 1;
    let pairs = [VIRTIO_NET_CTRL_MQ as u8, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET as u8, 2, 0];
    assert_eq!(control(&mut driver, control_queue, &pairs), VIRTIO_NET_OK as u8);
    driver.quiesce();
    let state = driver.transport.save().unwrap();
    (0..2).for_each(|queue| network.send(queue, &frame(queue as u64, 100)));
    let moved = restored(&network, &driver, state);
    moved.attach(driver.transport.detach(1 << 20)).unwrap();
    moved.acquire().unwrap();
    let mut driver = driver.moved_to(moved);
    driver.transport.resume();
    for queue in 0..2 {
        let room = driver.writable(200);
        driver.request(2 * queue, &[room]);
        assert_eq!(driver.bytes(room)[HEADER..HEADER + 100], frame(queue as u64, 100));
    }
}

#[test]
fn failed_move_loses_no_frame() {
    let network = TestNetwork::new(1);
    let mut driver = Driver::started(Box::new(network.net()));
    driver.quiesce();
    network.send(0, &frame(1, 100));
    driver.transport.release().unwrap();
    assert_eq!(driver.transport.detach(10), [0; 0], "without room for it");
    network.send(0, &frame(2, 100));
    driver.transport.acquire().unwrap();
    driver.transport.resume();
    for n in 1..=2 {
        let room = driver.writable(200);
        driver.request(0, &[room]);
        assert_eq!(driver.bytes(room)[HEADER..HEADER + 100], frame(n, 100));
    }
}

#[test]
fn malformed_queued_frames_cost_nothing_else() {
    let network = TestNetwork::new(1);
    let driver = Driver::started(Box::new(network.net()));
    driver.quiesce();
    let state = driver.transport.save().unwrap();
    let moved = restored(&network, &driver, state);
    moved.attach(vec![0xff; 40]).unwrap_err();
    moved.acquire().unwrap();
    let mut driver = driver.moved_to(moved);
    driver.transport.resume();
    network.send(0, &frame(1, 100));
    let room = driver.writable(200);
    assert_eq!(driver.request(0, &[room]), 112);
}

#[test]
fn stopped_interface_with_several_queues_moves() {
    let network = TestNetwork::new(2);
    let mut driver = Driver::started(Box::new(network.net()));
    let control_queue = driver.queue_count() - 1;
    let pairs = [VIRTIO_NET_CTRL_MQ as u8, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET as u8, 2, 0];
    assert_eq!(control(&mut driver, control_queue, &pairs), VIRTIO_NET_OK as u8);
    driver.kick(1000);
    driver.wait_stopped("a queue that does not exist, notified");
    driver.quiesce();
    let state = driver.transport.save().unwrap();
    let there = restored(&network, &driver, state.clone());
    let mut moved = driver.moved_to(there);
    assert_eq!(moved.transport.save().unwrap(), state);
    moved.transport.resume();
    moved.start(!0);
    let piece = sent(&mut moved, &frame(0, 64));
    moved.request(1, &[piece]);
}
