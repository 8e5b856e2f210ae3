//! A connection of the guest: requests in, answers out, one at a time.

use std::time::Duration;

use smoltcp::iface::SocketHandle;
use smoltcp::socket::tcp::{Socket, State};

use super::http::{ReadRequest, Reply};

/// Longest request, in bytes. A connection with a longer one is reset, as in Firecracker.
pub(super) const MAX_REQUEST: usize = 2500;

/// Progress of a connection. Every byte in either direction changes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct MmdsProgress {
    state: State,
    /// Bytes that TCP has received.
    received: u64,
    /// Bytes that the guest has acknowledged.
    acknowledged: u64,
}

/// A connection, or a socket that waits for one.
pub(super) struct MmdsConnection {
    pub(super) socket: SocketHandle,
    /// Whether the guest has begun the connection.
    pub(super) is_begun: bool,
    /// Time of its last progress.
    pub(super) active_at: Duration,
    /// Its progress at that time.
    progress: MmdsProgress,
    /// Bytes that were taken from TCP.
    taken: u64,
    /// Bytes that were given to TCP.
    given: u64,
    /// Received bytes that are not answered yet.
    request: Vec<u8>,
    /// Length of `request` when it was last found incomplete.
    partial: usize,
    answer: Vec<u8>,
    /// Bytes of the answer that TCP has.
    sent: usize,
    /// Whether the connection ends after the answer.
    closes: bool,
}

impl MmdsConnection {
    pub(super) fn new(socket: SocketHandle) -> Self {
        Self {
            socket,
            is_begun: false,
            active_at: Duration::ZERO,
            progress: MmdsProgress { state: State::Listen, received: 0, acknowledged: 0 },
            taken: 0,
            given: 0,
            request: Vec::new(),
            partial: 0,
            answer: Vec::new(),
            sent: 0,
            closes: false,
        }
    }

    /// Exchanges bytes with TCP, and answers the complete requests in them with `read`. The same
    /// bytes are passed to `read` again only if more have arrived.
    pub(super) fn exchange(
        &mut self,
        tcp: &mut Socket<'_>,
        now: Duration,
        mut read: impl FnMut(&[u8]) -> ReadRequest,
    ) {
        // Each round but the last answers a whole request of the bounded input.
        while self.send(tcp) && !self.closes && self.receive(tcp) {
            let found = match self.request.len() > self.partial {
                true => read(&self.request),
                false => ReadRequest::Partial,
            };
            let (len, Reply { bytes, closes }) = match found {
                ReadRequest::Whole(len, reply) => (len, reply),
                ReadRequest::Malformed(reply) => (self.request.len(), reply),
                ReadRequest::Partial if self.request.len() >= MAX_REQUEST => {
                    tcp.abort();
                    break;
                }
                ReadRequest::Partial => {
                    self.partial = self.request.len();
                    if !tcp.may_recv() {
                        tcp.close();
                    }
                    break;
                }
            };
            self.request.drain(..len);
            self.partial = 0;
            (self.answer, self.sent, self.closes) = (bytes, 0, closes);
        }
        let progress = MmdsProgress {
            state: tcp.state(),
            received: self.taken + tcp.recv_queue() as u64,
            acknowledged: self.given.saturating_sub(tcp.send_queue() as u64),
        };
        if std::mem::replace(&mut self.progress, progress) != progress {
            self.active_at = now;
        }
    }

    /// Gives the answer to TCP. Returns whether TCP has all of it.
    fn send(&mut self, tcp: &mut Socket<'_>) -> bool {
        let rest = &self.answer[self.sent..];
        if !rest.is_empty() {
            let sent = tcp.send_slice(rest).unwrap_or(0);
            self.sent += sent;
            self.given += sent as u64;
        }
        if self.sent < self.answer.len() {
            return false;
        }
        self.answer = Vec::new();
        self.sent = 0;
        if self.closes {
            tcp.close();
        }
        true
    }

    /// Takes received bytes. Returns whether the connection may have a request, now or later.
    fn receive(&mut self, tcp: &mut Socket<'_>) -> bool {
        while self.request.len() < MAX_REQUEST && tcp.can_recv() {
            let room = MAX_REQUEST - self.request.len();
            let taken = tcp.recv(|bytes| {
                let taken = &bytes[..bytes.len().min(room)];
                self.request.extend(taken);
                (taken.len(), taken.len())
            });
            let Ok(taken) = taken else { break };
            self.taken += taken as u64;
        }
        matches!(tcp.state(), State::Established | State::CloseWait)
    }
}
