//! Tests that drive the interface through its queues, over sockets instead of a tap.

mod limits;
mod metadata;
mod moves;
mod opened;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_mmio::*;

use super::*;
use crate::config::{MacAddr, NetLimits};
use crate::devices::stats::{DeviceStats, StatsHandle};
use crate::devices::virtio::DriverBuffer;
use crate::devices::virtio::conformance::{self, TestedDevice};
use crate::devices::virtio::driver::Driver;
use crate::devices::virtio::{Transport, VirtioState};
use driftline_guest::NextHost;

const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 7]);

/// The network behind the tap: a socket for each queue pair.
struct TestNetwork {
    ours: Vec<UnixDatagram>,
    taps: Vec<File>,
}

impl TestNetwork {
    fn new(queues: u8) -> Self {
        let pair = |_| {
            let (ours, tap) = UnixDatagram::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            tap.set_nonblocking(true).unwrap();
            (ours, File::from(OwnedFd::from(tap)))
        };
        let (ours, taps) = (0..queues).map(pair).unzip();
        Self { ours, taps }
    }

    /// Returns an interface that is connected to this network.
    fn net(&self) -> Net {
        self.limited(NetLimits::default())
    }

    fn limited(&self, limits: NetLimits) -> Net {
        let (id, tap, queues) = ("n".to_owned(), "t".to_owned(), self.taps.len() as u8);
        let config = NetConfig { id, tap, mac: MAC, queues, mtu: None, limits, metadata: None };
        let taps: Vec<File> = self.taps.iter().map(|tap| tap.try_clone().unwrap()).collect();
        let mut net = Net::over_sockets(&config, taps).unwrap();
        net.acquire(NextHost::Another).unwrap();
        net
    }

    fn send(&self, queue: usize, frame: &[u8]) {
        self.ours[queue].send(&[&[0; HEADER], frame].concat()).unwrap();
    }

    /// Returns the frames that the guest has sent so far, without headers.
    fn frames(&self) -> Vec<Vec<u8>> {
        let mut buffer = vec![0; MAX_FRAME];
        let mut frames = Vec::new();
        for socket in &self.ours {
            while let Ok(len) = socket.recv(&mut buffer) {
                frames.push(buffer[HEADER..len].to_vec());
            }
        }
        frames
    }
}

fn frame(n: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u64 * 13 + n * 5 + 3) as u8).collect()
}

fn sent(driver: &mut Driver, frame: &[u8]) -> DriverBuffer {
    driver.readable(&[&[0; HEADER], frame].concat())
}

fn num_buffers(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[NUM_BUFFERS.start], bytes[NUM_BUFFERS.start + 1]])
}

fn status(driver: &Driver) -> u16 {
    let mut bytes = [0; 2];
    driver.transport.read(u64::from(VIRTIO_MMIO_CONFIG) + 6, &mut bytes);
    u16::from_le_bytes(bytes)
}

/// Makes a request at the control queue and returns the answer.
#[track_caller]
fn control(driver: &mut Driver, queue: usize, bytes: &[u8]) -> u8 {
    let answer = driver.writable(1);
    let request = driver.readable(bytes);
    driver.request(queue, &[request, answer]);
    driver.bytes(answer)[0]
}

fn restored(network: &TestNetwork, driver: &Driver, state: VirtioState) -> Transport {
    let ram = driver.memory.ram().clone();
    let transport = Transport::spawn("moved", Box::new(network.net()), ram).unwrap();
    transport.restore(state).unwrap();
    transport
}

fn driver_after(network: &TestNetwork, driver: Driver, state: VirtioState) -> Driver {
    let moved = restored(network, &driver, state);
    let mut driver = driver.moved_to(moved);
    driver.transport.resume();
    let room = driver.writable(200);
    network.send(2, &frame(7, 100));
    assert_eq!(driver.request(4, &[room]), 112, "the third pair is in use after a move");
    driver
}

#[test]
fn transmit_queue_conforms_to_virtio() {
    let network = TestNetwork::new(2);
    conformance::check(&TestedDevice {
        make: &|| Box::new(network.net()),
        queue: 1,
        request: &|driver, n| {
            let bytes = [&[0; HEADER][..], &frame(n, 100)].concat();
            vec![driver.readable(&bytes[..20]), driver.readable(&bytes[20..])]
        },
    });
}

#[test]
fn receive_queue_conforms_to_virtio() {
    let network = TestNetwork::new(1);
    conformance::check(&TestedDevice {
        make: &|| Box::new(network.net()),
        queue: 0,
        request: &|driver, n| {
            network.send(0, &frame(n, 1000));
            vec![driver.writable(12), driver.writable(700), driver.writable(700)]
        },
    });
}

