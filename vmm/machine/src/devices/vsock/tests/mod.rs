//! The socket device driven through its queues, with real unix sockets on the host's side.

mod bounds;
mod connections;
mod files;
mod laws;
mod moves;
mod resets;
mod shared;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use zerocopy::FromBytes;

use super::connection::ROOM;
use super::packet::{NO_RECEIVE, NO_SEND};
use super::*;
use crate::devices::error::DeviceError;
use crate::devices::virtio::DriverBuffer;
use crate::devices::virtio::conformance::{self, TestedDevice};
use crate::devices::virtio::driver::Driver;
use crate::devices::virtio::{Device, DeviceKind, QuiesceError, Transport};
use driftline_guest::NextHost;

const CID: u32 = 42;
const GUEST_PORT: u32 = 1000;
const TIMEOUT: Duration = Duration::from_secs(20);

struct TestSockets(TempDir);

impl TestSockets {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn uds(&self) -> PathBuf {
        self.0.path().join("v")
    }

    fn vsock(&self) -> Vsock {
        let config = VsockConfig { cid: CID, uds: self.uds() };
        Vsock::open(&config, None, &Opener::start().unwrap()).unwrap()
    }

    fn guest(&self) -> VsockGuest {
        let mut vsock = self.vsock();
        vsock.acquire(NextHost::Another).unwrap();
        VsockGuest::new(Driver::started(Box::new(vsock)))
    }

    fn listen(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.0.path().join(format!("v_{port}"))).unwrap()
    }

    /// Returns a program of the host that has requested `port`.
    fn call(&self, port: u32) -> UnixStream {
        let mut stream = UnixStream::connect(self.uds()).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        stream
    }
}

/// The guest's side: sends and receives packets through the queues.
struct VsockGuest {
    driver: Driver,
}

impl VsockGuest {
    fn new(driver: Driver) -> Self {
        Self { driver }
    }

    fn packet(op: u16, ports: Ports) -> PacketHeader {
        PacketHeader {
            src_cid: u64::from(CID).into(),
            dst_cid: HOST_CID.into(),
            src_port: ports.guest.into(),
            dst_port: ports.host.into(),
            kind: STREAM.into(),
            op: op.into(),
            buf_alloc: (256 << 10).into(),
            ..PacketHeader::default()
        }
    }

    fn send_header(&mut self, header: PacketHeader, data: &[u8]) {
        let header = PacketHeader { len: (data.len() as u32).into(), ..header };
        let mut pieces = vec![self.driver.readable(header.as_bytes())];
        if !data.is_empty() {
            pieces.push(self.driver.readable(data));
        }
        self.driver.request(TRANSMIT, &pieces);
        self.driver.forget_buffers();
    }

    fn send(&mut self, op: u16, ports: Ports, data: &[u8]) {
        self.send_header(Self::packet(op, ports), data);
    }

    /// Returns the next packet for the guest.
    #[track_caller]
    fn next(&mut self) -> (PacketHeader, Vec<u8>) {
        let room = self.driver.writable((HEADER + 4096) as u32);
        let head = self.driver.post(RECEIVE, &[room]);
        self.driver.kick(RECEIVE);
        let len = self.driver.wait_used(RECEIVE, head) as usize;
        let bytes = self.driver.bytes(room);
        let (header, _) = PacketHeader::read_from_prefix(&bytes).unwrap();
        assert_eq!(len, HEADER + header.len.get() as usize);
        assert_eq!((header.src_cid.get(), header.dst_cid.get()), (HOST_CID, u64::from(CID)));
        (header, bytes[HEADER..len].to_vec())
    }

    #[track_caller]
    fn expect(&mut self, op: u16, ports: Ports) -> (PacketHeader, Vec<u8>) {
        let (mut header, mut data) = self.next();
        // Credit updates may arrive at any time.
        while header.op.get() == op::CREDIT_UPDATE && op != op::CREDIT_UPDATE {
            (header, data) = self.next();
        }
        let of = Ports { guest: header.dst_port.get(), host: header.src_port.get() };
        assert_eq!((header.op.get(), of), (op, ports), "{header:?}");
        (header, data)
    }

    /// Reads data until `len` bytes have arrived.
    #[track_caller]
    fn read(&mut self, ports: Ports, len: usize) -> Vec<u8> {
        let mut all = Vec::new();
        while all.len() < len {
            all.extend(self.expect(op::RW, ports).1);
        }
        all
    }

    /// Connects to a listening program of the host.
    #[track_caller]
    fn connect(&mut self, listener: &UnixListener, port: u32) -> (Ports, UnixStream) {
        let ports = Ports { guest: GUEST_PORT, host: port };
        self.send(op::REQUEST, ports, &[]);
        self.expect(op::RESPONSE, ports);
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        (ports, stream)
    }
}

/// Moves the guest to another host, whose device is paused.
fn moved(sockets: &TestSockets, mut guest: VsockGuest) -> VsockGuest {
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
    guest
}

fn pattern(n: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 11 + n * 3) as u8).collect()
}
