//! virtio-vsock: streams between programs of the guest and unix sockets of the host.
//!
//! ```text
//! guest: connect to (2, port)  ->  PATH_port, where a program of the host listens
//! host:  connect to PATH, send "CONNECT port\n", read "OK number\n"  ->  listener in the guest
//! ```
//!
//! Connections end at this host: after a move to another one the guest is told that all of them are
//! closed (`TRANSPORT_RESET`). In another process of this host they continue. Everything that a
//! guest or a program can make the device keep is bounded:
//!
//! | what | bound |
//! | --- | --- |
//! | connections | `max_connections` of the process's limit on open files |
//! | bytes of a connection | `ROOM` |
//! | entries of the send order | one per connection |
//! | deadlines | two per connection |
//! | refusals | `MAX_REFUSALS`, plus one for each connection that was open when this number was reached |
//! | programs that have not sent their greeting | `MAX_NEW_PROGRAMS` |

mod bounds;
mod connection;
mod device;
mod hand_over;
mod host;
mod moves;
mod op;
mod packet;
mod reset;
#[cfg(test)]
mod tests;
mod timeouts;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use driftline_guest::GuestRam;
use serde::{Deserialize, Serialize};
use vmm_sys_util::epoll::EventSet;
use zerocopy::IntoBytes;

use self::bounds::{MAX_DATA, MAX_REFUSALS, max_connections};
use self::connection::{Connection, ConnectionOutcome, Ports};
pub(super) use self::device::SHARED_FILES;
use self::hand_over::{ArrivedStreams, Departure};
pub use self::host::VsockError;
use self::host::{Greeting, VsockListener};
use self::packet::{HEADER, HOST_CID, PacketHeader, STREAM};
use super::counts::VsockCounters;
use super::opener::Opener;
use super::timer::Timer;
use super::virtio::{Chain, DeviceIo, RequestDefect, Violation, Watcher};
use crate::config::{HandedOverVsock, OpenedSocket, VsockConfig};
use crate::exit::SocketFile;
use crate::limits;

