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
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
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
    pub(super) ports: Ports,
    guest_cid: u64,
    /// Shared with the thread that sends it to the next process.
    stream: Arc<UnixStream>,
    phase: ConnectionPhase,
    due: DuePackets,
    /// Whether the connection is in the device's send order.
    pub(super) queued: bool,
    /// Deadline that the device has queued.
    pub(super) queued_deadline: Option<Instant>,
    /// Deadline for the guest's answer, if the device waits for one.
    deadline: Option<Instant>,
    /// Whether the stream may be readable.
    readable: bool,
    /// Whether the peer has closed the stream in both directions.
    hung_up: bool,
    /// Bytes from the guest that the stream has not taken yet, at most [`ROOM`].
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

/// State of a connection that continues in another process. Its bytes are hostile there.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct MovedConnection {
    ports: (u32, u32),
    phase: ConnectionPhase,
    due: DuePackets,
    hung_up: bool,
    #[serde(serialize_with = "write_backlog", deserialize_with = "read_backlog")]
    backlog: VecDeque<u8>,
    forwarded: u32,
    reported: u32,
    guest_room: u32,
    guest_forwarded: u32,
    sent: u32,
    credit_asked: bool,
    guest_shut: u32,
    host_shut: u32,
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
    pub(super) fn ports(&self) -> Ports {
        Ports { guest: self.ports.0, host: self.ports.1 }
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
        Self {
            ports,
            guest_cid: guest_cid.into(),
            stream: stream.into(),
            phase,
            due,
            queued: false,
            queued_deadline: None,
            deadline: None,
            readable: true,
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
        }
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
        let moved = MovedConnection {
            ports: (self.ports.guest, self.ports.host),
            phase: self.phase,
            due: self.due,
            hung_up: self.hung_up,
            backlog: self.backlog.clone(),
            forwarded: self.forwarded,
            reported: self.reported,
            guest_room: self.guest_room,
            guest_forwarded: self.guest_forwarded,
            sent: self.sent,
            credit_asked: self.credit_asked,
            guest_shut: self.guest_shut,
            host_shut: self.host_shut,
            awaits_guest: self.deadline.is_some(),
        };
        (moved, self.stream.clone())
    }

    /// Returns a connection of another process, which continues here. `None` if there can be no
    /// such state.
    pub(super) fn arrived(
        moved: MovedConnection,
        guest_cid: u32,
        stream: Arc<UnixStream>,
    ) -> Option<Self> {
        let shut = moved.guest_shut | moved.host_shut;
        if shut & !(NO_RECEIVE | NO_SEND) != 0 {
            return None;
        }
        let ports = moved.ports();
        Some(Self {
            deadline: moved.awaits_guest.then(|| Instant::now() + ANSWER_TIMEOUT),
            hung_up: moved.hung_up,
            backlog: moved.backlog,
            forwarded: moved.forwarded,
            reported: moved.reported,
            guest_room: moved.guest_room,
            guest_forwarded: moved.guest_forwarded,
            sent: moved.sent,
            credit_asked: moved.credit_asked,
            guest_shut: moved.guest_shut,
            host_shut: moved.host_shut,
            ..Self::new(ports, guest_cid, stream, moved.phase, moved.due)
        })
    }

    /// Closes the stream, also for another process that may have it.
    pub(super) fn close(&self) {
        close(&self.stream);
    }

    fn note_credit(&mut self, header: &PacketHeader) {
        self.guest_room = header.buf_alloc.get();
        self.guest_forwarded = header.fwd_cnt.get();
    }

    /// Returns the number of bytes that the guest has room for.
    fn credit(&self) -> u32 {
        self.guest_room.saturating_sub(self.sent.wrapping_sub(self.guest_forwarded))
    }

    /// Handles a packet of the guest, whose data is `data`.
    pub(super) fn take(&mut self, header: &PacketHeader, data: &[u8]) -> ConnectionOutcome {
        self.note_credit(header);
        if self.credit() > 0 {
            self.credit_asked = false;
        }
        match (header.op.get(), self.phase) {
            (op::RST, _) => return ConnectionOutcome::Closed,
            (op::RESPONSE, ConnectionPhase::Requested) => {
                self.phase = ConnectionPhase::Open;
                self.deadline = None;
                let greeting = format!("OK {}\n", self.ports.host);
                // A new stream has room for one line.
                if (&*self.stream).write_all(greeting.as_bytes()).is_err() {
                    return ConnectionOutcome::Reset;
                }
            }
            (_, ConnectionPhase::Requested) => return ConnectionOutcome::Reset,
            (op::RW, _) => {
                let full = self.backlog.len() + data.len() > ROOM as usize;
                if full || self.guest_shut & NO_SEND != 0 {
                    return ConnectionOutcome::Reset;
                }
                self.forward(data);
            }
            (op::SHUTDOWN, _) => {
                self.guest_shut |= header.flags.get() & (NO_RECEIVE | NO_SEND);
                self.shut_stream();
            }
            (op::CREDIT_REQUEST, _) => self.due.credit = true,
            (op::CREDIT_UPDATE, _) => {}
            _ => return ConnectionOutcome::Reset,
        }
        self.outcome()
    }

    fn outcome(&self) -> ConnectionOutcome {
        let both = NO_RECEIVE | NO_SEND;
        match self.guest_shut == both && self.backlog.is_empty() {
            true => ConnectionOutcome::Reset,
            false => ConnectionOutcome::Continues,
        }
    }

    /// Writes `data` to the stream and keeps the bytes that the stream does not take.
    fn forward(&mut self, data: &[u8]) {
        self.backlog.extend(data);
        self.flush();
    }

    fn flush(&mut self) {
        while !self.backlog.is_empty() {
            match (&*self.stream).write(self.backlog.as_slices().0) {
                Ok(written) => {
                    self.backlog.drain(..written);
                    self.forwarded = self.forwarded.wrapping_add(written as u32);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // The program no longer reads the stream.
                    self.forwarded = self.forwarded.wrapping_add(self.backlog.len() as u32);
                    self.backlog.clear();
                    self.shut(NO_RECEIVE);
                }
            }
        }
        if self.forwarded.wrapping_sub(self.reported) >= CREDIT_UPDATE_BYTES {
            self.due.credit = true;
        }
        self.shut_stream();
    }

    /// Passes the guest's shutdown on to the stream. The write direction waits until all of the
    /// guest's data has been written. It is not an error if the stream is already closed.
    fn shut_stream(&self) {
        if self.guest_shut & NO_SEND != 0 && self.backlog.is_empty() {
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        if self.guest_shut & NO_RECEIVE != 0 {
            let _ = self.stream.shutdown(Shutdown::Read);
        }
    }

    /// Tells the guest which directions the host's program has shut down.
    fn shut(&mut self, flags: u32) {
        if self.host_shut | flags != self.host_shut {
            self.host_shut |= flags;
            self.due.shutdown = true;
            if self.host_shut == NO_SEND | NO_RECEIVE {
                self.deadline = Some(Instant::now() + ANSWER_TIMEOUT);
            }
        }
    }

    /// Handles a stream that is ready for reading or writing.
    pub(super) fn stream_ready(&mut self, hung_up: bool) -> ConnectionOutcome {
        self.readable = true;
        self.hung_up |= hung_up;
        if self.phase == ConnectionPhase::Open {
            self.flush();
            // No later read will detect the end of the stream.
            let all_read = self.host_shut & NO_SEND != 0 || self.guest_shut & NO_RECEIVE != 0;
            if self.hung_up && all_read {
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

    /// Restarts the time limit, because the guest did not run meanwhile.
    pub(super) fn restart_deadline(&mut self) {
        self.deadline = self.deadline.map(|_| Instant::now() + ANSWER_TIMEOUT);
    }

    /// Returns whether there may be a packet for the guest.
    pub(super) fn wants_to_send(&self) -> bool {
        let DuePackets { request, response, credit, ask_credit, shutdown } = self.due;
        let control = request || response || credit || ask_credit || shutdown;
        control || self.may_read() && (self.credit() > 0 || !self.credit_asked)
    }

    fn may_read(&self) -> bool {
        self.readable
            && self.phase == ConnectionPhase::Open
            && self.host_shut & NO_SEND == 0
            && self.guest_shut & NO_RECEIVE == 0
    }

    /// Returns the next packet for the guest, if there is one, and puts its data into `data`.
    pub(super) fn next_packet(&mut self, data: &mut [u8]) -> Option<PacketHeader> {
        if let Some(op) = self.due.take() {
            return Some(self.header(op, 0));
        }
        if self.may_read() {
            match self.read(data) {
                Some(len) if len > 0 => return Some(self.header(op::RW, len)),
                _ if std::mem::take(&mut self.due.ask_credit) => {
                    return Some(self.header(op::CREDIT_REQUEST, 0));
                }
                _ => {}
            }
        }
        // The shutdown follows all data that the program has sent.
        let shutdown = std::mem::take(&mut self.due.shutdown);
        shutdown
            .then(|| PacketHeader { flags: self.host_shut.into(), ..self.header(op::SHUTDOWN, 0) })
    }

    /// Reads from the stream as many bytes as the guest has room for.
    fn read(&mut self, data: &mut [u8]) -> Option<u32> {
        let most = data.len().min(self.credit() as usize);
        if most == 0 {
            self.due.ask_credit = !std::mem::replace(&mut self.credit_asked, true);
            return None;
        }
        loop {
            match (&*self.stream).read(&mut data[..most]) {
                Ok(0) => {}
                Ok(len) => {
                    self.sent = self.sent.wrapping_add(len as u32);
                    return Some(len as u32);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    return None;
                }
                Err(_) => self.hung_up = true,
            }
            self.shut(if self.hung_up { NO_SEND | NO_RECEIVE } else { NO_SEND });
            return None;
        }
    }

    fn header(&mut self, op: u16, len: u32) -> PacketHeader {
        self.reported = self.forwarded;
        PacketHeader {
            src_cid: HOST_CID.into(),
            dst_cid: self.guest_cid.into(),
            src_port: self.ports.host.into(),
            dst_port: self.ports.guest.into(),
            len: len.into(),
            kind: STREAM.into(),
            op: op.into(),
            flags: 0.into(),
            buf_alloc: ROOM.into(),
            fwd_cnt: self.forwarded.into(),
        }
    }
}
