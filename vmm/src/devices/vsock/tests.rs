//! The socket device driven through its queues, with real unix sockets on the host's side.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use zerocopy::FromBytes;

use super::connection::ROOM;
use super::packet::{NO_RECEIVE, NO_SEND};
use super::*;
use crate::devices::virtio::Transport;
use crate::devices::virtio::conformance::{self, Subject};
use crate::devices::virtio::driver::{Driver, Piece};

const CID: u32 = 42;
const GUEST_PORT: u32 = 1000;
const LONG: Duration = Duration::from_secs(20);

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn uds(&self) -> PathBuf {
        self.0.path().join("v")
    }

    fn vsock(&self) -> Vsock {
        let config = VsockConfig { cid: CID, uds: self.uds() };
        Vsock::open(&config, &Opener::start().unwrap()).unwrap()
    }

    fn guest(&self) -> Guest {
        let mut vsock = self.vsock();
        vsock.acquire().unwrap();
        Guest::new(Driver::started(Box::new(vsock)))
    }

    fn listen(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.0.path().join(format!("v_{port}"))).unwrap()
    }

    /// A program of the host that has asked for `port`.
    fn call(&self, port: u32) -> UnixStream {
        let mut stream = UnixStream::connect(self.uds()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        stream
    }
}

/// The guest's side: packets, through the queues.
struct Guest {
    driver: Driver,
}

impl Guest {
    fn new(driver: Driver) -> Self {
        Self { driver }
    }

    fn packet(op: u16, ports: Ports) -> Header {
        Header {
            src_cid: u64::from(CID).into(),
            dst_cid: HOST_CID.into(),
            src_port: ports.guest.into(),
            dst_port: ports.host.into(),
            kind: STREAM.into(),
            op: op.into(),
            buf_alloc: (256 << 10).into(),
            ..Header::default()
        }
    }

    fn send_header(&mut self, header: Header, data: &[u8]) {
        let header = Header { len: (data.len() as u32).into(), ..header };
        let mut pieces = vec![self.driver.given(header.as_bytes())];
        if !data.is_empty() {
            pieces.push(self.driver.given(data));
        }
        self.driver.request(TRANSMIT, &pieces);
        self.driver.forget_buffers();
    }

    fn send(&mut self, op: u16, ports: Ports, data: &[u8]) {
        self.send_header(Self::packet(op, ports), data);
    }

    /// The next packet for the guest.
    #[track_caller]
    fn next(&mut self) -> (Header, Vec<u8>) {
        let room = self.driver.wanted((HEADER + 4096) as u32);
        let head = self.driver.post(RECEIVE, &[room]);
        self.driver.kick(RECEIVE);
        let len = self.driver.wait_used(RECEIVE, head) as usize;
        let bytes = self.driver.bytes(room);
        let (header, _) = Header::read_from_prefix(&bytes).unwrap();
        assert_eq!(len, HEADER + header.len.get() as usize);
        assert_eq!((header.src_cid.get(), header.dst_cid.get()), (HOST_CID, u64::from(CID)));
        (header, bytes[HEADER..len].to_vec())
    }

    #[track_caller]
    fn expect(&mut self, op: u16, ports: Ports) -> (Header, Vec<u8>) {
        let (mut header, mut data) = self.next();
        // These may come at any time.
        while header.op.get() == op::CREDIT_UPDATE && op != op::CREDIT_UPDATE {
            (header, data) = self.next();
        }
        let of = Ports { guest: header.dst_port.get(), host: header.src_port.get() };
        assert_eq!((header.op.get(), of), (op, ports), "{header:?}");
        (header, data)
    }

    /// Data up to `len` bytes.
    #[track_caller]
    fn read(&mut self, ports: Ports, len: usize) -> Vec<u8> {
        let mut all = Vec::new();
        while all.len() < len {
            all.extend(self.expect(op::RW, ports).1);
        }
        all
    }

