//! The TLS session of one connection, between its socket and its owner.
//!
//! The session holds at most [`INCOMING`] bytes from the socket, at most as many bytes of plaintext
//! that the owner has not read yet, and at most [`SMALL`] bytes of ciphertext before that of one
//! [`PIECE`].

pub(super) mod offload;
#[cfg(test)]
mod tests;

use std::io::{self, Read};

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::{CertificateError, CommonState};
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{Bytes, VolatileSlice};

use super::super::socket::{Socket, outside};
use super::error::TlsError;
use super::kernel::NEW_KEYS_EXPECTED;
use super::names::{PeerName, check_certificate};
use super::outgoing::Outgoing;
use super::records::{RecordBoundary, SentRecords};
use super::status::{Plain, PlainOutput, TlsStep, end, on_status, refresh};
use driftline_format::MAGIC_STREAM;

/// Plaintext that is encrypted at a time: 8 records, which fit into a processor's cache.
const PIECE: usize = 128 << 10;
/// Bytes that are read from the socket at a time.
const INCOMING: usize = 128 << 10;
/// Upper bound on the bytes of one record.
const MAX_RECORD: usize = 17 << 10;
/// Upper bound on ciphertext to which more is added before it is written.
const SMALL: usize = 4096;
/// The first byte of a TLS record with a handshake message, and with an alert.
const RECORD_TYPES: [u8; 2] = [22, 21];

/// A TLS session.
pub(crate) struct TlsSession {
    connection: TlsConnection,
    /// The name of the server, for messages.
    expected: Option<String>,
    incoming: Box<[u8]>,
    /// The bytes in `incoming` that are not processed yet.
    unprocessed: std::ops::Range<usize>,
    /// Where the record ends that is being read, during the handshake.
    boundary: RecordBoundary,
    plain: Plain,
    outgoing: Outgoing,
    /// Plaintext of one piece, because guest memory may change while it is encrypted.
    piece: Box<[u8]>,
    sent: SentRecords,
    /// Whether this side has offered [`NEW_KEYS_EXPECTED`], whatever the peer has answered.
    new_keys: bool,
    has_begun: bool,
    peer_has_ended: bool,
    /// Why the session has failed, after which rustls gets nothing to process.
    failure: Option<rustls::Error>,
}

enum TlsConnection {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

impl std::fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsSession").field("has_begun", &self.has_begun).finish_non_exhaustive()
    }
}

impl TlsSession {
    /// Returns the session of a source. `new_keys` says that it offers [`NEW_KEYS_EXPECTED`].
    pub(super) fn client(
        connection: UnbufferedClientConnection,
        peer: &PeerName,
        new_keys: bool,
    ) -> Self {
        let session =
            Self::new(TlsConnection::Client(Box::new(connection)), Some(peer.to_string()));
        Self { new_keys, ..session }
    }

    pub(super) fn server(connection: UnbufferedServerConnection) -> Self {
        Self::new(TlsConnection::Server(Box::new(connection)), None)
    }

    fn new(connection: TlsConnection, expected: Option<String>) -> Self {
        Self {
            connection,
            expected,
            incoming: vec![0; INCOMING].into(),
            unprocessed: 0..0,
            boundary: RecordBoundary::default(),
            plain: Plain::default(),
            outgoing: Outgoing::default(),
            piece: Box::default(),
            sent: SentRecords::default(),
            new_keys: false,
            has_begun: false,
            peer_has_ended: false,
            failure: None,
        }
    }

    /// Whether keys of the session may change before it has sent what they allow.
    fn expects_new_keys(&self) -> bool {
        self.new_keys || self.state().alpn_protocol() == Some(NEW_KEYS_EXPECTED)
    }

    fn state(&self) -> &CommonState {
        match &self.connection {
            TlsConnection::Client(connection) => connection,
            TlsConnection::Server(connection) => connection,
        }
    }

    /// Fails unless the peer's certificate has one of these names.
    pub(in super::super) fn check_peer(&self, allowed: &[PeerName]) -> Result<(), TlsError> {
        let chain = self.state().peer_certificates();
        check_certificate(chain.and_then(|chain| chain.first()), allowed)
    }

