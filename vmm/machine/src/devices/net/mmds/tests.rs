//! Tests in which a guest with a TCP/IP stack sends requests to the service, frame by frame and
//! with a simulated clock.

mod segments;

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::time::Duration;

use serde_json::{Value, json};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpCidr};

use super::connection::{MAX_REQUEST, MmdsConnection};
use super::frames::{ETHERNET, SERVICE_MAC};
use super::http::ReadRequest;
use super::stack::{EVICTION_LIMIT, IDLE_LIMIT, MAX_CONNECTIONS, MAX_WAITING, MmdsStack};
use crate::config::{MetadataVersion, NetMetadata};
use crate::metadata::MetadataStore;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// MTU of the service's interface.
const MTU: u16 = 1400;
/// Most rounds of frames in both directions for one thing to happen.
const MAX_ROUNDS: usize = 10_000;

/// The guest's network device.
#[derive(Default)]
struct GuestDevice {
    incoming: VecDeque<Vec<u8>>,
    outgoing: VecDeque<Vec<u8>>,
}

struct TestIncoming(Vec<u8>);

struct TestOutgoing<'d>(&'d mut VecDeque<Vec<u8>>);

impl Device for GuestDevice {
    type RxToken<'a> = TestIncoming;
    type TxToken<'a> = TestOutgoing<'a>;

    fn receive(&mut self, _: Instant) -> Option<(TestIncoming, TestOutgoing<'_>)> {
        Some((TestIncoming(self.incoming.pop_front()?), TestOutgoing(&mut self.outgoing)))
    }

    fn transmit(&mut self, _: Instant) -> Option<TestOutgoing<'_>> {
        Some(TestOutgoing(&mut self.outgoing))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        capabilities
    }
}

impl RxToken for TestIncoming {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(&self.0)
    }
}

impl TxToken for TestOutgoing<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, fill: F) -> R {
        let mut frame = vec![0; len];
        let result = fill(&mut frame);
        self.0.push_back(frame);
        result
    }
}

/// A guest and the service, with the time of both.
struct TestLink {
    stack: MmdsStack,
    store: MetadataStore,
    device: GuestDevice,
    interface: Interface,
    sockets: SocketSet<'static>,
    now: Duration,
    /// The service's frames.
    frames: Vec<Vec<u8>>,
    /// Of the service's frames, one in this many is lost.
    loses_one_in: Option<usize>,
    next_port: u16,
}

impl TestLink {
    fn new(version: MetadataVersion, value: Value) -> Self {
        let store = MetadataStore::default();
        store.put(value).unwrap();
        let config = NetMetadata { address: ADDRESS, version, imds_compat: false };
        let stack = MmdsStack::new(config, MTU, store.clone(), 7);
        let mut device = GuestDevice::default();
        let own = Config::new(EthernetAddress(GUEST_MAC).into());
        let mut interface = Interface::new(own, &mut device, Instant::ZERO);
        let address = IpCidr::new(Ipv4Addr::new(169, 254, 1, 1).into(), 16);
        interface.update_ip_addrs(|addresses| addresses.push(address).unwrap());
        let sockets = SocketSet::new(Vec::new());
        let (now, frames, loses_one_in) = (Duration::ZERO, Vec::new(), None);
        let next_port = 50_000;
        Self { stack, store, device, interface, sockets, now, frames, loses_one_in, next_port }
    }

    fn connect(&mut self) -> SocketHandle {
        let buffer = || SocketBuffer::new(vec![0; 65_535]);
        let mut tcp = Socket::new(buffer(), buffer());
        self.next_port += 1;
        tcp.connect(self.interface.context(), (ADDRESS, 80), self.next_port).unwrap();
        self.sockets.add(tcp)
    }

    fn tcp(&mut self, handle: SocketHandle) -> &mut Socket<'static> {
        self.sockets.get_mut(handle)
    }

    /// Exchanges all frames that there are now. Returns whether there were any.
    fn exchange(&mut self) -> bool {
        let at = Instant::from_micros(self.now.as_micros() as i64);
        self.interface.poll(at, &mut self.device, &mut self.sockets);
        let mut any = false;
        while let Some(frame) = self.device.outgoing.pop_front() {
            assert!(self.stack.take(&frame, self.now), "it is for the service");
            any = true;
        }
        while let Some(frame) = self.stack.next_frame(self.now) {
            self.frames.push(frame.clone());
            let is_lost = |n| self.frames.len().is_multiple_of(n);
            if !self.loses_one_in.is_some_and(is_lost) {
                self.device.incoming.push_back(frame);
            }
            any = true;
        }
        any
    }

    /// Lets time pass when nothing happens, until `done`.
    fn run(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        for _ in 0..MAX_ROUNDS {
            if done(self) {
                return;
            }
            if !self.exchange() {
                self.wait(Duration::from_millis(20));
            }
        }
        panic!("it does not happen");
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        self.stack.tick(self.now);
    }

    /// Sends `request` and receives until the service has closed the connection, or until the
    /// answer has as many bytes as its head says.
    fn ask_on(&mut self, handle: SocketHandle, request: &str) -> String {
        self.run(|link| link.tcp(handle).may_send());
        assert_eq!(self.tcp(handle).send_slice(request.as_bytes()), Ok(request.len()));
        let mut answer = Vec::new();
        self.run(|link| {
            let tcp = link.tcp(handle);
            while tcp.can_recv() {
                tcp.recv(|bytes| (bytes.len(), answer.extend(&*bytes))).unwrap();
            }
            is_whole(&answer) || !tcp.may_recv()
        });
        String::from_utf8(answer).unwrap()
    }

    fn ask(&mut self, request: &str) -> String {
        let handle = self.connect();
        let answer = self.ask_on(handle, request);
        self.tcp(handle).close();
        self.run(|link| {
            !link.tcp(handle).is_active() || link.tcp(handle).state() == State::TimeWait
        });
        answer
    }
}

