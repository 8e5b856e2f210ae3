//! One stream between a program of the guest and a program of the host, with the credit of both
//! sides.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::op;
use super::packet::{HOST_CID, NO_RECEIVE, NO_SEND, PacketHeader, STREAM};

/// Most bytes from the guest that wait for the host's program. This is the guest's credit.
pub(super) const ROOM: u32 = 64 << 10;
/// Bytes that must leave that buffer before the guest gets a credit update.
const CREDIT_UPDATE_BYTES: u32 = ROOM / 4;
/// Limit on how long the guest may take to answer a request, and to end a connection whose program
/// has closed it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Ports that identify a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Ports {
    pub(super) guest: u32,
    pub(super) host: u32,
}

/// Phase of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum ConnectionPhase {
    /// The host's program has requested the connection, and the guest has not answered.
    Requested,
    Open,
}

/// Control packets that are due to the guest.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct DuePackets {
    request: bool,
    response: bool,
    credit: bool,
    ask_credit: bool,
    shutdown: bool,
}

impl DuePackets {
    /// Removes and returns the next one. The shutdown is not included, because it must follow the
    /// data.
    fn take(&mut self) -> Option<u16> {
        let control = [
            (&mut self.request, op::REQUEST),
            (&mut self.response, op::RESPONSE),
            (&mut self.credit, op::CREDIT_UPDATE),
            (&mut self.ask_credit, op::CREDIT_REQUEST),
        ];
        control.into_iter().find_map(|(due, op)| std::mem::take(due).then_some(op))
    }
}

/// One stream. See the module documentation.
#[derive(Debug)]
pub(super) struct Connection {
    guest_cid: u64,
    /// Shared with the thread that sends it to the next process.
    stream: Arc<UnixStream>,
    state: ConnectionState,
    /// Whether the connection is in the device's send order.
    pub(super) queued: bool,
    /// Deadline that the device has queued.
    pub(super) queued_deadline: Option<Instant>,
    /// Deadline for the guest's answer, if the device waits for one.
    deadline: Option<Instant>,
    /// Whether the stream may be readable.
    readable: bool,
    /// Directions of the guest that the stream is shut down in: `NO_RECEIVE`, `NO_SEND`.
    stream_shut: u32,
}

/// The part of a connection's state that another process gets. There its bytes are hostile.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ConnectionState {
    ports: Ports,
    phase: ConnectionPhase,
    due: DuePackets,
    /// Whether the peer has closed the stream in both directions.
    hung_up: bool,
    /// Bytes from the guest that the stream has not taken yet, at most [`ROOM`].
    #[serde(serialize_with = "write_backlog", deserialize_with = "read_backlog")]
    backlog: VecDeque<u8>,
    /// Bytes that the stream has taken in total, and the value last reported to the guest.
    forwarded: u32,
    reported: u32,
    /// Size of the guest's buffer, bytes that it has taken out in total, and bytes sent to it in
    /// total.
    guest_room: u32,
    guest_forwarded: u32,
    sent: u32,
    credit_asked: bool,
    /// Directions that the guest has shut down, and directions that the device has told it are shut
    /// down: `NO_RECEIVE`, `NO_SEND`.
    guest_shut: u32,
    host_shut: u32,
}

/// A connection on its way to another process, without its stream.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct MovedConnection {
    state: ConnectionState,
    /// Whether the device waits for the guest's answer.
    awaits_guest: bool,
}

fn write_backlog<S: Serializer>(backlog: &VecDeque<u8>, to: S) -> Result<S::Ok, S::Error> {
    let (first, last) = backlog.as_slices();
    to.serialize_bytes(&[first, last].concat())
}

fn read_backlog<'de, D: Deserializer<'de>>(from: D) -> Result<VecDeque<u8>, D::Error> {
    let bytes = <&[u8]>::deserialize(from)?;
    match bytes.len() <= ROOM as usize {
        true => Ok(bytes.to_vec().into()),
        false => Err(Error::invalid_length(bytes.len(), &"the bytes of a full buffer")),
    }
}

