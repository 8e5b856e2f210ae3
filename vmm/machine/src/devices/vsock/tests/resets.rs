//! What a moved guest receives before and after it has handled the reset of its connections.

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::super::bounds::RESET_TIMEOUT;
use super::*;

/// A time in which a packet that does not wait would arrive.
const A_WHILE: Duration = Duration::from_millis(100);

/// Moves the guest to another host, whose device is paused.
fn moved(sockets: &TestSockets, mut guest: VsockGuest) -> VsockGuest {
    guest.driver.quiesce();
    let state = guest.driver.transport.save().unwrap();
    guest.driver.transport.release().unwrap();
    let mut vsock = sockets.vsock();
    vsock.acquire(NextHost::Another).unwrap();
    let ram = guest.driver.memory.ram().clone();
    let moved = Transport::spawn("moved", Box::new(vsock), ram).unwrap();
    moved.restore(state).unwrap();
    guest.driver = guest.driver.moved_to(moved);
    guest
}

/// Makes `count` buffers for events available, as Linux does before it uses the device.
fn post_events(guest: &mut VsockGuest, count: usize) -> Vec<(u16, DriverBuffer)> {
    let post = |_| {
        let room = guest.driver.writable(4);
        (guest.driver.post(EVENT, &[room]), room)
    };
    (0..count).map(post).collect()
}

/// Posts a buffer for a packet. Returns its head.
fn post_receive(guest: &mut VsockGuest) -> u16 {
    let room = guest.driver.writable((HEADER + 4096) as u32);
    let head = guest.driver.post(RECEIVE, &[room]);
    guest.driver.kick(RECEIVE);
    head
}

#[test]
fn packets_wait_until_a_reset_is_handled() {
    for without in [0, 1 << VIRTIO_RING_F_EVENT_IDX] {
        let sockets = TestSockets::new();
        let mut vsock = sockets.vsock();
        vsock.acquire(NextHost::Another).unwrap();
        let driver = Driver::started_without(Box::new(vsock), without);
        let mut guest = VsockGuest::new(driver);
        let events = post_events(&mut guest, 8);
        guest.driver.kick(EVENT);
        let mut programs = Vec::new();
        // A second move before the first event is handled: both buffers must return.
        for (n, (event, room)) in events.iter().take(2).enumerate() {
            guest = moved(&sockets, guest);
            programs.push(sockets.call(50 + n as u32));
            guest.driver.transport.resume();
            assert_eq!(guest.driver.wait_used(EVENT, *event), 4);
            assert_eq!(guest.driver.bytes(*room), TRANSPORT_RESET.to_le_bytes());
        }
        let packet = post_receive(&mut guest);
        // Neither a pause nor another event of the queue is an acknowledgement.
        guest.driver.quiesce();
        guest.driver.transport.resume();
        for _ in 0..2 {
            std::thread::sleep(A_WHILE);
            assert!(!guest.driver.has_used(RECEIVE), "the guest has not handled the reset");
            guest.driver.post(EVENT, &[events[0].1]);
            if guest.driver.is_kick_wanted(EVENT, without == 0) {
                guest.driver.kick(EVENT);
            }
        }
        assert!(guest.driver.is_kick_wanted(EVENT, without == 0), "the last one was notified");
        guest.driver.wait_used(RECEIVE, packet);
    }
}

#[test]
fn moved_guest_sees_new_ports() {
    let sockets = TestSockets::new();
    let mut guest = sockets.guest();
    let mut ports = Vec::new();
    for _ in 0..3 {
        let _program = sockets.call(52);
        let (header, _) = guest.next();
        assert_eq!(header.op.get(), op::REQUEST);
        ports.push(header.src_port.get());
        guest = moved(&sockets, guest);
        guest.driver.transport.resume();
    }
    assert_eq!(ports, [FIRST_PORT, FIRST_PORT + 1, FIRST_PORT + 2]);
}

#[test]
fn guest_without_event_buffers_gets_packets() {
    let sockets = TestSockets::new();
    let mut guest = moved(&sockets, sockets.guest());
    guest.driver.transport.resume();
    let begin = Instant::now();
    let _program = sockets.call(52);
    assert_eq!(guest.next().0.op.get(), op::REQUEST);
    assert!(begin.elapsed() < RESET_TIMEOUT, "{:?}", begin.elapsed());
    // It is told of the reset once it has a buffer.
    let [(event, _)] = post_events(&mut guest, 1).try_into().unwrap();
    guest.driver.kick(EVENT);
    assert_eq!(guest.driver.wait_used(EVENT, event), 4);
}

#[test]
fn driver_that_acknowledges_nothing_gets_packets_later() {
    let sockets = TestSockets::new();
    let mut guest = sockets.guest();
    let [(event, _)] = post_events(&mut guest, 1).try_into().unwrap();
    let mut guest = moved(&sockets, guest);
    let begin = Instant::now();
    guest.driver.transport.resume();
    assert_eq!(guest.driver.wait_used(EVENT, event), 4);
    let packet = post_receive(&mut guest);
    // A packet for a connection that does not exist is refused.
    guest.send(op::RW, Ports { guest: GUEST_PORT, host: 1 }, b"x");
    guest.driver.wait_used(RECEIVE, packet);
    assert!(begin.elapsed() >= RESET_TIMEOUT, "{:?}", begin.elapsed());
}