fn is_whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    length.is_some_and(|length| length.parse() == Ok(body.len()))
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}

#[test]
fn guest_reads_a_value_with_its_token() {
    let mut link = TestLink::new(MetadataVersion::V2, json!({ "a": { "b": "text" } }));
    let refused = link.ask("GET /a/b HTTP/1.1\r\n\r\n");
    assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
    let session =
        link.ask("PUT /latest/api/token HTTP/1.1\r\nX-metadata-token-ttl-seconds: 60\r\n\r\n");
    let get = format!("GET /a/b HTTP/1.1\r\nX-metadata-token: {}\r\n\r\n", body(&session));
    assert_eq!(body(&link.ask(&get)), "text");
    assert!(link.frames.iter().all(|frame| frame[..12] == [GUEST_MAC, SERVICE_MAC].concat()));
    assert_eq!(link.frames[0][12..14], [8, 6], "ARP comes first");
    let counts = link.store.counts();
    assert_eq!((counts.connections_begun, counts.connections_ended), (3, 3));
    assert_eq!(counts.given_frames, link.frames.len() as u64);
    assert_eq!(counts.made_frames, counts.given_frames);
    assert_eq!((counts.bad_packets, counts.other_packets), (0, 0));
}

#[test]
fn large_value_comes_in_segments() {
    for loses_one_in in [None, Some(5)] {
        let value: String = (0..40_000).map(|i| char::from(b'a' + (i % 23) as u8)).collect();
        let mut link = TestLink::new(MetadataVersion::V1, json!({ "a": value.clone() }));
        link.loses_one_in = loses_one_in;
        let answer = link.ask("GET /a HTTP/1.1\r\n\r\n");
        assert_eq!(body(&answer), value);
        let most = ETHERNET + usize::from(MTU);
        assert_eq!(link.frames.iter().map(Vec::len).max(), Some(most));
    }
}

#[test]
fn connection_answers_one_request_after_another() {
    let mut link = TestLink::new(MetadataVersion::V1, json!({ "a": "x", "b": "y" }));
    let handle = link.connect();
    for (path, value) in [("/a", "x"), ("/b", "y"), ("/a", "x")] {
        let answer = link.ask_on(handle, &format!("GET {path} HTTP/1.1\r\n\r\n"));
        assert_eq!(body(&answer), value);
    }
    let both = "GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\nConnection: close\r\n\r\n";
    assert_eq!(link.tcp(handle).send_slice(both.as_bytes()), Ok(both.len()));
    let mut answers = Vec::new();
    link.run(|link| {
        let tcp = link.tcp(handle);
        while tcp.can_recv() {
            tcp.recv(|bytes| (bytes.len(), answers.extend(&*bytes))).unwrap();
        }
        !tcp.may_recv()
    });
    let answers = String::from_utf8(answers).unwrap();
    assert!(answers.contains("\r\n\r\nxHTTP/1.1 200 ") && answers.ends_with("\r\n\r\ny"));
}

#[test]
fn request_without_an_end_is_reset() {
    let mut link = TestLink::new(MetadataVersion::V1, json!({}));
    let handle = link.connect();
    let answer = link.ask_on(handle, &format!("GET /{}", "x".repeat(MAX_REQUEST)));
    assert_eq!(answer, "");
    link.run(|link| link.tcp(handle).state() == State::Closed);
    assert_eq!(link.stack.open_connections(), 0);
}

#[test]
fn half_a_request_ends_with_its_connection() {
    let mut link = TestLink::new(MetadataVersion::V1, json!({}));
    let handle = link.connect();
    link.run(|link| link.tcp(handle).may_send());
    link.tcp(handle).send_slice(b"GET / HT").unwrap();
    link.tcp(handle).close();
    link.run(|link| link.stack.open_connections() == 0);
}

