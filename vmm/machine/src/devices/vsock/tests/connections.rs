//! Connections from either side: data, credit, time limits and malformed packets.

use super::*;

#[test]
fn guest_connects_to_a_host_program() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut vsock = sockets.vsock();
    vsock.acquire(NextHost::Another).unwrap();
    let counters = vsock.counters().clone();
    let mut guest = VsockGuest::new(Driver::started(Box::new(vsock)));
    let (ports, mut program) = guest.connect(&listener, 52);
    guest.send(op::RW, ports, b"a question");
    let mut bytes = [0; 10];
    program.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"a question");
    program.write_all(&pattern(1, 10_000)).unwrap();
    assert_eq!(guest.read(ports, 10_000), pattern(1, 10_000));
    // The program has sent everything; the guest still sends.
    program.shutdown(Shutdown::Write).unwrap();
    let (header, _) = guest.expect(op::SHUTDOWN, ports);
    assert_eq!(header.flags.get(), NO_SEND);
    guest.send(op::RW, ports, b"last bytes");
    program.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"last bytes");
    let over = PacketHeader {
        flags: (NO_SEND | NO_RECEIVE).into(),
        ..VsockGuest::packet(op::SHUTDOWN, ports)
    };
    guest.send_header(over, &[]);
    guest.expect(op::RST, ports);
    assert_eq!(program.read(&mut bytes).unwrap(), 0);
    // No program listens at this port.
    let unknown = Ports { guest: 7, host: 53 };
    guest.send(op::REQUEST, unknown, &[]);
    guest.expect(op::RST, unknown);
    // Two packets with data, and those that connect, shut down and are refused.
    assert_eq!((counters.taken_packets.get(), counters.taken_bytes.get() >= 20), (5, true));
    assert!(counters.given_packets.get() >= 5);
    assert_eq!(counters.given_bytes.get(), 10_000);
    assert_eq!((counters.connections_begun.get(), counters.connections_ended.get()), (1, 1));
}

#[test]
fn host_program_connects_to_the_guest() {
    let sockets = TestSockets::new();
    let mut guest = sockets.guest();
    let mut program = sockets.call(9000);
    let (header, _) = guest.next();
    assert_eq!((header.op.get(), header.dst_port.get()), (op::REQUEST, 9000));
    let ports = Ports { guest: 9000, host: header.src_port.get() };
    guest.send(op::RESPONSE, ports, &[]);
    let want = format!("OK {}\nhello", ports.host);
    guest.send(op::RW, ports, b"hello");
    let mut greeting = vec![0; want.len()];
    program.read_exact(&mut greeting).unwrap();
    assert_eq!(greeting, want.as_bytes());
    program.write_all(b"and good bye").unwrap();
    drop(program);
    assert_eq!(guest.read(ports, 12), b"and good bye");
    let (header, _) = guest.expect(op::SHUTDOWN, ports);
    assert_ne!(header.flags.get() & NO_SEND, 0);
    guest.send(op::RST, ports, &[]);
    // The guest refuses this connection.
    let mut program = sockets.call(9001);
    let (header, _) = guest.next();
    guest.send(op::RST, Ports { guest: 9001, host: header.src_port.get() }, &[]);
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    // This is not the expected greeting.
    let mut program = UnixStream::connect(sockets.uds()).unwrap();
    program.set_read_timeout(Some(TIMEOUT)).unwrap();
    program.write_all(b"GET / HTTP/1.1\r\n").unwrap();
    assert_eq!(program.read(&mut [0; 8]).unwrap_or(0), 0);
}

#[test]
fn credit_bounds_both_directions() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    let mut guest = sockets.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    // The program does not read: its socket fills, then the device's buffer, and no more is
    // accepted.
    let mut taken = 0usize;
    let mut reported = 0u32;
    let chunk = pattern(2, 4096);
    while (taken as u32).wrapping_sub(reported) + 4096 <= ROOM {
        guest.send(op::RW, ports, &chunk);
        taken += chunk.len();
        assert!(taken < 64 << 20, "the room is bounded");
        if (taken as u32).wrapping_sub(reported) + 4096 > ROOM {
            guest.send(op::CREDIT_REQUEST, ports, &[]);
            let (header, _) = guest.expect(op::CREDIT_UPDATE, ports);
            assert_eq!(header.buf_alloc.get(), ROOM);
            reported = header.fwd_cnt.get();
        }
    }
    // Now the program reads and gets all of it.
    let mut all = vec![0; taken];
    program.read_exact(&mut all).unwrap();
    assert!(all.chunks(4096).all(|c| c == chunk));
    let (header, _) = guest.expect(op::CREDIT_UPDATE, ports);
    assert!(header.fwd_cnt.get() > reported, "the guest is told by itself");
    // In the other direction, the guest says that it has room for 1,000 bytes.
    let small =
        PacketHeader { buf_alloc: 1000.into(), ..VsockGuest::packet(op::CREDIT_UPDATE, ports) };
    guest.send_header(small, &[]);
    program.write_all(&pattern(3, 3000)).unwrap();
    assert_eq!(guest.read(ports, 1000), pattern(3, 3000)[..1000]);
    guest.expect(op::CREDIT_REQUEST, ports);
    let more = PacketHeader {
        buf_alloc: 1000.into(),
        fwd_cnt: 1000.into(),
        ..VsockGuest::packet(op::CREDIT_UPDATE, ports)
    };
    guest.send_header(more, &[]);
    assert_eq!(guest.read(ports, 1000), pattern(3, 3000)[1000..2000]);
    // A guest that exceeds its credit is disconnected.
    let flood = vec![0; 60 << 10];
    for _ in 0..200 {
        guest.send(op::RW, ports, &flood);
    }
    loop {
        let (header, _) = guest.next();
        if header.op.get() == op::RST {
            break;
        }
    }
}

