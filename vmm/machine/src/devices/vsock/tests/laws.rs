//! Rules that hold for all devices, and buffers that are too small.

use super::*;

#[test]
fn conforms_to_virtio() {
    let sockets = TestSockets::new();
    conformance::check(&TestedDevice {
        make: &|| Box::new(sockets.vsock()),
        queue: TRANSMIT,
        // A packet without an answer: its connection does not exist.
        request: &|driver, n| {
            let ports = Ports { guest: n as u32, host: 1 };
            let header = VsockGuest::packet(op::RST, ports);
            vec![
                driver.readable(&header.as_bytes()[..30]),
                driver.readable(&header.as_bytes()[30..]),
            ]
        },
    });
}

#[test]
fn receive_queue_conforms_to_virtio() {
    let sockets = TestSockets::new();
    conformance::check(&TestedDevice {
        make: &|| Box::new(sockets.vsock()),
        queue: RECEIVE,
        // A packet for a connection that does not exist makes a refusal, which goes to this queue.
        request: &|driver, n| {
            let header = VsockGuest::packet(op::RW, Ports { guest: n as u32, host: 1 });
            let packet = driver.readable(header.as_bytes());
            driver.post(TRANSMIT, &[packet]);
            driver.kick(TRANSMIT);
            vec![driver.writable(20), driver.writable(100)]
        },
    });
}

#[test]
fn packets_to_the_guest_are_marked_dirty() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut guest = sockets.guest();
    let (_, mut program) = guest.connect(&listener, 52);
    let bytes = pattern(5, 9000);
    let mut rooms = Vec::new();
    let frames = conformance::writes_are_marked(&mut guest.driver, |driver| {
        program.write_all(&bytes).unwrap();
        rooms.extend([2000, 8000].map(|len| driver.writable(HEADER as u32 + len)));
        rooms.iter().map(|room| (RECEIVE, driver.post(RECEIVE, &[*room]))).collect()
    });
    let data: Vec<u8> =
        rooms.iter().flat_map(|room| guest.driver.bytes(*room)[HEADER..].to_vec()).collect();
    assert_eq!(data[..9000], bytes);
    for room in &rooms {
        assert!(frames.contains(&(room.addr / 4096)), "a header and data");
    }
    assert!(frames.contains(&(rooms[1].addr / 4096 + 1)), "data alone");
    // An event.
    guest.driver.quiesce();
    let state = guest.driver.transport.save().unwrap();
    let ram = guest.driver.memory.ram().clone();
    let moved = Transport::spawn("moved", Box::new(sockets.vsock()), ram).unwrap();
    moved.restore(state).unwrap();
    guest.driver = guest.driver.moved_to(moved);
    let mut event = None;
    let frames = conformance::writes_are_marked(&mut guest.driver, |driver| {
        // Not zeros, because an event consists of zeros.
        let room = driver.readable(&[0xff; 4]);
        event = Some(room.addr);
        vec![(EVENT, driver.post(EVENT, &[DriverBuffer { writable: true, ..room }]))]
    });
    assert!(frames.contains(&(event.unwrap() / 4096)));
}

#[test]
fn buffers_without_room_for_data_stop_the_device() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut guest = sockets.guest();
    let (_ports, mut program) = guest.connect(&listener, 52);
    program.write_all(b"there is something to read").unwrap();
    for _ in 0..4 {
        let room = guest.driver.writable(HEADER as u32);
        guest.driver.post(RECEIVE, &[room]);
    }
    guest.driver.kick(RECEIVE);
    guest.driver.wait_stopped("no room for data");
}