#[test]
fn number_of_connections_is_bounded() {
    let mut link = TestLink::new(MetadataVersion::V1, json!({ "a": "x" }));
    let all: Vec<_> = (0..MAX_CONNECTIONS).map(|_| link.connect()).collect();
    link.run(|link| all.iter().all(|&handle| link.tcp(handle).may_send()));
    assert_eq!(link.stack.open_connections(), MAX_CONNECTIONS);
    let refused = link.connect();
    link.run(|link| link.tcp(refused).state() == State::Closed);
    assert_eq!(link.stack.open_connections(), MAX_CONNECTIONS);
    link.wait(EVICTION_LIMIT);
    // The one that is used stays.
    assert_eq!(body(&link.ask_on(all[0], "GET /a HTTP/1.1\r\n\r\n")), "x");
    assert_eq!(body(&link.ask("GET /a HTTP/1.1\r\n\r\n")), "x");
    assert_eq!(body(&link.ask_on(all[0], "GET /a HTTP/1.1\r\n\r\n")), "x");
    let ended = all.iter().filter(|&&handle| link.tcp(handle).state() == State::Closed);
    assert_eq!(ended.count(), 1);
}

#[test]
fn idle_connection_ends() {
    let mut link = TestLink::new(MetadataVersion::V1, json!({ "a": "x" }));
    let handle = link.connect();
    assert_eq!(body(&link.ask_on(handle, "GET /a HTTP/1.1\r\n\r\n")), "x");
    link.run(|link| !link.exchange());
    let due = link.stack.due_in(link.now).unwrap();
    assert!(due <= IDLE_LIMIT && due > IDLE_LIMIT - Duration::from_secs(1), "{due:?}");
    link.wait(due - Duration::from_millis(1));
    assert_eq!(link.stack.open_connections(), 1);
    link.wait(Duration::from_millis(1));
    assert_eq!(link.stack.open_connections(), 0);
    assert_eq!(link.stack.due_in(link.now), None);
    link.run(|link| link.tcp(handle).state() == State::Closed);
}

#[test]
fn pause_is_not_idle_time() {
    let mut link = TestLink::new(MetadataVersion::V1, json!({ "a": "x" }));
    let handle = link.connect();
    assert_eq!(body(&link.ask_on(handle, "GET /a HTTP/1.1\r\n\r\n")), "x");
    link.now += 2 * IDLE_LIMIT;
    link.stack.resume(link.now);
    link.wait(Duration::ZERO);
    assert_eq!(body(&link.ask_on(handle, "GET /a HTTP/1.1\r\n\r\n")), "x");
    link.run(|link| !link.exchange());
    link.wait(IDLE_LIMIT);
    assert_eq!(link.stack.open_connections(), 0);
}

/// The service's answer is what the test's own connection receives.
#[test]
fn partial_request_is_read_once() {
    let mut link = TestLink::new(MetadataVersion::V1, json!({ "a": "x", "b": "y" }));
    let handle = link.connect();
    link.run(|link| link.tcp(handle).may_send());
    let mut connection = MmdsConnection::new(handle);
    let mut lengths = Vec::new();
    for path in ["/a", "/b"] {
        link.tcp(handle).send_slice(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes()).unwrap();
        link.run(|link| link.tcp(handle).can_recv());
        for _ in 0..3 {
            let now = link.now;
            connection.exchange(link.tcp(handle), now, |bytes| {
                lengths.push(bytes.len());
                ReadRequest::Partial
            });
        }
    }
    assert!(lengths.len() == 2 && lengths[0] < lengths[1], "{lengths:?}");
}

#[test]
fn waiting_frames_are_bounded() {
    let value = "v".repeat(50_000);
    let mut link = TestLink::new(MetadataVersion::V1, json!({ "a": value.clone() }));
    let all: Vec<_> = (0..MAX_CONNECTIONS).map(|_| link.connect()).collect();
    link.run(|link| all.iter().all(|&handle| link.tcp(handle).may_send()));
    for &handle in &all {
        link.tcp(handle).send_slice(b"GET /a HTTP/1.1\r\n\r\n").unwrap();
    }
    link.interface.poll(Instant::from_millis(1), &mut link.device, &mut link.sockets);
    while let Some(frame) = link.device.outgoing.pop_front() {
        assert!(link.stack.take(&frame, link.now));
    }
    assert_eq!(link.stack.waiting_frames(), MAX_WAITING);
    // Nothing is lost: each connection gets its answer once the guest takes frames again.
    for &handle in &all {
        let mut answer = Vec::new();
        link.run(|link| {
            let tcp = link.tcp(handle);
            while tcp.can_recv() {
                tcp.recv(|bytes| (bytes.len(), answer.extend(&*bytes))).unwrap();
            }
            is_whole(&answer)
        });
        assert!(answer.ends_with(value.as_bytes()));
    }
}

#[test]
fn reset_forgets_connections_and_frames() {
    let mut link = TestLink::new(MetadataVersion::V1, json!({ "a": "x" }));
    let handle = link.connect();
    assert_eq!(body(&link.ask_on(handle, "GET /a HTTP/1.1\r\n\r\n")), "x");
    link.stack.reset();
    assert_eq!((link.stack.open_connections(), link.stack.waiting_frames()), (0, 0));
    let counts = link.store.counts();
    assert_eq!((counts.connections_begun, counts.connections_ended), (1, 1));
    // The guest learns it at its next request, and may begin again.
    assert_eq!(link.ask_on(handle, "GET /a HTTP/1.1\r\n\r\n"), "");
    assert_eq!(body(&link.ask("GET /a HTTP/1.1\r\n\r\n")), "x");
}
