//! A guest that takes no packets, and programs that come and go: the device's memory is bounded.

use std::sync::Mutex;

use super::super::bounds::MAX_NEW_PROGRAMS;
use super::shared::SharedVsock;
use super::*;

/// Sizes of the device's collections, at one time or the largest seen.
#[derive(Clone, Copy, Debug, Default)]
struct CollectionSizes {
    connections: usize,
    send_order: usize,
    deadlines: usize,
    refusals: usize,
    new_programs: usize,
}

impl CollectionSizes {
    fn of(vsock: &Vsock) -> Self {
        let Vsock { connections, send_order, deadlines, refusals, new_programs, .. } = vsock;
        Self {
            connections: connections.len(),
            send_order: send_order.len(),
            deadlines: deadlines.len(),
            refusals: refusals.len(),
            new_programs: new_programs.len(),
        }
    }

    fn raise_to(&mut self, now: &Self) {
        self.connections = self.connections.max(now.connections);
        self.send_order = self.send_order.max(now.send_order);
        self.deadlines = self.deadlines.max(now.deadlines);
        self.refusals = self.refusals.max(now.refusals);
        self.new_programs = self.new_programs.max(now.new_programs);
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
    let device = SharedVsock {
        vsock: Arc::new(Mutex::new(vsock)),
        after_call: Box::new({
            let (most, now) = (most.clone(), now.clone());
            move |vsock| {
                let sizes = CollectionSizes::of(vsock);
                most.lock().unwrap().raise_to(&sizes);
                *now.lock().unwrap() = sizes;
            }
        }),
    };
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
