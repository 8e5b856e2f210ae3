//! Pauses, moves, and ownership of the socket.

use std::os::unix::fs::FileExt;

use super::*;
use crate::config::HandedOverVsock;
use crate::devices::virtio::VirtioState;

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
    let mut guest = moved(&sockets, guest);
    assert_eq!(program.read(&mut [0]).unwrap(), 0, "the old host's end is closed");
    guest.driver.transport.resume();
    let room = guest.driver.writable(4);
    assert_eq!(guest.driver.request(EVENT, &[room]), 4);
    assert_eq!(guest.driver.bytes(room), TRANSPORT_RESET.to_le_bytes());
    guest.driver.post(EVENT, &[room]);
    let (ports, mut program) = guest.connect(&listener, 52);
    guest.send(op::RW, ports, b"y");
    program.read_exact(&mut [0]).unwrap();
}

/// The bytes are those of the format's document.
#[test]
fn saved_state_keeps_its_bytes() {
    let mut vsock = TestSockets::new().vsock();
    vsock.state = VsockState {
        reset_due: true,
        reset_unacknowledged: Some(0x8001),
        next_port: FIRST_PORT + 2,
    };
    let bytes = vsock.save().unwrap();
    assert_eq!(bytes, [1, 1, 0x81, 0x80, 0x02, 0x82, 0x80, 0x80, 0x80, 0x04]);
    let mut restored = TestSockets::new().vsock();
    restored.restore(&bytes).unwrap();
    assert_eq!(restored.state, vsock.state);
}

/// Releases a paused device for the next process. Returns that process's device and the state.
fn hand_over(sockets: &TestSockets, guest: &VsockGuest) -> (Vsock, VirtioState) {
    let transport = &guest.driver.transport;
    let state = transport.save().unwrap();
    let files = transport.share_by(crate::testing::soon()).unwrap();
    let [listener, channel, moved] = files.try_into().unwrap();
    let files = HandedOverVsock::new(listener, channel, moved.into());
    transport.begin_release(crate::testing::soon(), NextHost::This).wait().unwrap();
    let config = VsockConfig { cid: CID, uds: sockets.uds() };
    (Vsock::of_other_process(&config, &files, &Opener::start().unwrap()).unwrap(), state)
}

#[test]
fn connections_continue_in_the_next_process() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut guest = sockets.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    let mut greets = UnixStream::connect(sockets.uds()).unwrap();
    greets.write_all(b"CONN").unwrap();
    let mut waiting = Vec::new();
    for n in 0..5 {
        // The program reads these later than the next process begins.
        let data = pattern(n, 60_000);
        guest.send(op::RW, ports, &data);
        guest.driver.quiesce();
        program.write_all(&data[..1000]).unwrap();
        let (mut vsock, state) = hand_over(&sockets, &guest);
        let waits = sockets.call(9);
        vsock.acquire(NextHost::This).unwrap();
        let ram = guest.driver.memory.ram().clone();
        let moved = Transport::spawn("moved", Box::new(vsock), ram).unwrap();
        moved.restore(state).unwrap();
        guest.driver = guest.driver.moved_to(moved);
        guest.driver.transport.resume();
        let (mut given, mut requests) = (Vec::new(), 0);
        while given.len() < 1000 || requests == 0 {
            let (header, data) = guest.next();
            match header.op.get() {
                op::RW if header.dst_port.get() == ports.guest => given.extend(data),
                op::REQUEST if header.dst_port.get() == 9 => requests += 1,
                op::CREDIT_UPDATE => {}
                _ => panic!("{header:?}"),
            }
        }
        assert_eq!((&given[..], requests), (&data[..1000], 1));
        let mut read = vec![0; data.len()];
        program.read_exact(&mut read).unwrap();
        assert_eq!(read, data);
        waiting.push(waits);
    }
    greets.write_all(b"ECT 7\n").unwrap();
    let mut header = guest.next().0;
    while header.op.get() == op::CREDIT_UPDATE {
        header = guest.next().0;
    }
    assert_eq!((header.op.get(), header.dst_port.get()), (op::REQUEST, 7));
    drop(guest);
    assert!(!sockets.uds().exists());
}