    /// Connects to a program of the host that listens.
    #[track_caller]
    fn connect(&mut self, listener: &UnixListener, port: u32) -> (Ports, UnixStream) {
        let ports = Ports { guest: GUEST_PORT, host: port };
        self.send(op::REQUEST, ports, &[]);
        self.expect(op::RESPONSE, ports);
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        (ports, stream)
    }
}

fn pattern(n: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 11 + n * 3) as u8).collect()
}

#[test]
fn it_keeps_the_laws_of_devices() {
    let place = Place::new();
    conformance::check(&Subject {
        make: &|| Box::new(place.vsock()),
        queue: TRANSMIT,
        // One that is not answered: what it is about does not exist.
        request: &|driver, n| {
            let ports = Ports { guest: n as u32, host: 1 };
            let header = Guest::packet(op::RST, ports);
            vec![driver.given(&header.as_bytes()[..30]), driver.given(&header.as_bytes()[30..])]
        },
    });
}

#[test]
fn it_keeps_the_laws_of_devices_receiving() {
    let place = Place::new();
    conformance::check(&Subject {
        make: &|| Box::new(place.vsock()),
        queue: RECEIVE,
        // What a packet about nothing brings about: a refusal, which goes there.
        request: &|driver, n| {
            let header = Guest::packet(op::RW, Ports { guest: n as u32, host: 1 });
            let packet = driver.given(header.as_bytes());
            driver.post(TRANSMIT, &[packet]);
            driver.kick(TRANSMIT);
            vec![driver.wanted(20), driver.wanted(100)]
        },
    });
}

#[test]
fn all_that_it_gives_the_guest_is_marked() {
    let place = Place::new();
    let listener = place.listen(52);
    let mut guest = place.guest();
    let (_, mut program) = guest.connect(&listener, 52);
    let bytes = pattern(5, 9000);
    let mut rooms = Vec::new();
    let frames = conformance::writes_are_marked(&mut guest.driver, |driver| {
        program.write_all(&bytes).unwrap();
        rooms.extend([2000, 8000].map(|len| driver.wanted(HEADER as u32 + len)));
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
    let moved = Transport::spawn("moved", Box::new(place.vsock()), ram).unwrap();
    moved.restore(state).unwrap();
    guest.driver = guest.driver.moved_to(moved);
    let mut event = None;
    let frames = conformance::writes_are_marked(&mut guest.driver, |driver| {
        // Not the zeros that an event is.
        let room = driver.given(&[0xff; 4]);
        event = Some(room.addr);
        vec![(EVENT, driver.post(EVENT, &[Piece { writable: true, ..room }]))]
    });
    assert!(frames.contains(&(event.unwrap() / 4096)));
}

#[test]
fn buffers_without_room_for_data_stop_the_device() {
    let place = Place::new();
    let listener = place.listen(52);
    let mut guest = place.guest();
    let (_ports, mut program) = guest.connect(&listener, 52);
    program.write_all(b"there is something to read").unwrap();
    for _ in 0..4 {
        let room = guest.driver.wanted(HEADER as u32);
        guest.driver.post(RECEIVE, &[room]);
    }
    guest.driver.kick(RECEIVE);
    guest.driver.wait_stopped("no room for data");
}

#[test]
fn a_guest_that_does_not_answer_is_waited_for_so_long_and_no_longer() {
    let place = Place::new();
    let mut guest = place.guest();
    let began = Instant::now();
    let mut program = place.call(9000);
    let (header, _) = guest.next();
    assert_eq!(header.op.get(), op::REQUEST);
    let ports = Ports { guest: 9000, host: header.src_port.get() };
    // It says nothing to a request.
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    guest.expect(op::RST, ports);
    // Nor when the program is gone that it has spoken to, which had said before that it sends no more.
    let listener = place.listen(52);
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

#[test]
fn a_program_that_goes_during_a_pause_is_missed() {
    let place = Place::new();
    let listener = place.listen(52);
    let mut guest = place.guest();
    let (ports, program) = guest.connect(&listener, 52);
    program.shutdown(Shutdown::Write).unwrap();
    guest.expect(op::SHUTDOWN, ports);
    guest.driver.quiesce();
    drop(program);
    std::thread::sleep(Duration::from_millis(20));
    guest.driver.transport.resume();
    let (header, _) = guest.expect(op::SHUTDOWN, ports);
    assert_eq!(header.flags.get(), NO_SEND | NO_RECEIVE);
}

#[test]
fn connections_leave_files_for_the_rest_of_the_process() {
    let most = [0, 256, 300, 1024, 4096, u64::MAX].map(most_connections);
    assert_eq!(most, [16, 16, 44, 768, 1024, 1024]);
}

/// Milliseconds that this process's threads have used of the processor. It needs a file to read that.
fn cpu_ms() -> u64 {
    let used = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.unwrap().path().join("schedstat")).unwrap();
        stat.split(' ').next().unwrap().parse::<u64>().unwrap() / 1_000_000
    };
    std::fs::read_dir("/proc/self/task").unwrap().map(used).sum()
}

#[test]
fn a_process_without_a_file_left_waits_and_does_not_spin() {
    const TEST: &str = "a_process_without_a_file_left_waits_and_does_not_spin";
    // In a process of its own: it leaves no file for other tests.
    if std::env::var_os("NO_FILES_LEFT").is_none() {
        let me = std::env::current_exe().unwrap();
        let name = format!("devices::vsock::tests::{TEST}");
        let out = std::process::Command::new(me)
            .args(["--exact", &name, "--nocapture"])
            .env("NO_FILES_LEFT", "1")
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(String::from_utf8_lossy(&out.stdout).contains("1 passed"));
        return;
    }
    let place = Place::new();
    let mut guest = place.guest();
    let mut program = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    )
    .map(UnixStream::from)
    .unwrap();
    let limit = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let mut files = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        files.push(file);
    }
    let door = rustix::net::SocketAddrUnix::new(place.uds()).unwrap();
    rustix::net::connect(&program, &door).unwrap();
    program.write_all(b"CONNECT 7\n").unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    drop(files);
    let used = cpu_ms();
    assert!(used < 1000, "{used} ms of 2,500");
    let (header, _) = guest.next();
    assert_eq!((header.op.get(), header.dst_port.get()), (op::REQUEST, 7));
}