/// Closes a stream in both directions, also for another process that may have it.
pub(super) fn close(stream: &UnixStream) {
    // It is not an error if it is closed already.
    let _ = stream.shutdown(Shutdown::Both);
}

impl MovedConnection {
    /// Returns the connection's ports.
    pub(super) fn ports(&self) -> Ports {
        self.state.ports
    }
}

#[cfg(test)]
impl MovedConnection {
    /// Returns the connection with the longest encoding.
    pub(super) fn largest() -> Self {
        let state = ConnectionState {
            ports: Ports { guest: u32::MAX, host: u32::MAX },
            phase: ConnectionPhase::Open,
            due: DuePackets::default(),
            hung_up: true,
            backlog: vec![1; ROOM as usize].into(),
            forwarded: u32::MAX,
            reported: u32::MAX,
            guest_room: u32::MAX,
            guest_forwarded: u32::MAX,
            sent: u32::MAX,
            credit_asked: true,
            guest_shut: u32::MAX,
            host_shut: u32::MAX,
        };
        Self { state, awaits_guest: true }
    }
}

/// What happens to a connection next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ConnectionOutcome {
    Continues,
    /// It ends, and the guest must be told.
    Reset,
    /// It ends, and the guest knows.
    Closed,
}

impl Connection {
    fn new(
        ports: Ports,
        guest_cid: u32,
        stream: impl Into<Arc<UnixStream>>,
        phase: ConnectionPhase,
        due: DuePackets,
    ) -> Self {
        let state = ConnectionState {
            ports,
            phase,
            due,
            hung_up: false,
            backlog: VecDeque::new(),
            forwarded: 0,
            reported: 0,
            guest_room: 0,
            guest_forwarded: 0,
            sent: 0,
            credit_asked: false,
            guest_shut: 0,
            host_shut: 0,
        };
        Self::with_state(guest_cid, stream.into(), state)
    }

    fn with_state(guest_cid: u32, stream: Arc<UnixStream>, state: ConnectionState) -> Self {
        Self {
            guest_cid: guest_cid.into(),
            stream,
            state,
            queued: false,
            queued_deadline: None,
            deadline: None,
            readable: true,
            stream_shut: 0,
        }
    }

    /// Returns the ports that identify the connection.
    pub(super) fn ports(&self) -> Ports {
        self.state.ports
    }

    /// Returns a connection that a program of the host requests over `stream`.
    pub(super) fn to_guest(ports: Ports, guest_cid: u32, stream: Arc<UnixStream>) -> Self {
        let due = DuePackets { request: true, ..DuePackets::default() };
        let deadline = Some(Instant::now() + ANSWER_TIMEOUT);
        Self { deadline, ..Self::new(ports, guest_cid, stream, ConnectionPhase::Requested, due) }
    }

    /// Returns a connection that the guest requests with `header`, over `stream` to the program.
    pub(super) fn from_guest(
        ports: Ports,
        header: &PacketHeader,
        cid: u32,
        stream: UnixStream,
    ) -> Self {
        let due = DuePackets { response: true, ..DuePackets::default() };
        let mut new = Self::new(ports, cid, stream, ConnectionPhase::Open, due);
        new.note_credit(header);
        new
    }

    /// Returns the state with which another process continues, and the stream.
    pub(super) fn moved(&self) -> (MovedConnection, Arc<UnixStream>) {
        let (state, awaits_guest) = (self.state.clone(), self.deadline.is_some());
        (MovedConnection { state, awaits_guest }, self.stream.clone())
    }

    /// Returns a connection of another process, which continues here; `None` if its state is
    /// impossible.
    pub(super) fn arrived(
        moved: MovedConnection,
        guest_cid: u32,
        stream: Arc<UnixStream>,
    ) -> Option<Self> {
        let MovedConnection { state, awaits_guest } = moved;
        if (state.guest_shut | state.host_shut) & !(NO_RECEIVE | NO_SEND) != 0 {
            return None;
        }
        let deadline = awaits_guest.then(|| Instant::now() + ANSWER_TIMEOUT);
        Some(Self { deadline, ..Self::with_state(guest_cid, stream, state) })
    }