    /// Continues the handshake until it ends. Reads from the socket once, so that the caller can
    /// check its limits however slowly the peer sends; the next call continues.
    pub(in super::super) fn handshake(&mut self, socket: &mut Socket) -> io::Result<()> {
        let mut has_read = false;
        loop {
            self.outgoing.write_to(socket)?;
            let step = if self.is_undecided() { Ok(TlsStep::Blocked) } else { self.step(None) };
            let step = step.inspect_err(|_| {
                // Sends the peer the alert. If a part of it is left, it is written when the
                // connection is closed.
                let _ = self.outgoing.write_to(socket);
            })?;
            match step {
                TlsStep::Ended => return Err(TlsError::Vanished.into()),
                _ if !self.outgoing.is_empty() => {}
                TlsStep::Blocked if !self.state().is_handshaking() => return Ok(()),
                TlsStep::Decrypted => return Ok(()),
                TlsStep::Blocked if has_read => return Err(io::ErrorKind::WouldBlock.into()),
                TlsStep::Blocked => {
                    if self.fill_record(socket)? == 0 {
                        return Err(TlsError::Vanished.into());
                    }
                    has_read = true;
                    self.check_first_bytes()?;
                }
                TlsStep::More | TlsStep::Encrypted => {}
            }
        }
    }

    /// Whether the peer has sent too little to tell whether it uses TLS.
    fn is_undecided(&self) -> bool {
        !self.has_begun && !self.unprocessed.is_empty()
    }

    /// Fails if the peer's first bytes are not of TLS.
    fn check_first_bytes(&mut self) -> Result<(), TlsError> {
        if self.has_begun {
            return Ok(());
        }
        let first = &self.incoming[self.unprocessed.clone()];
        let magic = MAGIC_STREAM;
        if first.len() < magic.len() && magic.starts_with(first) {
            return Ok(());
        }
        self.has_begun = true;
        match first.first() {
            _ if first.starts_with(&magic) => Err(TlsError::PlainPeer),
            Some(kind) if RECORD_TYPES.contains(kind) => Ok(()),
            _ => Err(TlsError::NotTls),
        }
    }

    /// Reads from the socket into the buffer. Returns 0 at the connection's end.
    fn fill(&mut self, socket: &mut Socket) -> io::Result<usize> {
        self.fill_at_most(socket, INCOMING)
    }

    /// Reads from the socket into the buffer, nothing behind the current record: it may be the last
    /// one of the handshake, and the kernel may decrypt those that follow. Returns 0 at the
    /// connection's end.
    fn fill_record(&mut self, socket: &mut Socket) -> io::Result<usize> {
        let read = self.fill_at_most(socket, self.boundary.missing())?;
        let end = self.unprocessed.end;
        self.boundary.advance(&self.incoming[end - read..end]);
        Ok(read)
    }

    fn fill_at_most(&mut self, socket: &mut Socket, most: usize) -> io::Result<usize> {
        if self.unprocessed.is_empty() {
            self.unprocessed = 0..0;
        } else if self.incoming.len() - self.unprocessed.end < MAX_RECORD {
            self.incoming.copy_within(self.unprocessed.clone(), 0);
            self.unprocessed = 0..self.unprocessed.len();
        }
        let room = &mut self.incoming[self.unprocessed.end..];
        let most = most.min(room.len());
        let read = socket.read(&mut room[..most])?;
        self.unprocessed.end += read;
        Ok(read)
    }

    /// Processes bytes that have arrived. Once none are left, encrypts the first `plaintext` bytes
    /// of the piece, if that is given.
    fn step(&mut self, plaintext: Option<usize>) -> Result<TlsStep, TlsError> {
        self.step_into(plaintext, &mut |_| 0)
    }

    /// Works as [`step`](Self::step), and passes decrypted bytes to `sink`, which returns how many
    /// of them it takes. The others wait in `plain`, and all later bytes behind them.
    fn step_into(
        &mut self,
        plaintext: Option<usize>,
        sink: &mut dyn FnMut(&[u8]) -> usize,
    ) -> Result<TlsStep, TlsError> {
        if let Some(e) = &self.failure {
            return Err(self.explained(e.clone()));
        }
        let step = self.process(plaintext, sink);
        self.peer_has_ended |= step == Ok(TlsStep::Ended);
        step.map_err(|e| {
            // rustls yields the alert of the failure before it processes anything else. Afterwards
            // it would process the bad record again, and fail again.
            while self.state().wants_write() {
                if self.process(None, &mut |_| 0) != Ok(TlsStep::More) {
                    break;
                }
            }
            self.failure = Some(e.clone());
            self.explained(e)
        })
    }

