//! What a moved guest receives before and after it has handled the reset of its connections.

use std::sync::{Mutex, MutexGuard};

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::super::bounds::RESET_TIMEOUT;
use super::shared::SharedVsock;
use super::*;

/// A time in which a packet that does not wait would arrive.
const A_WHILE: Duration = Duration::from_millis(100);
/// A time after which no test still runs.
const AN_HOUR: Duration = Duration::from_secs(3600);

/// Makes `count` buffers for events available, as Linux does before it uses the device.
fn post_events(guest: &mut VsockGuest, count: usize) -> Vec<(u16, DriverBuffer)> {
    let post = |_| {
        let room = guest.driver.writable(4);
        (guest.driver.post(EVENT, &[room]), room)
    };
    (0..count).map(post).collect()
}

/// Posts a buffer for a packet. Returns its head.
fn post_receive(guest: &mut VsockGuest) -> u16 {
    let room = guest.driver.writable((HEADER + 4096) as u32);
    let head = guest.driver.post(RECEIVE, &[room]);
    guest.driver.kick(RECEIVE);
    head
}

#[test]
fn packets_wait_until_a_reset_is_handled() {
    for without in [0, 1 << VIRTIO_RING_F_EVENT_IDX] {
        let sockets = TestSockets::new();
        let mut vsock = sockets.vsock();
        vsock.acquire(NextHost::Another).unwrap();
        let driver = Driver::started_without(Box::new(vsock), without);
        let mut guest = VsockGuest::new(driver);
        let events = post_events(&mut guest, 8);
        guest.driver.kick(EVENT);
        let mut programs = Vec::new();
        // A second move before the first event is handled: both buffers must return.
        for (n, (event, room)) in events.iter().take(2).enumerate() {
            guest = moved(&sockets, guest);
            programs.push(sockets.call(50 + n as u32));
            guest.driver.transport.resume();
            assert_eq!(guest.driver.wait_used(EVENT, *event), 4);
            assert_eq!(guest.driver.bytes(*room), TRANSPORT_RESET.to_le_bytes());
        }
        let packet = post_receive(&mut guest);
        // Neither a pause nor another event of the queue is an acknowledgement.
        guest.driver.quiesce();
        guest.driver.transport.resume();
        for _ in 0..2 {
            std::thread::sleep(A_WHILE);
            assert!(!guest.driver.has_used(RECEIVE), "the guest has not handled the reset");
            guest.driver.post(EVENT, &[events[0].1]);
            if guest.driver.is_kick_wanted(EVENT, without == 0) {
                guest.driver.kick(EVENT);
            }
        }
        assert!(guest.driver.is_kick_wanted(EVENT, without == 0), "the last one was notified");
        guest.driver.wait_used(RECEIVE, packet);
    }
}

#[test]
fn moved_guest_sees_new_ports() {
    let sockets = TestSockets::new();
    let mut guest = sockets.guest();
    let mut ports = Vec::new();
    for _ in 0..3 {
        let _program = sockets.call(52);
        let (header, _) = guest.next();
        assert_eq!(header.op.get(), op::REQUEST);
        ports.push(header.src_port.get());
        guest = moved(&sockets, guest);
        guest.driver.transport.resume();
    }
    assert_eq!(ports, [FIRST_PORT, FIRST_PORT + 1, FIRST_PORT + 2]);
}

#[test]
fn guest_without_event_buffers_gets_packets() {
    let sockets = TestSockets::new();
    let mut guest = moved(&sockets, sockets.guest());
    guest.driver.transport.resume();
    let begin = Instant::now();
    let _program = sockets.call(52);
    assert_eq!(guest.next().0.op.get(), op::REQUEST);
    assert!(begin.elapsed() < RESET_TIMEOUT, "{:?}", begin.elapsed());
    // It is told of the reset once it has a buffer.
    let [(event, _)] = post_events(&mut guest, 1).try_into().unwrap();
    guest.driver.kick(EVENT);
    assert_eq!(guest.driver.wait_used(EVENT, event), 4);
}

#[test]
fn driver_that_acknowledges_nothing_gets_packets_later() {
    let sockets = TestSockets::new();
    let mut guest = sockets.guest();
    let [(event, _)] = post_events(&mut guest, 1).try_into().unwrap();
    let mut guest = moved(&sockets, guest);
    let begin = Instant::now();
    guest.driver.transport.resume();
    assert_eq!(guest.driver.wait_used(EVENT, event), 4);
    let packet = post_receive(&mut guest);
    // A packet for a connection that does not exist is refused.
    guest.send(op::RW, Ports { guest: GUEST_PORT, host: 1 }, b"x");
    guest.driver.wait_used(RECEIVE, packet);
    assert!(begin.elapsed() >= RESET_TIMEOUT, "{:?}", begin.elapsed());
}