    /// Closes the stream, also for another process that may have it.
    pub(super) fn close(&self) {
        close(&self.stream);
    }

    fn note_credit(&mut self, header: &PacketHeader) {
        self.state.guest_room = header.buf_alloc.get();
        self.state.guest_forwarded = header.fwd_cnt.get();
    }

    /// Returns the number of bytes that the guest has room for.
    fn credit(&self) -> u32 {
        self.state
            .guest_room
            .saturating_sub(self.state.sent.wrapping_sub(self.state.guest_forwarded))
    }

    /// Handles a packet of the guest, whose data is `data`.
    pub(super) fn take(&mut self, header: &PacketHeader, data: &[u8]) -> ConnectionOutcome {
        self.note_credit(header);
        if self.credit() > 0 {
            self.state.credit_asked = false;
        }
        match (header.op.get(), self.state.phase) {
            (op::RST, _) => return ConnectionOutcome::Closed,
            (op::RESPONSE, ConnectionPhase::Requested) => {
                self.state.phase = ConnectionPhase::Open;
                self.deadline = None;
                let greeting = format!("OK {}\n", self.state.ports.host);
                // A new stream has room for one line.
                if (&*self.stream).write_all(greeting.as_bytes()).is_err() {
                    return ConnectionOutcome::Reset;
                }
            }
            (_, ConnectionPhase::Requested) => return ConnectionOutcome::Reset,
            (op::RW, _) => {
                let full = self.state.backlog.len() + data.len() > ROOM as usize;
                if full || self.state.guest_shut & NO_SEND != 0 {
                    return ConnectionOutcome::Reset;
                }
                self.forward(data);
            }
            (op::SHUTDOWN, _) => {
                self.state.guest_shut |= header.flags.get() & (NO_RECEIVE | NO_SEND);
                self.shut_stream();
            }
            (op::CREDIT_REQUEST, _) => self.state.due.credit = true,
            (op::CREDIT_UPDATE, _) => {}
            _ => return ConnectionOutcome::Reset,
        }
        self.outcome()
    }

    fn outcome(&self) -> ConnectionOutcome {
        let both = NO_RECEIVE | NO_SEND;
        match self.state.guest_shut == both && self.state.backlog.is_empty() {
            true => ConnectionOutcome::Reset,
            false => ConnectionOutcome::Continues,
        }
    }

    /// Writes `data` to the stream and keeps the bytes that the stream does not take.
    fn forward(&mut self, data: &[u8]) {
        self.state.backlog.extend(data);
        self.flush();
    }

    fn flush(&mut self) {
        while !self.state.backlog.is_empty() {
            match (&*self.stream).write(self.state.backlog.as_slices().0) {
                Ok(written) => {
                    self.state.backlog.drain(..written);
                    self.state.forwarded = self.state.forwarded.wrapping_add(written as u32);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // The program no longer reads the stream.
                    self.state.forwarded =
                        self.state.forwarded.wrapping_add(self.state.backlog.len() as u32);
                    self.state.backlog.clear();
                    self.shut(NO_RECEIVE);
                }
            }
        }
        if self.state.forwarded.wrapping_sub(self.state.reported) >= CREDIT_UPDATE_BYTES {
            self.state.due.credit = true;
        }
        self.shut_stream();
    }

    /// Passes the guest's shutdown on to the stream, each direction once: every shutdown makes the
    /// stream ready again. The write direction waits until all of the guest's data has been
    /// written.
    fn shut_stream(&mut self) {
        let unsent = if self.state.backlog.is_empty() { 0 } else { NO_SEND };
        let due = self.state.guest_shut & !unsent & !self.stream_shut;
        self.stream_shut |= due;
        for (direction, how) in [(NO_SEND, Shutdown::Write), (NO_RECEIVE, Shutdown::Read)] {
            if due & direction != 0 {
                // It is not an error if the stream is already closed.
                let _ = self.stream.shutdown(how);
            }
        }
    }

