//! A guest that takes no packets, and programs that come and go: the device's memory is bounded.

use std::sync::{Arc, Mutex};

use super::super::bounds::MAX_NEW_PROGRAMS;
use super::*;
use crate::devices::virtio::HandOverNeeds;
use driftline_guest::NextHost;

/// Sizes of the device's collections, at one time or the largest seen.
#[derive(Clone, Copy, Debug, Default)]
struct CollectionSizes {
    connections: usize,
    send_order: usize,
    deadlines: usize,
    refusals: usize,
    new_programs: usize,
}

/// A device whose collections are measured after each call.
struct MeasuredVsock {
    vsock: Vsock,
    most: Arc<Mutex<CollectionSizes>>,
    now: Arc<Mutex<CollectionSizes>>,
}

impl MeasuredVsock {
    fn look(&self) {
        let Vsock { connections, send_order, deadlines, refusals, new_programs, .. } = &self.vsock;
        let now = CollectionSizes {
            connections: connections.len(),
            send_order: send_order.len(),
            deadlines: deadlines.len(),
            refusals: refusals.len(),
            new_programs: new_programs.len(),
        };
        let mut most = self.most.lock().unwrap();
        most.connections = most.connections.max(now.connections);
        most.send_order = most.send_order.max(now.send_order);
        most.deadlines = most.deadlines.max(now.deadlines);
        most.refusals = most.refusals.max(now.refusals);
        most.new_programs = most.new_programs.max(now.new_programs);
        *self.now.lock().unwrap() = now;
    }
}

impl Device for MeasuredVsock {
    fn kind(&self) -> DeviceKind {
        self.vsock.kind()
    }

    fn features(&self) -> u64 {
        self.vsock.features()
    }

    fn queue_sizes(&self) -> Vec<u16> {
        self.vsock.queue_sizes()
    }

    fn config_space(&self) -> Vec<u8> {
        self.vsock.config_space()
    }

    fn write_config(&mut self, offset: usize, data: &[u8], io: &mut DeviceIo<'_>) {
        self.vsock.write_config(offset, data, io);
    }

    fn start(&mut self, watcher: &Watcher) -> io::Result<()> {
        self.vsock.start(watcher)
    }

    fn activate(&mut self, features: u64) {
        self.vsock.activate(features);
    }

    fn reset(&mut self, io: &mut DeviceIo<'_>) {
        self.vsock.reset(io);
    }

    fn process(&mut self, queue: usize, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let done = self.vsock.process(queue, io);
        self.look();
        done
    }

    fn backend_ready(
        &mut self,
        token: u32,
        events: EventSet,
        io: &mut DeviceIo<'_>,
    ) -> Result<(), Violation> {
        let done = self.vsock.backend_ready(token, events, io);
        self.look();
        done
    }

    fn quiesce(&mut self, deadline: Instant, io: &mut DeviceIo<'_>) -> Result<(), QuiesceError> {
        self.vsock.quiesce(deadline, io)
    }

    fn resume(&mut self, moved: bool, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        self.vsock.resume(moved, io)
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        self.vsock.save()
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        self.vsock.restore(state)
    }

    fn hand_over(&self) -> HandOverNeeds {
        self.vsock.hand_over()
    }

    fn acquire(&mut self, from: NextHost) -> Result<(), DeviceError> {
        self.vsock.acquire(from)
    }

    fn release(&mut self, deadline: Instant, next: NextHost) -> Result<(), DeviceError> {
        self.vsock.release(deadline, next)
    }
}

/// A guest whose device is measured.
struct WatchedGuest {
    guest: VsockGuest,
    /// The device's maximum number of connections.
    connections: usize,
    /// The largest sizes so far.
    most: Arc<Mutex<CollectionSizes>>,
    /// The current sizes.
    now: Arc<Mutex<CollectionSizes>>,
}

