//! The service's side of the network: TCP of smoltcp, without I/O and without a clock.

use std::collections::VecDeque;
use std::net::SocketAddrV4;
use std::time::Duration;

use smoltcp::iface::{Config, Interface, PollResult, SocketSet};
use smoltcp::phy::{
    Checksum, Device, DeviceCapabilities, Medium, RxToken as ReceiveToken, TxToken as TransmitToken,
};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpCidr};

use super::connection::{MAX_REQUEST, MmdsConnection};
use super::frames::{ETHERNET, SERVICE_PORT, ServiceFrame, classify, ipv4_frame};
use super::http::read_request;
use crate::config::NetMetadata;
use crate::metadata::{MetadataStore, count};

/// Most connections of an interface. While there are fewer, one socket waits for the next one and
/// counts as one.
pub(in crate::devices) const MAX_CONNECTIONS: usize = 30;
/// Bytes of answers that TCP may have sent without an acknowledgement.
const SEND_BUFFER: usize = 8192;
/// Most frames that wait for the driver's buffers.
pub(in crate::devices) const MAX_WAITING: usize = 64;
/// A connection without progress ends after this time.
pub(super) const IDLE_LIMIT: Duration = Duration::from_secs(60);
/// A connection without progress makes room for another one after this time.
pub(super) const EVICTION_LIMIT: Duration = Duration::from_secs(10);

/// The service behind one interface.
pub(in crate::devices) struct MmdsStack {
    config: NetMetadata,
    store: MetadataStore,
    interface: Interface,
    sockets: SocketSet<'static>,
    connections: Vec<MmdsConnection>,
    waiting: WaitingFrames,
}

/// Frames for the guest.
struct WaitingFrames {
    frames: VecDeque<Vec<u8>>,
    /// The guest's Ethernet address, which its last frame had.
    guest: [u8; 6],
    /// Most bytes of an IPv4 packet.
    mtu: usize,
}

impl WaitingFrames {
    fn has_room(&self) -> bool {
        self.frames.len() < MAX_WAITING
    }
}

impl MmdsStack {
    /// Creates the service of an interface with this MTU. `seed` makes the initial sequence numbers
    /// differ.
    pub(in crate::devices) fn new(
        config: NetMetadata,
        mtu: u16,
        store: MetadataStore,
        seed: u64,
    ) -> Self {
        let mut waiting = WaitingFrames { frames: VecDeque::new(), guest: [0; 6], mtu: mtu.into() };
        let mut own = Config::new(HardwareAddress::Ip);
        own.random_seed = seed;
        let mut device = PacketDevice { packet: None, waiting: &mut waiting };
        let mut interface = Interface::new(own, &mut device, Instant::ZERO);
        // Any guest is a neighbor, whatever its own address is.
        let all = IpCidr::new(config.address.into(), 0);
        interface.update_ip_addrs(|addresses| _ = addresses.push(all));
        let sockets = SocketSet::new(Vec::new());
        let mut stack =
            Self { config, store, interface, sockets, connections: Vec::new(), waiting };
        stack.listen();
        stack
    }

    /// Takes a frame of the guest if it is for the service. Returns whether it is.
    pub(in crate::devices) fn take(&mut self, frame: &[u8], now: Duration) -> bool {
        let Some(kind) = classify(frame, self.config.address) else { return false };
        let counters = self.store.counters();
        count(&counters.taken_frames, 1);
        match kind {
            ServiceFrame::Arp(reply) if self.waiting.has_room() => {
                count(&counters.made_frames, 1);
                self.waiting.frames.push_back(reply);
            }
            // Dropped, as on a congested network: the guest sends it again if it matters.
            _ if !self.waiting.has_room() => {}
            ServiceFrame::Arp(_) => {}
            ServiceFrame::Other => count(&counters.other_packets, 1),
            ServiceFrame::Bad => count(&counters.bad_packets, 1),
            ServiceFrame::Segment { from, source, begins } => {
                count(&counters.segments, 1);
                if begins && self.is_beginning(source) {
                    // The answer to the first one is sent again later. No other socket may take
                    // this one.
                    return true;
                }
                if begins {
                    self.make_room(now);
                }
                self.waiting.guest = from;
                self.poll(Some(&frame[ETHERNET..]), now);
            }
        }
        true
    }