    fn process(
        &mut self,
        plaintext: Option<usize>,
        sink: &mut dyn FnMut(&[u8]) -> usize,
    ) -> Result<TlsStep, rustls::Error> {
        // Always all bytes: rustls refers to parts of messages by their place in the buffer.
        let incoming = &mut self.incoming[self.unprocessed.clone()];
        let plaintext = plaintext.map(|length| &self.piece[..length]);
        let mut plain = PlainOutput { waiting: &mut self.plain, sink };
        let (plain, outgoing) = (&mut plain, &mut self.outgoing);
        let (discard, step) = match &mut self.connection {
            TlsConnection::Client(connection) => {
                let status = connection.process_tls_records(incoming);
                on_status::<ClientConnectionData>(status, plain, outgoing, plaintext)
            }
            TlsConnection::Server(connection) => {
                let status = connection.process_tls_records(incoming);
                on_status::<ServerConnectionData>(status, plain, outgoing, plaintext)
            }
        };
        self.unprocessed.start = (self.unprocessed.start + discard).min(self.unprocessed.end);
        step
    }

    fn explained(&self, e: rustls::Error) -> TlsError {
        match (&e, &self.expected) {
            (rustls::Error::InvalidCertificate(CertificateError::NotValidForName), Some(name)) => {
                TlsError::WrongName { expected: name.clone() }
            }
            _ => TlsError::Session(e),
        }
    }

    /// Passes at most `most` decrypted bytes to `put`, each piece with its offset among them.
    /// Returns their number, 0 at the end of the session. Reads from the socket once, as
    /// [`handshake`](Self::handshake) does.
    fn read_plain(
        &mut self,
        socket: &mut Socket,
        most: usize,
        mut put: impl FnMut(usize, &[u8]) -> io::Result<()>,
    ) -> io::Result<usize> {
        let (mut done, mut has_read) = (0, false);
        while self.plain.is_empty() && done == 0 {
            if self.peer_has_ended {
                return Ok(0);
            }
            // Records are copied from the buffer in which they were decrypted.
            let mut failed = Ok(());
            let step = self.step_into(None, &mut |payload| {
                let length = payload.len().min(most - done);
                if length > 0 && failed.is_ok() {
                    failed = put(done, &payload[..length]);
                    done += length;
                }
                length
            });
            failed?;
            match step? {
                TlsStep::Blocked if has_read => return Err(io::ErrorKind::WouldBlock.into()),
                TlsStep::Blocked => {
                    if self.fill(socket)? == 0 {
                        return Err(TlsError::Truncated.into());
                    }
                    has_read = true;
                }
                TlsStep::More | TlsStep::Encrypted | TlsStep::Decrypted | TlsStep::Ended => {}
            }
        }
        if done == 0 {
            let rest = &self.plain.bytes[self.plain.read..];
            done = rest.len().min(most);
            put(0, &rest[..done])?;
            self.plain.read += done;
        }
        Ok(done)
    }

    /// Reads plaintext.
    pub(in super::super) fn read(
        &mut self,
        socket: &mut Socket,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        self.read_plain(socket, buf.len(), |at, piece| {
            buf[at..at + piece.len()].copy_from_slice(piece);
            Ok(())
        })
    }

    /// Reads plaintext into guest memory.
    pub(in super::super) fn read_volatile<B: BitmapSlice>(
        &mut self,
        socket: &mut Socket,
        slice: &VolatileSlice<'_, B>,
    ) -> io::Result<usize> {
        self.read_plain(socket, slice.len(), |at, piece| {
            slice.write_slice(piece, at).map_err(outside)
        })
    }

    /// Whether plaintext, a failure, or the end of the session can be read. Does not block.
    pub(in super::super) fn has_incoming(&mut self, socket: &mut Socket) -> bool {
        let mut has_read = false;
        loop {
            if !self.plain.is_empty() || self.peer_has_ended {
                return true;
            }
            match self.step(None) {
                Ok(TlsStep::Blocked) if has_read || !socket.has_incoming() => return false,
                Ok(TlsStep::Blocked) => match self.fill(socket) {
                    Ok(0) | Err(_) => return true,
                    Ok(_) => has_read = true,
                },
                Ok(_) => {}
                Err(_) => return true,
            }
        }
    }

