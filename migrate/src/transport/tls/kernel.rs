//! A TLS session that is offloaded to the kernel, which encrypts and decrypts its records.
//!
//! The owner reads and writes the socket as one without TLS. A read that finds a record of another
//! type fails with `EIO`; that record is then received with its type. It ends the session: keys of
//! such a session never change, and nothing else than alerts may come after the handshake.

use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use driftline_format::kernel_tls::{self, RecordDirection, RecordKeys};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustls::pki_types::CertificateDer;
use rustls::{AlertDescription, ConnectionTrafficSecrets, Error, ExtractedSecrets, InvalidMessage};

use super::super::socket::Socket;
use super::error::TlsError;
use super::names::{PeerName, check_certificate};
use super::records::{MAX_PLAINTEXT, SentRecords};

/// ALPN protocol that a source offers if it may send so much over a connection that keys change.
pub(super) const NEW_KEYS_EXPECTED: &[u8] = b"driftline-new-keys";

/// Types of records.
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;

/// Alerts of this side: level, and description.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];
const UNEXPECTED_MESSAGE: [u8; 2] = [2, 10];

/// Type of the handshake message that announces new keys.
const KEY_UPDATE: u8 = 24;

/// Errors of a read that finds a record which is too long or too short, or which the keys do not
/// decrypt.
const BAD_RECORDS: [Errno; 3] = [Errno::BADMSG, Errno::MSGSIZE, Errno::INVAL];

/// Whether the kernel has refused keys of a session, although it offers TLS. Later sessions stay in
/// this process.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// A TLS session in the kernel.
pub(crate) struct KernelSession {
    /// The peer's certificate.
    certificate: Option<CertificateDer<'static>>,
    sent: SentRecords,
    /// An alert that waits to be sent.
    alert: Option<[u8; 2]>,
    end: KernelSessionEnd,
}

/// How the session ended.
#[derive(Clone, PartialEq, Debug)]
enum KernelSessionEnd {
    /// It has not.
    Open,
    /// The peer has ended it.
    Peer,
    /// It has failed.
    Failed(Error),
    /// The peer has changed its keys.
    NewKeys,
}

impl std::fmt::Debug for KernelSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelSession").field("end", &self.end).finish_non_exhaustive()
    }
}

/// Whether the kernel has refused keys since this process began.
pub(super) fn has_refused() -> bool {
    REFUSED.load(Ordering::Relaxed)
}

/// Keeps later sessions in this process.
pub(super) fn note_refusal() {
    REFUSED.store(true, Ordering::Relaxed);
}

impl KernelSession {
    /// Gives the keys of a session to the kernel, to which the socket is
    /// [attached](kernel_tls::attach).
    pub(super) fn begin(
        socket: &Socket,
        secrets: ExtractedSecrets,
        certificate: Option<CertificateDer<'static>>,
    ) -> Result<Self, TlsError> {
        set_keys(socket, RecordDirection::Send, secrets.tx)?;
        set_keys(socket, RecordDirection::Receive, secrets.rx)?;
        // Saves a copy. rustls never pads, and padded records are received as well.
        let _ = kernel_tls::expect_no_padding(socket);
        // With a time limit, the kernel would wait as long for each record without data, and for
        // each page that it sends.
        let set = socket.set_nonblocking();
        set.map_err(|cause| TlsError::Kernel { step: "O_NONBLOCK", cause })?;
        let (sent, end) = (SentRecords::default(), KernelSessionEnd::Open);
        Ok(Self { certificate, sent, alert: None, end })
    }

    /// Fails unless the peer's certificate has one of these names.
    pub(in super::super) fn check_peer(&self, allowed: &[PeerName]) -> Result<(), TlsError> {
        check_certificate(self.certificate.as_ref(), allowed)
    }

    /// Performs a read, unless the session has ended.
    pub(in super::super) fn read(
        &mut self,
        socket: &mut Socket,
        read: impl FnOnce(&mut Socket) -> io::Result<usize>,
    ) -> io::Result<usize> {
        if self.end == KernelSessionEnd::Open {
            socket.await_events(PollFlags::IN)?;
            match read(socket) {
                Ok(0) => return Err(TlsError::Truncated.into()),
                Err(e) if is(&e, Errno::IO) => self.receive_control(socket)?,
                Err(e) if is_bad_record(&e) => self.fail(Error::DecryptError),
                done => return done,
            }
        }
        self.result_of_end()
    }

