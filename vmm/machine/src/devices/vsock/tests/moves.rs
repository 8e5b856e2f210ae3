//! Pauses, moves, and ownership of the socket.

use super::*;

#[test]
fn program_that_ends_during_pause_is_noticed() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut guest = sockets.guest();
    let (ports, program) = guest.connect(&listener, 52);
    program.shutdown(Shutdown::Write).unwrap();
    guest.expect(op::SHUTDOWN, ports);
    guest.driver.quiesce();
    drop(program);
    guest.driver.transport.resume();
    let (header, _) = guest.expect(op::SHUTDOWN, ports);
    assert_eq!(header.flags.get(), NO_SEND | NO_RECEIVE);
}

#[test]
fn move_resets_the_guests_connections() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut guest = sockets.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    guest.driver.quiesce();
    // A pause without a move changes nothing.
    guest.driver.transport.resume();
    guest.send(op::RW, ports, b"x");
    program.read_exact(&mut [0]).unwrap();
    guest.driver.quiesce();
    let state = guest.driver.transport.save().unwrap();
    guest.driver.transport.release().unwrap();
    let mut vsock = sockets.vsock();
    vsock.acquire(NextHost::Another).unwrap();
    let ram = guest.driver.memory.ram().clone();
    let moved = Transport::spawn("moved", Box::new(vsock), ram).unwrap();
    moved.restore(state.clone()).unwrap();
    assert_eq!(moved.save().unwrap(), state);
    guest.driver = guest.driver.moved_to(moved);
    assert_eq!(program.read(&mut [0]).unwrap(), 0, "the old host's end is closed");
    guest.driver.transport.resume();
    let room = guest.driver.writable(4);
    assert_eq!(guest.driver.request(EVENT, &[room]), 4);
    assert_eq!(guest.driver.bytes(room), TRANSPORT_RESET.to_le_bytes());
    let (ports, mut program) = guest.connect(&listener, 52);
    guest.send(op::RW, ports, b"y");
    program.read_exact(&mut [0]).unwrap();
}

#[test]
fn pause_loses_no_data() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut guest = sockets.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    for n in 0..100 {
        program.write_all(&[n]).unwrap();
        guest.driver.quiesce();
        guest.driver.transport.resume();
        assert_eq!(guest.expect(op::RW, ports).1, [n]);
        guest.driver.forget_buffers();
    }
    let mut caller = UnixStream::connect(sockets.uds()).unwrap();
    for byte in b"CONNECT 9\n" {
        caller.write_all(&[*byte]).unwrap();
        guest.driver.quiesce();
        guest.driver.transport.resume();
    }
    assert_eq!(guest.next().0.op.get(), op::REQUEST);
}

#[test]
fn socket_has_one_owner_and_is_removed() {
    let sockets = TestSockets::new();
    let (mut a, mut b) = (sockets.vsock(), sockets.vsock());
    assert!(!sockets.uds().exists(), "looking leaves nothing behind");
    a.acquire(NextHost::Another).unwrap();
    assert!(b.acquire(NextHost::Another).unwrap_err().to_string().contains("in use"));
    a.release(crate::testing::soon(), NextHost::Another).unwrap();
    assert!(!sockets.uds().exists());
    b.acquire(NextHost::Another).unwrap();
    let nowhere = VsockConfig { cid: 3, uds: "/nonexistent-dl/v".into() };
    let error = Vsock::open(&nowhere, None, &Opener::start().unwrap()).err().unwrap().to_string();
    assert!(error.contains("/nonexistent-dl/v"), "{error}");
}

#[test]
fn socket_bound_earlier_is_listened_on_and_stays() {
    let sockets = TestSockets::new();
    let bound = crate::socket::ListeningSocket::bind_new(&sockets.uds()).unwrap();
    let opened = OpenedSocket::from(bound);
    let config = VsockConfig { cid: CID, uds: sockets.uds() };
    let opener = Opener::start().unwrap();
    // A build that fails leaves the socket to the next one.
    for _ in 0..2 {
        Vsock::open(&config, Some(&opened), &opener).unwrap().acquire(NextHost::Another).unwrap();
    }
    let mut vsock = Vsock::open(&config, Some(&opened), &opener).unwrap();
    drop(opened);
    vsock.acquire(NextHost::Another).unwrap();
    let mut guest = VsockGuest::new(Driver::started(Box::new(vsock)));
    let program = sockets.call(7);
    let (header, _) = guest.next();
    assert_eq!((header.op.get(), header.dst_port.get()), (op::REQUEST, 7));
    drop((program, guest));
    assert!(sockets.uds().exists());
    assert!(UnixStream::connect(sockets.uds()).is_err(), "nothing listens");
}

#[test]
fn socket_bound_earlier_stays_after_a_failed_move() {
    let sockets = TestSockets::new();
    let bound = crate::socket::ListeningSocket::bind_new(&sockets.uds()).unwrap();
    let config = VsockConfig { cid: CID, uds: sockets.uds() };
    let opener = Opener::start().unwrap();
    let mut vsock = Vsock::open(&config, Some(&bound.into()), &opener).unwrap();
    vsock.acquire(NextHost::Another).unwrap();
    for _ in 0..2 {
        vsock.release(Instant::now(), NextHost::Another).unwrap();
        assert!(UnixStream::connect(sockets.uds()).is_err(), "nothing listens");
        vsock.acquire(NextHost::Another).unwrap();
        assert!(UnixStream::connect(sockets.uds()).is_ok());
    }
    drop(vsock);
    assert!(sockets.uds().exists());
}