#[test]
fn connections_stay_if_the_guest_does() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut guest = sockets.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    for _ in 0..2 {
        guest.driver.quiesce();
        let (mut next, _) = hand_over(&sockets, &guest);
        next.acquire(NextHost::This).unwrap();
        next.undo_acquire(crate::testing::soon(), NextHost::This).unwrap();
        drop(next);
        let soon = crate::testing::soon();
        guest.driver.transport.begin_acquire(soon, NextHost::Another).wait().unwrap();
        guest.driver.transport.resume();
        program.write_all(b"x").unwrap();
        assert_eq!(guest.expect(op::RW, ports).1, b"x");
        let _program = sockets.call(7);
        assert_eq!(guest.next().0.op.get(), op::REQUEST);
    }
    drop(guest);
    assert!(!sockets.uds().exists());
}

/// Returns why a next process does not continue with a state and streams that `change` has changed.
/// The guest stays, with its connections.
fn refusal(change: impl FnOnce(&HandedOverVsock)) -> String {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut guest = sockets.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    guest.driver.quiesce();
    let transport = &guest.driver.transport;
    let files = transport.share_by(crate::testing::soon()).unwrap();
    let [listener, channel, moved] = files.try_into().unwrap();
    let files = HandedOverVsock::new(listener, channel, moved.into());
    transport.begin_release(crate::testing::soon(), NextHost::This).wait().unwrap();
    change(&files);
    let config = VsockConfig { cid: CID, uds: sockets.uds() };
    let opener = Opener::start().unwrap();
    let mut next = Vsock::of_other_process(&config, &files, &opener).unwrap();
    let why = next.acquire(NextHost::This).unwrap_err().to_string();
    drop((next, files));
    let soon = crate::testing::soon();
    guest.driver.transport.begin_acquire(soon, NextHost::Another).wait().unwrap();
    guest.driver.transport.resume();
    guest.send(op::RW, ports, b"x");
    program.read_exact(&mut [0]).unwrap();
    why
}

#[test]
fn connections_that_cannot_continue_stay() {
    let channel_takes = |files: &HandedOverVsock| {
        let mut room = [std::mem::MaybeUninit::uninit(); 64];
        driftline_format::descriptors::receive(files.channel(), &mut room).unwrap().unwrap().all
    };
    let why = refusal(|files| files.state().write_all_at(&[2], 0).unwrap());
    assert!(why.contains("it has version 2"), "{why}");
    let why = refusal(|files| files.state().set_len(4).unwrap());
    assert!(why.contains("the state of a vsock's connections is malformed"), "{why}");
    let why = refusal(|files| files.state().set_len(1 << 30).unwrap());
    assert!(why.contains("the state has 1073741824 bytes"), "{why}");
    let why = refusal(|files| drop(channel_takes(files)));
    assert!(why.contains("0 of 1 streams have come"), "{why}");
}

#[test]
fn paused_guest_moves_twice_with_its_connections() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut guest = sockets.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    guest.driver.quiesce();
    for _ in 0..2 {
        let (mut vsock, state) = hand_over(&sockets, &guest);
        vsock.acquire(NextHost::This).unwrap();
        let ram = guest.driver.memory.ram().clone();
        let moved = Transport::spawn("moved", Box::new(vsock), ram).unwrap();
        moved.restore(state).unwrap();
        guest.driver = guest.driver.moved_to(moved);
    }
    assert!(sockets.uds().exists());
    // A migration to another host that fails, before the guest has run here.
    let transport = &guest.driver.transport;
    transport.begin_release(crate::testing::soon(), NextHost::Another).wait().unwrap();
    assert!(!sockets.uds().exists());
    transport.begin_acquire(crate::testing::soon(), NextHost::Another).wait().unwrap();
    guest.driver.transport.resume();
    program.write_all(b"x").unwrap();
    assert_eq!(guest.expect(op::RW, ports).1, b"x");
    drop(guest);
    assert!(!sockets.uds().exists());
}

#[test]
fn connection_ends_although_another_process_has_it() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut guest = sockets.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    guest.driver.quiesce();
    let (mut hangs, _) = hand_over(&sockets, &guest);
    hangs.acquire(NextHost::This).unwrap();
    let soon = crate::testing::soon();
    guest.driver.transport.begin_acquire(soon, NextHost::Another).wait().unwrap();
    guest.driver.transport.resume();
    guest.send(op::RST, ports, &[]);
    assert_eq!(program.read(&mut [0]).unwrap(), 0);
    hangs.undo_acquire(crate::testing::soon(), NextHost::This).unwrap();
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