/// The deadlines of connections, as the device has queued them.
type Deadlines = VecDeque<(Instant, u32)>;

/// A guest that was told of a reset and has not handled it.
struct UnawareGuest {
    guest: VsockGuest,
    vsock: Arc<Mutex<Vsock>>,
    /// The buffer of the event, which the guest has not made available again.
    room: DriverBuffer,
    /// The deadlines at the first time that a connection exists and no packet is withheld.
    first_deadlines: Arc<Mutex<Option<Deadlines>>>,
}

impl UnawareGuest {
    /// Returns a guest whose device waits for an hour.
    fn new(sockets: &TestSockets) -> Self {
        let mut vsock = sockets.vsock();
        vsock.acquire(NextHost::Another).unwrap();
        let vsock = Arc::new(Mutex::new(vsock));
        let first_deadlines = Arc::<Mutex<Option<Deadlines>>>::default();
        let first = first_deadlines.clone();
        let after_call = move |vsock: &Vsock| {
            if vsock.reset_deadline.is_none() && !vsock.connections.is_empty() {
                first.lock().unwrap().get_or_insert_with(|| vsock.deadlines.clone());
            }
        };
        let device = SharedVsock { vsock: vsock.clone(), after_call: Box::new(after_call) };
        let mut guest = VsockGuest::new(Driver::started(Box::new(device)));
        let [(event, room)] = post_events(&mut guest, 1).try_into().unwrap();
        vsock.lock().unwrap().state.reset_due = true;
        guest.driver.kick(EVENT);
        guest.driver.wait_used(EVENT, event);
        vsock.lock().unwrap().reset_deadline = Some(Instant::now() + AN_HOUR);
        Self { guest, vsock, room, first_deadlines }
    }

    fn vsock(&self) -> MutexGuard<'_, Vsock> {
        self.vsock.lock().unwrap()
    }
}

#[test]
fn withheld_request_does_not_time_out() {
    let sockets = TestSockets::new();
    let mut unaware = UnawareGuest::new(&sockets);
    let _program = sockets.call(52);
    let end = Instant::now() + TIMEOUT;
    while unaware.vsock().connections.is_empty() {
        assert!(Instant::now() < end, "the device does not take the program");
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut vsock = unaware.vsock();
    let deadline = vsock.connections.values().next().unwrap().deadline().unwrap();
    vsock.timer_at = None;
    vsock.set_timer();
    assert_eq!(vsock.timer_at, vsock.reset_deadline, "the timer would expire again and again");
    vsock.expire(deadline);
    assert_eq!(vsock.connections.len(), 1, "the guest has not seen the request");
    drop(vsock);
    // The guest handles the reset.
    let (room, guest) = (unaware.room, &mut unaware.guest);
    guest.driver.post(EVENT, &[room]);
    guest.driver.kick(EVENT);
    assert_eq!(guest.next().0.op.get(), op::REQUEST);
    let mut vsock = unaware.vsock();
    let first = unaware.first_deadlines.lock().unwrap().take().unwrap();
    assert_eq!(first.len(), 1, "{first:?}");
    assert!(first[0].0 > deadline, "it has the whole time for its answer");
    vsock.expire(first[0].0);
    assert!(vsock.connections.is_empty(), "it does not answer");
}

#[test]
fn pause_moves_the_reset_deadline_by_its_length() {
    const PAUSE: Duration = Duration::from_millis(20);
    let unaware = UnawareGuest::new(&TestSockets::new());
    let transport = &unaware.guest.driver.transport;
    for _ in 0..3 {
        let begin = Instant::now();
        // Returns once the device has resumed from the pause before, and is paused.
        unaware.guest.driver.quiesce();
        let before = unaware.vsock().reset_deadline.unwrap();
        std::thread::sleep(PAUSE);
        transport.resume();
        unaware.guest.driver.quiesce();
        let after = unaware.vsock().reset_deadline.unwrap();
        assert!(after - before >= PAUSE, "the pause does not count");
        assert!(after - before <= begin.elapsed(), "no more than the pause is added");
        transport.resume();
    }
    unaware.guest.driver.quiesce();
    let state = transport.save().unwrap();
    transport.restore(state).unwrap();
    transport.resume();
    unaware.guest.driver.quiesce();
    let after = unaware.vsock().reset_deadline;
    let most = Instant::now() + RESET_TIMEOUT;
    assert!(after.is_some_and(|at| at <= most), "a restored guest has the whole time, and no more");
}