    /// Tells the guest which directions the host's program has shut down.
    fn shut(&mut self, flags: u32) {
        if self.state.host_shut | flags != self.state.host_shut {
            self.state.host_shut |= flags;
            self.state.due.shutdown = true;
            if self.state.host_shut == NO_SEND | NO_RECEIVE {
                self.deadline = Some(Instant::now() + ANSWER_TIMEOUT);
            }
        }
    }

    /// Handles a stream that is ready for reading or writing.
    pub(super) fn stream_ready(&mut self, hung_up: bool) -> ConnectionOutcome {
        self.readable = true;
        self.state.hung_up |= hung_up;
        if self.state.phase == ConnectionPhase::Open {
            self.flush();
            // No later read will detect the end of the stream.
            let all_read =
                self.state.host_shut & NO_SEND != 0 || self.state.guest_shut & NO_RECEIVE != 0;
            if self.state.hung_up && all_read {
                self.shut(NO_SEND | NO_RECEIVE);
            }
        }
        self.outcome()
    }

    /// Asks the system whether the peer has closed the stream in both directions.
    pub(super) fn is_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&*self.stream, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok()
            && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// Returns the deadline for the guest's answer, if the device waits for one.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Restarts the time limit, because the guest could not answer meanwhile. The device queues the
    /// new deadline, and has dropped the old one.
    pub(super) fn restart_deadline(&mut self) {
        self.deadline = self.deadline.map(|_| Instant::now() + ANSWER_TIMEOUT);
        self.queued_deadline = None;
    }

    /// Returns whether there may be a packet for the guest.
    pub(super) fn wants_to_send(&self) -> bool {
        let DuePackets { request, response, credit, ask_credit, shutdown } = self.state.due;
        let control = request || response || credit || ask_credit || shutdown;
        control || self.may_read() && (self.credit() > 0 || !self.state.credit_asked)
    }

    fn may_read(&self) -> bool {
        self.readable
            && self.state.phase == ConnectionPhase::Open
            && self.state.host_shut & NO_SEND == 0
            && self.state.guest_shut & NO_RECEIVE == 0
    }

    /// Returns the next packet for the guest, if there is one, and puts its data into `data`.
    pub(super) fn next_packet(&mut self, data: &mut [u8]) -> Option<PacketHeader> {
        if let Some(op) = self.state.due.take() {
            return Some(self.header(op, 0));
        }
        if self.may_read() {
            match self.read(data) {
                Some(len) if len > 0 => return Some(self.header(op::RW, len)),
                _ if std::mem::take(&mut self.state.due.ask_credit) => {
                    return Some(self.header(op::CREDIT_REQUEST, 0));
                }
                _ => {}
            }
        }
        // The shutdown follows all data that the program has sent.
        let shutdown = std::mem::take(&mut self.state.due.shutdown);
        shutdown.then(|| PacketHeader {
            flags: self.state.host_shut.into(),
            ..self.header(op::SHUTDOWN, 0)
        })
    }

    /// Reads from the stream as many bytes as the guest has room for.
    fn read(&mut self, data: &mut [u8]) -> Option<u32> {
        let most = data.len().min(self.credit() as usize);
        if most == 0 {
            self.state.due.ask_credit = !std::mem::replace(&mut self.state.credit_asked, true);
            return None;
        }
        loop {
            match (&*self.stream).read(&mut data[..most]) {
                Ok(0) => {}
                Ok(len) => {
                    self.state.sent = self.state.sent.wrapping_add(len as u32);
                    return Some(len as u32);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    return None;
                }
                Err(_) => self.state.hung_up = true,
            }
            self.shut(if self.state.hung_up { NO_SEND | NO_RECEIVE } else { NO_SEND });
            return None;
        }
    }

    fn header(&mut self, op: u16, len: u32) -> PacketHeader {
        self.state.reported = self.state.forwarded;
        PacketHeader {
            src_cid: HOST_CID.into(),
            dst_cid: self.guest_cid.into(),
            src_port: self.state.ports.host.into(),
            dst_port: self.state.ports.guest.into(),
            len: len.into(),
            kind: STREAM.into(),
            op: op.into(),
            flags: 0.into(),
            buf_alloc: ROOM.into(),
            fwd_cnt: self.state.forwarded.into(),
        }
    }
}