    /// What a read returns after the end.
    fn result_of_end(&self) -> io::Result<usize> {
        match &self.end {
            KernelSessionEnd::Open => Err(io::ErrorKind::WouldBlock.into()),
            KernelSessionEnd::Peer => Ok(0),
            KernelSessionEnd::Failed(e) => Err(TlsError::Session(e.clone()).into()),
            KernelSessionEnd::NewKeys => Err(TlsError::KeysUsedUp.into()),
        }
    }

    /// Reads and drops what the peer has sent, whatever the state of the session. Returns 0 at the
    /// end of the connection.
    pub(in super::super) fn discard(
        &self,
        socket: &mut Socket,
        sink: &mut [u8],
    ) -> io::Result<usize> {
        socket.await_events(PollFlags::IN)?;
        match socket.read(sink) {
            Err(e) if is(&e, Errno::IO) => {
                kernel_tls::receive_record(&*socket, sink).map(|(_, length)| length)
            }
            done => done,
        }
    }

    /// Whether a record, a failure, or the end of the session can be read. Does not block, and
    /// leaves all of them to be read.
    pub(in super::super) fn has_incoming(&self, socket: &Socket) -> bool {
        self.end != KernelSessionEnd::Open || socket.is_ready(PollFlags::IN, Duration::ZERO)
    }

    /// Receives a record that is not data, which ends the session.
    fn receive_control(&mut self, socket: &Socket) -> io::Result<()> {
        let mut bytes = vec![0; MAX_PLAINTEXT as usize];
        let (kind, length) = kernel_tls::receive_record(socket, &mut bytes)?;
        self.end = end_by(kind, &bytes[..length]);
        if matches!(self.end, KernelSessionEnd::Failed(Error::InvalidMessage(_))) {
            self.alert.get_or_insert(UNEXPECTED_MESSAGE);
        }
        Ok(())
    }

    /// Ends the session. The kernel sends nothing after a record that it could not decrypt, so
    /// there is no alert.
    fn fail(&mut self, e: Error) {
        self.end = KernelSessionEnd::Failed(e);
    }

    /// Performs a write.
    pub(in super::super) fn write(
        &mut self,
        socket: &mut Socket,
        write: impl FnOnce(&mut Socket) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.check_keys()?;
        socket.await_events(PollFlags::OUT)?;
        let written = write(socket).map_err(|e| self.write_failed(e))?;
        self.sent.add(written);
        Ok(written)
    }

    /// Writes into a record that the next write continues.
    pub(in super::super) fn write_more(
        &mut self,
        socket: &Socket,
        bytes: &[u8],
    ) -> io::Result<usize> {
        self.check_keys()?;
        socket.await_events(PollFlags::OUT)?;
        let written = socket.write_more(bytes).map_err(|e| self.write_failed(e))?;
        self.sent.add_more(written);
        Ok(written)
    }

    /// Returns the error of a write. After a record that it could not decrypt, the kernel fails the
    /// next call, whichever that is.
    fn write_failed(&mut self, e: io::Error) -> io::Error {
        match is(&e, Errno::BADMSG) {
            true => {
                self.fail(Error::DecryptError);
                TlsError::Session(Error::DecryptError).into()
            }
            false => e,
        }
    }

    /// Fails if nothing may be sent any more.
    pub(in super::super) fn check_keys(&self) -> io::Result<()> {
        match &self.end {
            KernelSessionEnd::Failed(e) => Err(TlsError::Session(e.clone()).into()),
            _ if self.sent.are_too_many() => Err(TlsError::KeysUsedUp.into()),
            _ => Ok(()),
        }
    }

    /// Ends this side of the session. The message waits for [`flush`](Self::flush).
    pub(in super::super) fn end(&mut self) {
        self.alert.get_or_insert(CLOSE_NOTIFY);
    }