    /// Encrypts as much of `parts` as a piece has room for. Returns its length. The ciphertext
    /// waits for [`flush`](Self::flush).
    pub(in super::super) fn encrypt<'a>(
        &mut self,
        parts: impl Iterator<Item = &'a [u8]>,
    ) -> Result<usize, TlsError> {
        self.allocate_piece();
        let mut length = 0;
        for part in parts {
            let room = &mut self.piece[length..];
            let fits = part.len().min(room.len());
            room[..fits].copy_from_slice(&part[..fits]);
            length += fits;
            if fits < part.len() {
                break;
            }
        }
        self.encrypt_piece(length)
    }

    /// Encrypts as much of guest memory as a piece has room for. Returns its length.
    pub(in super::super) fn encrypt_volatile<B: BitmapSlice>(
        &mut self,
        slice: &VolatileSlice<'_, B>,
    ) -> io::Result<usize> {
        self.allocate_piece();
        let length = slice.len().min(self.piece.len());
        slice.read_slice(&mut self.piece[..length], 0).map_err(outside)?;
        Ok(self.encrypt_piece(length)?)
    }

    /// Allocates the piece at its first use, so that a handshake does not cost its memory.
    fn allocate_piece(&mut self) {
        if self.piece.is_empty() {
            self.piece = vec![0; PIECE].into();
        }
    }

    fn encrypt_piece(&mut self, length: usize) -> Result<usize, TlsError> {
        if length == 0 {
            return Ok(0);
        }
        loop {
            match self.step(Some(length))? {
                TlsStep::Encrypted => {
                    self.sent.add(length);
                    return Ok(length);
                }
                // Nothing is read meanwhile, so what has arrived is bounded.
                TlsStep::More | TlsStep::Decrypted | TlsStep::Ended => {}
                TlsStep::Blocked => {
                    return Err(TlsError::Session(rustls::Error::HandshakeNotComplete));
                }
            }
        }
    }

    /// Encrypts with new keys from here on, if many records were sent with the current ones and the
    /// peer expects new ones. The message that announces them waits for [`flush`](Self::flush).
    pub(in super::super) fn refresh_keys(&mut self) -> Result<(), TlsError> {
        if !self.sent.are_many() || !self.expects_new_keys() {
            return Ok(());
        }
        self.sent.reset();
        self.process_all()?;
        let incoming = &mut self.incoming[self.unprocessed.clone()];
        let (discard, refreshed) = match &mut self.connection {
            TlsConnection::Client(c) => {
                refresh::<ClientConnectionData>(c.process_tls_records(incoming))
            }
            TlsConnection::Server(c) => {
                refresh::<ServerConnectionData>(c.process_tls_records(incoming))
            }
        };
        self.unprocessed.start += discard;
        refreshed.map_err(TlsError::Session)?;
        self.process_all()
    }

    /// Processes bytes that have arrived, and queues the session's own messages.
    fn process_all(&mut self) -> Result<(), TlsError> {
        while !matches!(self.step(None)?, TlsStep::Blocked | TlsStep::Ended) {}
        Ok(())
    }

    /// Whether ciphertext waits to be written.
    pub(in super::super) fn is_pending(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Writes the ciphertext that waits, unless it is little and can precede the next piece.
    pub(in super::super) fn make_room(&mut self, socket: &mut Socket) -> io::Result<()> {
        if self.outgoing.len() <= SMALL { Ok(()) } else { self.flush(socket) }
    }

    /// Writes the ciphertext that waits.
    pub(in super::super) fn flush(&mut self, socket: &mut Socket) -> io::Result<()> {
        self.outgoing.write_to(socket)
    }

    /// Ends this side of the session. The message waits for [`flush`](Self::flush).
    pub(in super::super) fn end(&mut self) {
        if self.failure.is_some() {
            return;
        }
        let incoming = &mut self.incoming[self.unprocessed.clone()];
        let outgoing = &mut self.outgoing;
        self.unprocessed.start += match &mut self.connection {
            TlsConnection::Client(c) => {
                end::<ClientConnectionData>(c.process_tls_records(incoming), outgoing)
            }
            TlsConnection::Server(c) => {
                end::<ServerConnectionData>(c.process_tls_records(incoming), outgoing)
            }
        };
    }
}