    /// Returns the next frame for the guest, which stays the next one.
    pub(in crate::devices) fn first_frame(&self) -> Option<&[u8]> {
        self.waiting.frames.front().map(Vec::as_slice)
    }

    /// Takes the next frame for the guest.
    pub(in crate::devices) fn next_frame(&mut self, now: Duration) -> Option<Vec<u8>> {
        let was_full = !self.waiting.has_room();
        let frame = self.waiting.frames.pop_front()?;
        let counters = self.store.counters();
        count(&counters.given_frames, 1);
        count(&counters.given_bytes, frame.len() as u64);
        if was_full {
            self.poll(None, now);
        }
        Some(frame)
    }

    /// Repeats segments that are not acknowledged, and ends idle connections.
    pub(in crate::devices) fn tick(&mut self, now: Duration) {
        self.poll(None, now);
    }

    /// Restarts the time without progress of each connection, because the guest was paused.
    pub(in crate::devices) fn resume(&mut self, now: Duration) {
        for connection in &mut self.connections {
            connection.active_at = now;
        }
    }

    /// Returns the time until [`tick`](Self::tick) is due, if there is anything to wait for.
    pub(in crate::devices) fn due_in(&mut self, now: Duration) -> Option<Duration> {
        let idle = self.connections.iter().filter(|connection| connection.is_begun);
        let idle = idle.map(|connection| (connection.active_at + IDLE_LIMIT).saturating_sub(now));
        // Without room for frames, the driver's next buffers continue.
        let tcp = self.waiting.has_room().then(|| {
            let delay = self.interface.poll_delay(instant(now), &self.sockets)?;
            Some(Duration::from_micros(delay.total_micros()))
        });
        idle.min().into_iter().chain(tcp.flatten()).min()
    }

    /// Forgets all connections and frames, without telling the guest.
    pub(in crate::devices) fn reset(&mut self) {
        let begun = self.connections.iter().filter(|connection| connection.is_begun).count();
        count(&self.store.counters().connections_ended, begun as u64);
        self.connections.clear();
        self.sockets = SocketSet::new(Vec::new());
        self.waiting.frames.clear();
        self.listen();
    }

    /// Gives `packet` to TCP, serves the connections, and makes frames while there is room.
    fn poll(&mut self, packet: Option<&[u8]>, now: Duration) {
        let at = instant(now);
        let mut device = PacketDevice { packet, waiting: &mut self.waiting };
        let before = device.waiting.frames.len();
        if packet.is_some() {
            self.interface.poll_ingress_single(at, &mut device, &mut self.sockets);
        }
        for connection in &mut self.connections {
            let tcp = self.sockets.get_mut::<Socket<'_>>(connection.socket);
            if tcp.state() == State::Listen {
                if connection.is_begun {
                    // The guest has reset it before it was established. The next connection must
                    // not begin with what TCP knows of this one.
                    tcp.abort();
                }
                continue;
            }
            if !connection.is_begun {
                count(&self.store.counters().connections_begun, 1);
                (connection.is_begun, connection.active_at) = (true, now);
            }
            let read = |bytes: &[u8]| read_request(bytes, &self.config, &self.store, now);
            connection.exchange(tcp, now, read);
            if now.saturating_sub(connection.active_at) >= IDLE_LIMIT {
                tcp.abort();
            }
        }
        // Each round makes at least one frame.
        while device.waiting.has_room()
            && self.interface.poll_egress(at, &mut device, &mut self.sockets)
                == PollResult::SocketStateChanged
        {}
        let made = self.waiting.frames.len() - before;
        count(&self.store.counters().made_frames, made as u64);
        self.drop_closed();
        self.listen();
    }

    fn drop_closed(&mut self) {
        let (sockets, counters) = (&mut self.sockets, self.store.counters());
        self.connections.retain(|connection| {
            let is_open = sockets.get::<Socket<'_>>(connection.socket).state() != State::Closed;
            if !is_open {
                sockets.remove(connection.socket);
                count(&counters.connections_ended, 1);
            }
            is_open
        });
    }