fn watched(sockets: &TestSockets) -> WatchedGuest {
    let mut vsock = sockets.vsock();
    vsock.acquire(NextHost::Another).unwrap();
    let (most, now) =
        (Arc::<Mutex<CollectionSizes>>::default(), Arc::<Mutex<CollectionSizes>>::default());
    let connections = vsock.max_connections;
    let device = MeasuredVsock { vsock, most: most.clone(), now: now.clone() };
    let guest = VsockGuest::new(Driver::started(Box::new(device)));
    WatchedGuest { guest, connections, most, now }
}

#[test]
fn token_of_a_living_stream_is_skipped() {
    let mut vsock = TestSockets::new().vsock();
    let stream = || UnixStream::pair().unwrap().0;
    let connection = Connection::to_guest(Ports { guest: 1, host: 2 }, CID, stream().into());
    vsock.insert(FIRST_STREAM, connection);
    vsock.new_programs.push_back((FIRST_STREAM + 1, stream().into()));
    vsock.next_token = u32::MAX;
    assert_eq!(vsock.free_token(), u32::MAX);
    assert_eq!(vsock.free_token(), FIRST_STREAM + 2);
}

/// Least duration of an attack.
fn attack() -> Duration {
    Duration::from_secs(if crate::testing::full() { 60 } else { 1 })
}

#[test]
fn connections_reset_by_the_guest_leave_nothing() {
    let sockets = TestSockets::new();
    let listener = sockets.listen(52);
    // The programs' ends are accepted and closed, so that the listen queue never fills.
    std::thread::spawn(move || while listener.accept().is_ok() {});
    let WatchedGuest { mut guest, most, now, .. } = watched(&sockets);
    let count = if crate::testing::full() { 50_000 } else { 500 };
    // The guest has no buffer for a packet, so none of these connections sends one.
    for port in 0..count {
        let ports = Ports { guest: port, host: 52 };
        guest.send(op::REQUEST, ports, &[]);
        guest.send(op::RST, ports, &[]);
    }
    let most = *most.lock().unwrap();
    assert!(most.send_order <= 1, "of {count} connections, one at a time: {most:?}");
    assert!(most.deadlines <= 2, "{most:?}");
    assert_eq!(now.lock().unwrap().connections, 0);
}

#[test]
fn programs_that_leave_cause_bounded_refusals() {
    let sockets = TestSockets::new();
    let WatchedGuest { mut guest, connections, most, now } = watched(&sockets);
    let (end, cap) = (Instant::now() + attack(), Instant::now() + 10 * TIMEOUT);
    let mut calls = 0;
    // The guest has no buffer for a packet, so it sees none of these connections, and each is
    // refused in time. A busy host needs longer to make as many connections as the bounds are
    // about, and to refuse them.
    let enough = |calls| {
        calls > 2 * (MAX_REFUSALS + connections) && most.lock().unwrap().refusals > MAX_REFUSALS
    };
    while Instant::now() < end || !enough(calls) && Instant::now() < cap {
        calls += 1;
        let mut program = UnixStream::connect(sockets.uds()).unwrap();
        // A program that the device has already rejected counts as well.
        let _ = program.write_all(b"CONNECT 9\n");
    }
    let seen = *most.lock().unwrap();
    assert!(enough(calls), "the attack reaches the bound: {seen:?} after {calls} calls");
    assert!(seen.refusals <= MAX_REFUSALS + connections, "after {calls} calls: {seen:?}");
    assert!(seen.deadlines <= 2 * connections, "{seen:?}");
    assert!(seen.new_programs <= MAX_NEW_PROGRAMS, "{seen:?}");
    // Once the guest takes its packets, the device is as it was before.
    let end = Instant::now() + TIMEOUT;
    loop {
        let CollectionSizes { connections, refusals, .. } = *now.lock().unwrap();
        if (connections, refusals) == (0, 0) {
            break;
        }
        assert!(Instant::now() < end, "{connections} connections, {refusals} refusals are left");
        if refusals > 0 {
            guest.next();
            guest.driver.forget_buffers();
        } else {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let _program = sockets.call(9000);
    let (header, _) = guest.next();
    assert_eq!((header.op.get(), header.dst_port.get()), (op::REQUEST, 9000));
}