#[test]
fn the_guest_reaches_a_program_of_the_host() {
    let place = Place::new();
    let listener = place.listen(52);
    let mut guest = place.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    guest.send(op::RW, ports, b"a question");
    let mut bytes = [0; 10];
    program.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"a question");
    program.write_all(&pattern(1, 10_000)).unwrap();
    assert_eq!(guest.read(ports, 10_000), pattern(1, 10_000));
    // The program is through; the guest still sends.
    program.shutdown(Shutdown::Write).unwrap();
    let (header, _) = guest.expect(op::SHUTDOWN, ports);
    assert_eq!(header.flags.get(), NO_SEND);
    guest.send(op::RW, ports, b"last words");
    program.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"last words");
    let over =
        Header { flags: (NO_SEND | NO_RECEIVE).into(), ..Guest::packet(op::SHUTDOWN, ports) };
    guest.send_header(over, &[]);
    guest.expect(op::RST, ports);
    assert_eq!(program.read(&mut bytes).unwrap(), 0);
    // Nobody there.
    let nobody = Ports { guest: 7, host: 53 };
    guest.send(op::REQUEST, nobody, &[]);
    guest.expect(op::RST, nobody);
}

#[test]
fn a_program_of_the_host_reaches_the_guest() {
    let place = Place::new();
    let mut guest = place.guest();
    let mut program = place.call(9000);
    let (header, _) = guest.next();
    assert_eq!((header.op.get(), header.dst_port.get()), (op::REQUEST, 9000));
    let ports = Ports { guest: 9000, host: header.src_port.get() };
    guest.send(op::RESPONSE, ports, &[]);
    let want = format!("OK {}\nhello", ports.host);
    guest.send(op::RW, ports, b"hello");
    let mut said = vec![0; want.len()];
    program.read_exact(&mut said).unwrap();
    assert_eq!(said, want.as_bytes());
    program.write_all(b"and good bye").unwrap();
    drop(program);
    assert_eq!(guest.read(ports, 12), b"and good bye");
    let (header, _) = guest.expect(op::SHUTDOWN, ports);
    assert_ne!(header.flags.get() & NO_SEND, 0);
    guest.send(op::RST, ports, &[]);
    // Refused by the guest.
    let mut program = place.call(9001);
    let (header, _) = guest.next();
    guest.send(op::RST, Ports { guest: 9001, host: header.src_port.get() }, &[]);
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    // Not the greeting that is asked for.
    let mut program = UnixStream::connect(place.uds()).unwrap();
    program.set_read_timeout(Some(LONG)).unwrap();
    program.write_all(b"GET / HTTP/1.1\r\n").unwrap();
    assert_eq!(program.read(&mut [0; 8]).unwrap_or(0), 0);
}