#[test]
fn frames_arrive_as_they_were_sent() {
    let network = TestNetwork::new(1);
    let mut driver = Driver::started(Box::new(network.net()));
    for (n, len) in [(0, 60), (1, 1514), (2, 65_549), (3, 14)] {
        let piece = sent(&mut driver, &frame(n, len));
        assert_eq!(driver.request(1, &[piece]), 0);
        assert_eq!(network.frames(), [frame(n, len)]);
        let room = driver.writable(MAX_FRAME as u32);
        let head = driver.post(0, &[room]);
        driver.kick(0);
        network.send(0, &frame(n + 9, len));
        assert_eq!(driver.wait_used(0, head) as usize, HEADER + len);
        let bytes = driver.bytes(room);
        assert_eq!(bytes[HEADER..HEADER + len], frame(n + 9, len));
        assert_eq!(num_buffers(&bytes), 1);
    }
}

#[test]
fn large_frame_waits_for_enough_buffers() {
    let network = TestNetwork::new(1);
    for without in [0, 1 << virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX] {
        let mut driver = Driver::started_without(Box::new(network.net()), without);
        let large = frame(1, 5000);
        let rooms: Vec<DriverBuffer> = (0..3).map(|_| driver.writable(2000)).collect();
        let first = driver.post(0, &[rooms[0]]);
        driver.kick(0);
        network.send(0, &large);
        // Once the frame has been read, it has no room, so it is part of the state.
        let end = Instant::now() + Duration::from_secs(20);
        let state = loop {
            driver.quiesce();
            let state = driver.transport.save().unwrap();
            if postcard::to_stdvec(&state).unwrap().len() > large.len() {
                break state;
            }
            assert!(Instant::now() < end, "the frame is not read");
            driver.transport.resume();
        };
        let moved = restored(&network, &driver, state.clone());
        assert_eq!(moved.save().unwrap(), state);
        let mut driver = driver.moved_to(moved);
        let more: Vec<u16> = rooms[1..].iter().map(|room| driver.post(0, &[*room])).collect();
        driver.transport.line().clear();
        driver.transport.resume();
        let heads = [&[first][..], &more].concat();
        let lens: Vec<u32> = heads.iter().map(|head| driver.wait_used(0, *head)).collect();
        assert_eq!(lens, [2000, 2000, 1012]);
        let bytes: Vec<u8> = rooms.iter().flat_map(|room| driver.bytes(*room)).collect();
        assert_eq!(num_buffers(&bytes), 3);
        assert_eq!(bytes[HEADER..HEADER + 5000], large);
        driver.wait_interrupt();
        driver.quiesce();
    }
}

#[test]
fn frame_larger_than_its_buffers_is_lost() {
    let network = TestNetwork::new(1);
    let mut driver = Driver::started_without(Box::new(network.net()), 1 << VIRTIO_NET_F_MRG_RXBUF);
    let room = driver.writable(1526);
    network.send(0, &frame(1, 5000));
    network.send(0, &frame(2, 1514));
    assert_eq!(driver.request(0, &[room]), 1526);
    assert_eq!(driver.bytes(room)[HEADER..], frame(2, 1514));
    // A frame that does not fit into all buffers of a queue together is lost too.
    let mut driver = Driver::started(Box::new(network.net()));
    let size = driver.queue_size(0);
    network.send(0, &frame(3, 40_000));
    network.send(0, &frame(4, 60));
    let head = driver.post(0, &[DriverBuffer { len: 100, ..room }]);
    for _ in 1..size {
        driver.post(0, &[DriverBuffer { len: 100, ..room }]);
    }
    driver.kick(0);
    assert_eq!(driver.wait_used(0, head), 72);
}

#[test]
fn buffers_below_header_size_stop_the_interface() {
    let network = TestNetwork::new(1);
    let mut driver = Driver::started(Box::new(network.net()));
    let (short, small) = (driver.readable(&[0; 11]), driver.writable(11));
    let (request, answer) = (driver.readable(&[4]), driver.writable(1));
    let wrong: [(usize, &[DriverBuffer]); 5] =
        [(0, &[small]), (1, &[short]), (1, &[small]), (2, &[request, answer]), (2, &[short])];
    for (queue, pieces) in wrong {
        driver.post(queue, pieces);
        driver.kick(queue);
        driver.wait_stopped("a buffer too small");
        driver.start(!0);
    }
    let huge = DriverBuffer { addr: 0, len: 1 << 20, writable: false };
    driver.request(1, &[huge]);
    let good = sent(&mut driver, &frame(1, 60));
    driver.request(1, &[good]);
    assert_eq!(network.frames(), [frame(1, 60)], "one that is too long is lost alone");
}