    /// Whether an alert waits to be sent.
    pub(in super::super) fn is_pending(&self) -> bool {
        self.alert.is_some()
    }

    /// Sends the alert that waits.
    pub(in super::super) fn flush(&mut self, socket: &Socket) -> io::Result<()> {
        if let Some(alert) = self.alert {
            socket.await_events(PollFlags::OUT)?;
            kernel_tls::send_record(socket, ALERT, &alert)?;
            self.alert = None;
        }
        Ok(())
    }
}

/// Gives keys and the number of the next record to the kernel.
fn set_keys(
    socket: &Socket,
    direction: RecordDirection,
    (sequence, secrets): (u64, ConnectionTrafficSecrets),
) -> Result<(), TlsError> {
    let step = match direction {
        RecordDirection::Send => "TLS_TX",
        RecordDirection::Receive => "TLS_RX",
    };
    let set = match &secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv } => {
            let iv = iv.as_ref().try_into().map_err(io::Error::other);
            iv.and_then(|iv| {
                let keys = RecordKeys { key: key.as_ref(), iv, sequence };
                kernel_tls::set_keys(socket, direction, &keys)
            })
        }
        _ => Err(io::ErrorKind::Unsupported.into()),
    };
    set.map_err(|cause| {
        note_refusal();
        TlsError::Kernel { step, cause }
    })
}

/// Returns how a record that is not data ends the session.
fn end_by(kind: u8, bytes: &[u8]) -> KernelSessionEnd {
    match (kind, bytes) {
        (ALERT, [_, 0, ..]) => KernelSessionEnd::Peer,
        (ALERT, [_, alert, ..]) => {
            let alert = AlertDescription::from(*alert);
            KernelSessionEnd::Failed(Error::AlertReceived(alert))
        }
        (HANDSHAKE, [KEY_UPDATE, ..]) => KernelSessionEnd::NewKeys,
        _ => {
            let unexpected = InvalidMessage::UnexpectedMessage("a record in a session");
            KernelSessionEnd::Failed(unexpected.into())
        }
    }
}

fn is(e: &io::Error, errno: Errno) -> bool {
    e.raw_os_error() == Some(errno.raw_os_error())
}

fn is_bad_record(e: &io::Error) -> bool {
    BAD_RECORDS.iter().any(|errno| is(e, *errno))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use rustls::crypto::cipher::{AeadKey, Iv};

    use super::*;

    #[test]
    fn other_records_end_the_session() {
        assert_eq!(end_by(ALERT, &CLOSE_NOTIFY), KernelSessionEnd::Peer);
        let unknown_ca = Error::AlertReceived(AlertDescription::UnknownCA);
        assert_eq!(end_by(ALERT, &[2, 48]), KernelSessionEnd::Failed(unknown_ca));
        assert_eq!(end_by(HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 0]), KernelSessionEnd::NewKeys);
        let unexpected: [(u8, &[u8]); 5] = [
            (ALERT, &[2]),
            (HANDSHAKE, &[4, 0, 0, 0]),
            (HANDSHAKE, &[1, 0, 0, 0]),
            (HANDSHAKE, &[]),
            (23, &[0]),
        ];
        for (kind, bytes) in unexpected {
            let end = end_by(kind, bytes);
            let is_failed = matches!(end, KernelSessionEnd::Failed(Error::InvalidMessage(_)));
            assert!(is_failed, "{kind} {bytes:?}: {end:?}");
        }
    }

    #[test]
    fn refused_keys_leave_later_sessions_to_this_process() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = Socket::new(stream.into()).unwrap();
        let secrets = || {
            let (key, iv) = (AeadKey::from([0; 32]), Iv::from([0; 12]));
            (0, ConnectionTrafficSecrets::Aes256Gcm { key, iv })
        };
        let secrets = ExtractedSecrets { tx: secrets(), rx: secrets() };
        // The socket is not attached.
        let refused = KernelSession::begin(&socket, secrets, None).unwrap_err();
        assert!(matches!(refused, TlsError::Kernel { step: "TLS_TX", .. }), "{refused}");
        assert!(has_refused());
    }
}