#[test]
fn malformed_packets_are_refused_and_bounded() {
    let sockets = TestSockets::new();
    let mut guest = sockets.guest();
    let ports = Ports { guest: 5, host: 6 };
    for op in [op::RW, op::RESPONSE, op::SHUTDOWN, op::CREDIT_REQUEST, 0, 99] {
        guest.send(op, ports, &[]);
        guest.expect(op::RST, ports);
    }
    let datagram = PacketHeader { kind: 3.into(), ..VsockGuest::packet(op::REQUEST, ports) };
    guest.send_header(datagram, &[]);
    guest.expect(op::RST, ports);
    let alien = PacketHeader { src_cid: 7.into(), ..VsockGuest::packet(op::REQUEST, ports) };
    guest.send_header(alien, &[]);
    // Refusals that the guest does not take make the device stop taking packets, until they are
    // taken.
    let heads: Vec<u16> = (0..MAX_REFUSALS as u32 + 10)
        .map(|n| {
            let header = VsockGuest::packet(op::RW, Ports { guest: n, host: 1 });
            let piece = guest.driver.readable(header.as_bytes());
            let head = guest.driver.post(TRANSMIT, &[piece]);
            guest.driver.kick(TRANSMIT);
            if (n as usize) < MAX_REFUSALS {
                guest.driver.wait_used(TRANSMIT, head);
            }
            head
        })
        .collect();
    for _ in &heads {
        let (header, _) = guest.next();
        assert_eq!(header.op.get(), op::RST);
    }
    for head in &heads[MAX_REFUSALS..] {
        guest.driver.wait_used(TRANSMIT, *head);
    }
    // Malformed packets.
    let lying = PacketHeader { len: 1.into(), ..VsockGuest::packet(op::RW, ports) };
    for (queue, bytes) in [(TRANSMIT, lying.as_bytes()), (TRANSMIT, &[0; 43][..])] {
        let piece = guest.driver.readable(bytes);
        guest.driver.post(queue, &[piece]);
        guest.driver.kick(queue);
        guest.driver.wait_stopped("a malformed packet");
        guest.driver.start(!0);
    }
    let (small, packet) = (guest.driver.writable(43), VsockGuest::packet(op::RW, ports));
    guest.driver.post(RECEIVE, &[small]);
    let piece = guest.driver.readable(packet.as_bytes());
    guest.driver.post(TRANSMIT, &[piece]);
    guest.driver.kick(TRANSMIT);
    guest.driver.wait_stopped("no room for a header");
}

#[test]
fn unanswered_connection_ends_at_its_timeout() {
    let sockets = TestSockets::new();
    let mut guest = sockets.guest();
    let began = Instant::now();
    let mut program = sockets.call(9000);
    let (header, _) = guest.next();
    assert_eq!(header.op.get(), op::REQUEST);
    let ports = Ports { guest: 9000, host: header.src_port.get() };
    // The guest does not answer a request.
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    guest.expect(op::RST, ports);
    // Nor does it end a connection whose program has ended, after the program had already shut down
    // sending.
    let listener = sockets.listen(52);
    let (ports, program) = guest.connect(&listener, 52);
    program.shutdown(Shutdown::Write).unwrap();
    let (header, _) = guest.expect(op::SHUTDOWN, ports);
    assert_eq!(header.flags.get(), NO_SEND);
    std::thread::sleep(Duration::from_millis(2500));
    guest.send(op::CREDIT_REQUEST, ports, &[]);
    guest.expect(op::CREDIT_UPDATE, ports);
    let began = Instant::now();
    drop(program);
    let (header, _) = guest.expect(op::SHUTDOWN, ports);
    assert_eq!(header.flags.get(), NO_SEND | NO_RECEIVE);
    guest.expect(op::RST, ports);
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
}