#[test]
fn driver_may_use_all_queue_pairs() {
    let network = TestNetwork::new(3);
    let mut driver = Driver::started(Box::new(network.net()));
    assert_eq!(driver.queue_count(), 7);
    let pairs = |n: u16| [&[4, 0][..], &n.to_le_bytes()].concat();
    assert_eq!(control(&mut driver, 6, &pairs(3)), 0);
    for queue in 0..3 {
        let room = driver.writable(200);
        network.send(queue, &frame(queue as u64, 100));
        assert_eq!(driver.request(2 * queue, &[room]), 112);
        assert_eq!(driver.bytes(room)[HEADER..112], frame(queue as u64, 100));
        let piece = sent(&mut driver, &frame(9, 60));
        driver.request(2 * queue + 1, &[piece]);
        assert_eq!(network.frames(), [frame(9, 60)]);
    }
    for wrong in [pairs(0), pairs(4), pairs(0x101), vec![4, 0, 1], vec![4, 9, 1, 0], vec![77, 0]] {
        assert_eq!(control(&mut driver, 6, &wrong), 1, "{wrong:?}");
    }
    driver.quiesce();
    let state = driver.transport.save().unwrap();
    let driver = driver_after(&network, driver, state);
    // Without multiple pairs, the control queue is the third queue.
    drop(driver);
    let mut driver = Driver::started_without(Box::new(network.net()), 1 << VIRTIO_NET_F_MQ);
    assert_eq!(control(&mut driver, 2, &pairs(1)), 0);
    assert_eq!(control(&mut driver, 2, &pairs(2)), 1);
}

#[test]
fn hostile_states_are_refused() {
    let network = TestNetwork::new(2);
    let refused = |state: NetState| {
        let mut net = network.net();
        net.activate(1 << VIRTIO_NET_F_MQ);
        net.restore(&postcard::to_stdvec(&state).unwrap()).unwrap_err().to_string()
    };
    let state = |pairs, waiting: &[(u8, usize)]| NetState {
        pairs,
        announce: false,
        waiting: waiting.iter().map(|(pair, len)| (*pair, vec![0; *len])).collect(),
    };
    assert!(refused(state(0, &[])).contains("0 pairs"));
    assert!(refused(state(3, &[])).contains("3 pairs"));
    assert!(refused(state(2, &[(0, 5)])).contains("5 bytes"));
    assert!(refused(state(2, &[(1, MAX_FRAME + 1)])).contains("waits for pair 1"));
    assert!(refused(state(1, &[(1, 100)])).contains("waits for pair 1"));
}

#[test]
fn frames_after_a_short_one_arrive() {
    let network = TestNetwork::new(1);
    let net = network.net();
    let stats = StatsHandle::Net("n".to_owned(), net.counters().clone());
    let mut driver = Driver::started(Box::new(net));
    // All frames are queued before any buffer is available, so that no later event reports the last
    // one.
    for len in [1, HEADER - 1] {
        network.ours[0].send(&vec![0; len]).unwrap();
    }
    network.send(0, &frame(1, 70));
    let room = driver.writable(1526);
    assert_eq!(driver.request(0, &[room]), 70 + HEADER as u32);
    assert_eq!(driver.bytes(room)[HEADER..][..70], frame(1, 70));
    driver.quiesce();
    let DeviceStats::Net { lost_frames, .. } = stats.read() else { unreachable!() };
    assert_eq!(lost_frames, 2);
}

#[test]
fn missing_tap_is_named() {
    let (id, tap) = ("n".to_owned(), "dl-none-dl".to_owned());
    let limits = NetLimits::default();
    let config = NetConfig { id, tap, mac: MAC, queues: 1, mtu: None, limits, metadata: None };
    let opener = Opener::start().unwrap();
    let error = Net::open(&config, VmId::random(), None, &MetadataStore::default(), &opener);
    let error = error.err().unwrap().to_string();
    assert!(error.contains("tap \"dl-none-dl\" does not exist"), "{error}");
}

#[test]
fn frames_are_counted() {
    let network = TestNetwork::new(1);
    let net = network.net();
    let stats = StatsHandle::Net("n".to_owned(), net.counters().clone());
    let mut driver = Driver::started(Box::new(net));
    for len in [60, 100] {
        let piece = sent(&mut driver, &frame(0, len));
        driver.request(1, &[piece]);
    }
    let stalled = || matches!(stats.read(), DeviceStats::Net { stalls: 1.., .. });
    assert!(!stalled());
    network.send(0, &frame(1, 70));
    let begun = Instant::now();
    while !stalled() {
        assert!(begun.elapsed() < Duration::from_secs(20), "a frame without a buffer");
        std::thread::sleep(Duration::from_millis(1));
    }
    let room = driver.writable(1526);
    driver.request(0, &[room]);
    let (id, lost_frames, stalls) = ("n".to_owned(), 0, 1);
    let (received_frames, received_bytes, sent_frames, sent_bytes) = (1, 70, 2, 160);
    let figures = DeviceStats::Net {
        id,
        received_frames,
        received_bytes,
        sent_frames,
        sent_bytes,
        lost_frames,
        stalls,
    };
    driver.quiesce();
    assert_eq!(stats.read(), figures);
}