#[test]
fn neither_side_gets_more_than_it_has_room_for() {
    let place = Place::new();
    let listener = place.listen(52);
    let mut guest = place.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    // The program does not read: its socket fills, then the device's room, and no more.
    let mut taken = 0usize;
    let mut told = 0u32;
    let chunk = pattern(2, 4096);
    while (taken as u32).wrapping_sub(told) + 4096 <= ROOM {
        guest.send(op::RW, ports, &chunk);
        taken += chunk.len();
        assert!(taken < 64 << 20, "the room is bounded");
        if (taken as u32).wrapping_sub(told) + 4096 > ROOM {
            guest.send(op::CREDIT_REQUEST, ports, &[]);
            let (header, _) = guest.expect(op::CREDIT_UPDATE, ports);
            assert_eq!(header.buf_alloc.get(), ROOM);
            told = header.fwd_cnt.get();
        }
    }
    // Now it does, and gets all of it.
    let mut all = vec![0; taken];
    program.read_exact(&mut all).unwrap();
    assert!(all.chunks(4096).all(|c| c == chunk));
    let (header, _) = guest.expect(op::CREDIT_UPDATE, ports);
    assert!(header.fwd_cnt.get() > told, "the guest is told by itself");
    // The other way: the guest says that it has room for 1,000 bytes.
    let small = Header { buf_alloc: 1000.into(), ..Guest::packet(op::CREDIT_UPDATE, ports) };
    guest.send_header(small, &[]);
    program.write_all(&pattern(3, 3000)).unwrap();
    assert_eq!(guest.read(ports, 1000), pattern(3, 3000)[..1000]);
    guest.expect(op::CREDIT_REQUEST, ports);
    let more = Header {
        buf_alloc: 1000.into(),
        fwd_cnt: 1000.into(),
        ..Guest::packet(op::CREDIT_UPDATE, ports)
    };
    guest.send_header(more, &[]);
    assert_eq!(guest.read(ports, 1000), pattern(3, 3000)[1000..2000]);
    // A guest that sends more than it may is cut off.
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
fn packets_of_no_sense_are_refused_and_bounded() {
    let place = Place::new();
    let mut guest = place.guest();
    let ports = Ports { guest: 5, host: 6 };
    for op in [op::RW, op::RESPONSE, op::SHUTDOWN, op::CREDIT_REQUEST, 0, 99] {
        guest.send(op, ports, &[]);
        guest.expect(op::RST, ports);
    }
    let datagram = Header { kind: 3.into(), ..Guest::packet(op::REQUEST, ports) };
    guest.send_header(datagram, &[]);
    guest.expect(op::RST, ports);
    let alien = Header { src_cid: 7.into(), ..Guest::packet(op::REQUEST, ports) };
    guest.send_header(alien, &[]);
    // Refusals that nobody takes: the device stops taking packets, and goes on once they are taken.
    let heads: Vec<u16> = (0..MAX_REFUSALS as u32 + 10)
        .map(|n| {
            let header = Guest::packet(op::RW, Ports { guest: n, host: 1 });
            let piece = guest.driver.given(header.as_bytes());
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
    // Of no form.
    let lying = Header { len: 1.into(), ..Guest::packet(op::RW, ports) };
    for (queue, bytes) in [(TRANSMIT, lying.as_bytes()), (TRANSMIT, &[0; 43][..])] {
        let piece = guest.driver.given(bytes);
        guest.driver.post(queue, &[piece]);
        guest.driver.kick(queue);
        guest.driver.wait_stopped("a packet of no form");
        guest.driver.start(!0);
    }
    let (small, nobody) = (guest.driver.wanted(43), Guest::packet(op::RW, ports));
    guest.driver.post(RECEIVE, &[small]);
    let piece = guest.driver.given(nobody.as_bytes());
    guest.driver.post(TRANSMIT, &[piece]);
    guest.driver.kick(TRANSMIT);
    guest.driver.wait_stopped("no room for a header");
}

#[test]
fn after_a_move_the_guest_hears_that_its_connections_are_gone() {
    let place = Place::new();
    let listener = place.listen(52);
    let mut guest = place.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    guest.driver.quiesce();
    // A pause alone changes nothing.
    guest.driver.transport.resume();
    guest.send(op::RW, ports, b"x");
    program.read_exact(&mut [0]).unwrap();
    guest.driver.quiesce();
    let state = guest.driver.transport.save().unwrap();
    guest.driver.transport.release().unwrap();
    let mut vsock = place.vsock();
    vsock.acquire().unwrap();
    let ram = guest.driver.memory.ram().clone();
    let moved = Transport::spawn("moved", Box::new(vsock), ram).unwrap();
    moved.restore(state.clone()).unwrap();
    assert_eq!(moved.save().unwrap(), state);
    guest.driver = guest.driver.moved_to(moved);
    assert_eq!(program.read(&mut [0]).unwrap(), 0, "the old host's end is closed");
    guest.driver.transport.resume();
    let room = guest.driver.wanted(4);
    assert_eq!(guest.driver.request(EVENT, &[room]), 4);
    assert_eq!(guest.driver.bytes(room), TRANSPORT_RESET.to_le_bytes());
    let (ports, mut program) = guest.connect(&listener, 52);
    guest.send(op::RW, ports, b"y");
    program.read_exact(&mut [0]).unwrap();
}

#[test]
fn nothing_is_lost_to_a_pause() {
    let place = Place::new();
    let listener = place.listen(52);
    let mut guest = place.guest();
    let (ports, mut program) = guest.connect(&listener, 52);
    for n in 0..100 {
        program.write_all(&[n]).unwrap();
        guest.driver.quiesce();
        guest.driver.transport.resume();
        assert_eq!(guest.expect(op::RW, ports).1, [n]);
        guest.driver.forget_buffers();
    }
    let mut caller = UnixStream::connect(place.uds()).unwrap();
    for byte in b"CONNECT 9\n" {
        caller.write_all(&[*byte]).unwrap();
        guest.driver.quiesce();
        guest.driver.transport.resume();
    }
    assert_eq!(guest.next().0.op.get(), op::REQUEST);
}

#[test]
fn the_socket_is_one_devices_and_goes_with_it() {
    let place = Place::new();
    let (mut a, mut b) = (place.vsock(), place.vsock());
    assert!(!place.uds().exists(), "looking leaves nothing behind");
    a.acquire().unwrap();
    assert!(b.acquire().unwrap_err().contains("in use"));
    a.release().unwrap();
    assert!(!place.uds().exists());
    b.acquire().unwrap();
    let nowhere = VsockConfig { cid: 3, uds: "/nonexistent-dl/v".into() };
    let said = Vsock::open(&nowhere, &Opener::start().unwrap()).err().unwrap().to_string();
    assert!(said.contains("/nonexistent-dl/v"), "{said}");
}