    /// Makes sure that a socket waits for a connection, if there may be more.
    fn listen(&mut self) {
        if self.is_listening() || self.connections.len() >= MAX_CONNECTIONS {
            return;
        }
        let buffer = |bytes| SocketBuffer::new(vec![0; bytes]);
        let mut tcp = Socket::new(buffer(MAX_REQUEST), buffer(SEND_BUFFER));
        tcp.set_ack_delay(None);
        // Large answers go out in full segments in any case, and their end must not wait.
        tcp.set_nagle_enabled(false);
        if tcp.listen((self.config.address, SERVICE_PORT)).is_ok() {
            self.connections.push(MmdsConnection::new(self.sockets.add(tcp)));
        }
    }

    fn is_listening(&self) -> bool {
        let state = |c: &MmdsConnection| self.sockets.get::<Socket<'_>>(c.socket).state();
        self.connections.iter().any(|connection| state(connection) == State::Listen)
    }

    /// Returns whether the guest has begun a connection from `source` that is not established yet.
    fn is_beginning(&self, source: SocketAddrV4) -> bool {
        self.connections.iter().any(|connection| {
            let tcp = self.sockets.get::<Socket<'_>>(connection.socket);
            tcp.state() == State::SynReceived && tcp.remote_endpoint() == Some(source.into())
        })
    }

    /// Ends the connection that has made no progress for the longest time if a new one needs its
    /// place. A connection that has ended already, and only waits for late segments, is preferred.
    fn make_room(&mut self, now: Duration) {
        if self.is_listening() {
            return;
        }
        let is_over = |connection: &MmdsConnection| {
            self.sockets.get::<Socket<'_>>(connection.socket).state() == State::TimeWait
        };
        let victim = self.connections.iter().min_by_key(|c| (!is_over(c), c.active_at));
        if let Some(victim) = victim
            && (is_over(victim) || now.saturating_sub(victim.active_at) >= EVICTION_LIMIT)
        {
            let victim = victim.socket;
            self.sockets.get_mut::<Socket<'_>>(victim).abort();
            self.poll(None, now);
        }
    }

    /// Returns the number of connections that the guest has begun.
    #[cfg(any(test, fuzzing))]
    pub(in crate::devices) fn open_connections(&self) -> usize {
        self.connections.iter().filter(|connection| connection.is_begun).count()
    }

    /// Returns the number of frames that wait for the guest.
    pub(in crate::devices) fn waiting_frames(&self) -> usize {
        self.waiting.frames.len()
    }
}

fn instant(now: Duration) -> Instant {
    Instant::from_micros(i64::try_from(now.as_micros()).unwrap_or(i64::MAX))
}

/// The interface's end for one call: at most one packet of the guest, and room for frames.
struct PacketDevice<'d> {
    packet: Option<&'d [u8]>,
    waiting: &'d mut WaitingFrames,
}

/// A packet of the guest.
struct Packet<'d>(&'d [u8]);

/// Room for a frame.
struct Room<'d>(&'d mut WaitingFrames);

impl Device for PacketDevice<'_> {
    type RxToken<'a>
        = Packet<'a>
    where
        Self: 'a;
    type TxToken<'a>
        = Room<'a>
    where
        Self: 'a;

    fn receive(&mut self, _: Instant) -> Option<(Packet<'_>, Room<'_>)> {
        let packet = self.packet.take().filter(|_| self.waiting.has_room())?;
        Some((Packet(packet), Room(self.waiting)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Room<'_>> {
        self.waiting.has_room().then_some(Room(self.waiting))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.waiting.mtu;
        // The guest's frames have no checksums yet: a driver leaves them to the device.
        capabilities.checksum.ipv4 = Checksum::Tx;
        capabilities.checksum.tcp = Checksum::Tx;
        capabilities
    }
}

impl ReceiveToken for Packet<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(self.0)
    }
}

impl TransmitToken for Room<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, fill: F) -> R {
        let (frame, result) = ipv4_frame(self.0.guest, len, fill);
        self.0.frames.push_back(frame);
        result
    }
}