const QUEUE_SIZE: u16 = 256;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;
/// Token of the listening socket. Tokens from [`FIRST_STREAM`] on belong to streams.
const LISTENER: u32 = 0;
const TIMER: u32 = 1;
const FIRST_STREAM: u32 = 2;
/// First port of the host's end of connections that the host's programs open.
const FIRST_PORT: u32 = 1 << 30;
/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`.
const TRANSPORT_RESET: u32 = 0;

/// The device.
pub(super) struct Vsock {
    config: VsockConfig,
    opener: Opener,
    /// A socket that was bound before the device was built. The device takes it the first time that
    /// it listens.
    opened: Option<OpenedSocket>,
    /// Whether the socket's file stays when the device ends, as that of a socket bound earlier.
    socket_stays: bool,
    /// Listening socket, while this host has the guest.
    listener: Option<VsockListener>,
    listener_watched: bool,
    /// Time at which accepting programs is tried again after the system had no room for one.
    accept_retry: Option<Instant>,
    /// How the connections come from the process of this host that had the guest before.
    arrives_by: Option<HandedOverVsock>,
    /// The connections that have come, until the guest runs here.
    arrived: Option<ArrivedStreams>,
    /// How the connections leave for the next process of this host.
    departure: Option<Departure>,
    /// The listening socket's file, which is left to the next process.
    left_file: Option<SocketFile>,
    /// Whether a driver is ready.
    active: bool,
    /// Connections by token.
    connections: HashMap<u32, Connection>,
    /// Maximum number of connections.
    max_connections: usize,
    tokens: HashMap<Ports, u32>,
    new_programs: VecDeque<(u32, Arc<UnixStream>)>,
    /// Deadlines of connections that wait for the guest, with their tokens, in order of time. Some
    /// of these connections no longer wait.
    deadlines: VecDeque<(Instant, u32)>,
    timer: Timer,
    /// Time for which the timer is set.
    timer_at: Option<Instant>,
    /// Time from which the device no longer waits for the driver to acknowledge a reset event.
    /// `None` if it does not wait.
    reset_deadline: Option<Instant>,
    /// Time of the last quiesce: the start of the pause, if the device is paused.
    paused_at: Option<Instant>,
    next_token: u32,
    refusals: VecDeque<PacketHeader>,
    /// Tokens of connections that may have a packet for the guest, each at most once.
    send_order: VecDeque<u32>,
    /// Whether packets of the guest were left in their queue because there was no room for
    /// refusals.
    stalled: bool,
    buffer: Box<[u8]>,
    state: VsockState,
    counters: Arc<VsockCounters>,
}

/// State of the device that moves with the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct VsockState {
    /// Whether the guest must be told that its connections are closed.
    reset_due: bool,
    /// Value of the event queue's available index that acknowledges the last reset event; see
    /// [`reset`]. `None` if no acknowledgement is missing.
    reset_unacknowledged: Option<u16>,
    /// First port to be tried for the next connection that a program of the host opens. After a
    /// move the guest may still send packets of earlier connections, whose ports are not to be used
    /// again soon.
    next_port: u32,
}

impl Vsock {
    /// Opens the device of `config`, with the socket that is `opened` already, if there is one.
    ///
    /// # Errors
    ///
    /// Fails if its unix socket cannot be used. A socket that another process listens on is
    /// accepted here; [`acquire`](super::virtio::Device::acquire) fails if that is still so.
    pub(super) fn open(
        config: &VsockConfig,
        opened: Option<&OpenedSocket>,
        opener: &Opener,
    ) -> Result<Self, VsockError> {
        let bind = || VsockListener::open(&config.uds, false, opener).map(drop);
        match opened.map_or_else(bind, |_| Ok(())) {
            Ok(()) => {}
            // The listener may be the host process that the guest comes from.
            Err(e) if e.is_in_use() => {}
            Err(e) => return Err(e),
        }
        let device = Self::new(config, opener);
        let device = device.map_err(|cause| VsockError::system(&config.uds, cause))?;
        Ok(Self { opened: opened.cloned(), socket_stays: opened.is_some(), ..device })
    }

    /// Returns the device like [`open`](Self::open), without checking the socket.
    pub(super) fn new(config: &VsockConfig, opener: &Opener) -> io::Result<Self> {
        Ok(Self {
            config: config.clone(),
            opener: opener.clone(),
            opened: None,
            socket_stays: false,
            listener: None,
            listener_watched: false,
            accept_retry: None,
            arrives_by: None,
            arrived: None,
            departure: None,
            left_file: None,
            active: false,
            connections: HashMap::new(),
            max_connections: max_connections(limits::open_files()),
            tokens: HashMap::new(),
            new_programs: VecDeque::new(),
            deadlines: VecDeque::new(),
            timer: Timer::new()?,
            timer_at: None,
            reset_deadline: None,
            paused_at: None,
            next_token: FIRST_STREAM,
            refusals: VecDeque::new(),
            send_order: VecDeque::new(),
            stalled: false,
            buffer: vec![0; MAX_DATA].into(),
            state: VsockState::default(),
            counters: Arc::default(),
        })
    }

    /// Returns a device that continues with the socket and the connections of another process of
    /// this host.
    pub(super) fn of_other_process(
        config: &VsockConfig,
        files: &HandedOverVsock,
        opener: &Opener,
    ) -> Result<Self, VsockError> {
        let device = Self::new(config, opener);
        let device = device.map_err(|cause| VsockError::system(&config.uds, cause))?;
        Ok(Self { arrives_by: Some(files.clone()), ..device })
    }

    /// Returns the device's counters.
    pub(super) fn counters(&self) -> &Arc<VsockCounters> {
        &self.counters
    }

    /// Watches `stream` and returns its token.
    fn watch(&mut self, stream: &UnixStream, watcher: &Watcher) -> io::Result<u32> {
        let token = self.free_token();
        let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP;
        watcher.watch(stream, events | EventSet::EDGE_TRIGGERED, token)?;
        Ok(token)
    }

    /// Returns a token that no stream has. Tokens wrap around after 2^32 streams, and a stream may
    /// live that long.
    fn free_token(&mut self) -> u32 {
        loop {
            let token = self.next_token;
            self.next_token = token.checked_add(1).unwrap_or(FIRST_STREAM);
            let is_new = self.new_programs.iter().any(|(of, _)| *of == token);
            if !is_new && !self.connections.contains_key(&token) {
                return token;
            }
        }
    }

    fn insert(&mut self, token: u32, connection: Connection) {
        self.counters.connections_begun.add(1);
        self.tokens.insert(connection.ports(), token);
        self.connections.insert(token, connection);
        self.queue_for_sending(token);
    }

    fn queue_for_sending(&mut self, token: u32) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        if let Some(deadline) = connection.deadline()
            && connection.queued_deadline != Some(deadline)
        {
            connection.queued_deadline = Some(deadline);
            self.deadlines.push_back((deadline, token));
        }
        if connection.wants_to_send() && !std::mem::replace(&mut connection.queued, true) {
            self.send_order.push_back(token);
        }
    }

    /// Handles a stream that is, or may be, ready for reading or writing.
    fn stream_ready(&mut self, token: u32, hung_up: bool) {
        if let Some(connection) = self.connections.get_mut(&token) {
            let outcome = connection.stream_ready(hung_up);
            self.apply_outcome(token, outcome);
        }
    }

    /// Removes a connection unless `outcome` says that it continues. Closing its stream also ends
    /// the watch.
    fn apply_outcome(&mut self, token: u32, outcome: ConnectionOutcome) {
        if outcome == ConnectionOutcome::Continues {
            return self.queue_for_sending(token);
        }
        let Some(connection) = self.connections.remove(&token) else { return };
        connection.close();
        self.counters.connections_ended.add(1);
        self.tokens.remove(&connection.ports());
        // Remove its entries now, because a guest that takes no packets would never use them up.
        if connection.queued {
            self.send_order.retain(|of| *of != token);
        }
        if connection.queued_deadline.is_some() {
            self.deadlines.retain(|(_, of)| *of != token);
        }
        if outcome == ConnectionOutcome::Reset {
            self.refuse(connection.ports());
        }
    }

    /// Tells the guest that a connection has ended.
    fn refuse(&mut self, ports: Ports) {
        self.refusals.push_back(PacketHeader {
            src_cid: HOST_CID.into(),
            dst_cid: u64::from(self.config.cid).into(),
            src_port: ports.host.into(),
            dst_port: ports.guest.into(),
            kind: STREAM.into(),
            op: op::RST.into(),
            ..PacketHeader::default()
        });
    }

    /// Removes all connections. The guest learns it in other ways, or knows it already.
    fn clear(&mut self) {
        self.counters.connections_ended.add(self.connections.len() as u64);
        self.connections.drain().for_each(|(_, connection)| connection.close());
        self.tokens.clear();
        self.close_new_programs();
        self.refusals.clear();
        self.send_order.clear();
        self.deadlines.clear();
        self.stalled = false;
    }

    /// Closes the streams of programs that have not sent their greeting.
    fn close_new_programs(&mut self) {
        self.new_programs.drain(..).for_each(|(_, stream)| connection::close(&stream));
    }

    /// Processes the packets that the guest sends.
    fn process_packets(&mut self, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let Some(ring) = io.rings.get_mut(TRANSMIT) else { return Ok(()) };
        loop {
            // Each packet causes at most one refusal.
            self.stalled = self.refusals.len() >= MAX_REFUSALS;
            if self.stalled {
                return Ok(());
            }
            let Some(chain) = ring.pop(io.ram)? else { return Ok(()) };
            let header = PacketHeader::read(&chain, TRANSMIT as u16, io.ram)?;
            self.counters.taken_packets.add(1);
            self.process_packet(&header, &chain, io.ram, io.watcher)?;
            ring.push(io.ram, chain.head, 0)?;
        }
    }

    fn process_packet(
        &mut self,
        header: &PacketHeader,
        chain: &Chain,
        ram: &GuestRam,
        watcher: &Watcher,
    ) -> Result<(), Violation> {
        if header.src_cid.get() != u64::from(self.config.cid) {
            tracing::debug!("vsock: a packet with source CID {} is dropped", header.src_cid);
            return Ok(());
        }
        let ports = Ports { guest: header.src_port.get(), host: header.dst_port.get() };
        let ours = header.dst_cid.get() == HOST_CID && header.kind.get() == STREAM;
        let known_token = self.tokens.get(&ports).copied().filter(|_| ours);
        match (known_token, header.op.get()) {
            (Some(token), _) => {
                let len = (header.len.get() as usize).min(self.buffer.len());
                chain.readable.read(ram, HEADER as u32, &mut self.buffer[..len])?;
                // A packet larger than allowed is also larger than its credit.
                let too_long = header.len.get() as usize > len;
                let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
                let outcome = match too_long {
                    true => ConnectionOutcome::Reset,
                    false => {
                        self.counters.taken_bytes.add(len as u64);
                        connection.take(header, &self.buffer[..len])
                    }
                };
                self.apply_outcome(token, outcome);
            }
            (None, op::REQUEST) if ours => self.connect(ports, header, watcher),
            (None, op::RST) => {}
            (None, _) => self.refusals.push_back(header.refusal()),
        }
        Ok(())
    }

    /// Connects the guest to a program of the host.
    fn connect(&mut self, ports: Ports, header: &PacketHeader, watcher: &Watcher) {
        let connected = match self.connections.len() < self.max_connections {
            true => host::connect(&self.config.uds, ports.host, &self.opener),
            false => Err(io::Error::other("there are too many connections")),
        };
        let watched = connected.and_then(|stream| Ok((self.watch(&stream, watcher)?, stream)));
        match watched {
            Ok((token, stream)) => {
                let connection = Connection::from_guest(ports, header, self.config.cid, stream);
                self.insert(token, connection);
            }
            Err(e) => {
                tracing::debug!("vsock: the guest is not connected to port {}: {e}", ports.host);
                self.refusals.push_back(header.refusal());
            }
        }
    }

    /// Handles data from an accepted program, or its end.
    fn read_greeting(&mut self, token: u32) {
        let Some(at) = self.new_programs.iter().position(|(of, _)| *of == token) else { return };
        let Some((_, stream)) = self.new_programs.get(at) else { return };
        let greeting = host::greeting(stream);
        if greeting == Greeting::Unfinished {
            return;
        }
        // From here on the stream becomes a connection or is closed.
        let Some((_, stream)) = self.new_programs.remove(at) else { return };
        if let Greeting::Connect(port) = greeting
            && self.active
            && self.connections.len() < self.max_connections
            && self.refusals.len() < MAX_REFUSALS
        {
            let ports = Ports { guest: port, host: self.free_port(port) };
            self.insert(token, Connection::to_guest(ports, self.config.cid, stream));
        } else {
            connection::close(&stream);
        }
    }

    fn free_port(&mut self, guest: u32) -> u32 {
        loop {
            let host = self.state.next_port.max(FIRST_PORT);
            self.state.next_port = host.wrapping_add(1);
            if !self.tokens.contains_key(&Ports { guest, host }) {
                return host;
            }
        }
    }

    /// Gives the guest the waiting packets, as long as it has buffers.
    fn send_packets(&mut self, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        loop {
            self.fill_buffers(io)?;
            if !self.stalled || self.refusals.len() >= MAX_REFUSALS {
                return Ok(());
            }
            self.process_packets(io)?;
        }
    }

    fn fill_buffers(&mut self, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let Some(ring) = io.rings.get_mut(RECEIVE) else { return Ok(()) };
        while !self.refusals.is_empty() || !self.send_order.is_empty() {
            let Some(chain) = ring.pop(io.ram)? else { return Ok(()) };
            let room = (chain.writable.len() as usize).checked_sub(HEADER);
            // Buffers without room for data could use up any number of packets without transferring
            // data.
            let Some(room) = room.filter(|room| *room > 0) else {
                let (head, room) = (chain.head, chain.writable.len());
                let cause = RequestDefect::PacketBuffer { head, room };
                return Err(Violation::Malformed { queue: RECEIVE as u16, cause });
            };
            let Some(header) = self.next_packet(room.min(MAX_DATA)) else {
                ring.unpop();
                return Ok(());
            };
            let len = header.len.get() as usize;
            chain.writable.write(io.ram, 0, header.as_bytes())?;
            chain.writable.write(io.ram, HEADER as u32, &self.buffer[..len])?;
            ring.push(io.ram, chain.head, (HEADER + len) as u32)?;
            self.counters.given_packets.add(1);
            self.counters.given_bytes.add(len as u64);
        }
        Ok(())
    }

    /// Returns the next packet for the guest. Its data, at most `room` bytes, is in the buffer.
    fn next_packet(&mut self, room: usize) -> Option<PacketHeader> {
        if let Some(header) = self.refusals.pop_front() {
            return Some(header);
        }
        // Each connection is asked once. One that has no packet now goes to the end.
        for _ in 0..self.send_order.len() {
            let Some(token) = self.send_order.pop_front() else { break };
            let Some(connection) = self.connections.get_mut(&token) else { continue };
            connection.queued = false;
            let packet = connection.next_packet(&mut self.buffer[..room]);
            // Queued again at the end.
            self.queue_for_sending(token);
            if packet.is_some() {
                return packet;
            }
        }
        None
    }
}
