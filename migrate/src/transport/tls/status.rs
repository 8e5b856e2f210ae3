//! What the state of a rustls session asks for.

use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};

use super::outgoing::Outgoing;

/// Upper bound on what encryption adds to a piece.
pub(super) const OVERHEAD: usize = 4096;

/// Decrypted bytes that were not read yet.
#[derive(Default)]
pub(super) struct Plain {
    pub(super) bytes: Vec<u8>,
    pub(super) read: usize,
}

/// Result of one step of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TlsStep {
    /// There is more to process.
    More,
    /// Plaintext can be read.
    Decrypted,
    /// More bytes from the peer are needed.
    Blocked,
    /// Plaintext was encrypted.
    Encrypted,
    /// The peer has ended the session.
    Ended,
}

impl Plain {
    pub(super) fn is_empty(&self) -> bool {
        self.read == self.bytes.len()
    }

    /// Adds bytes. Empties the buffer first if all were read.
    fn add(&mut self, bytes: &[u8]) {
        if self.is_empty() {
            self.bytes.clear();
            self.read = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }
}

/// Where decrypted bytes go.
pub(super) struct PlainOutput<'p> {
    pub(super) waiting: &'p mut Plain,
    pub(super) sink: &'p mut dyn FnMut(&[u8]) -> usize,
}

impl PlainOutput<'_> {
    fn add(&mut self, payload: &[u8]) {
        let taken = if self.waiting.is_empty() { (self.sink)(payload) } else { 0 };
        self.waiting.add(&payload[taken..]);
    }
}

/// Performs what the state of a session asks for. Returns the number of processed bytes.
pub(super) fn on_status<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    plain: &mut PlainOutput<'_>,
    outgoing: &mut Outgoing,
    plaintext: Option<&[u8]>,
) -> (usize, Result<TlsStep, rustls::Error>) {
    let UnbufferedStatus { mut discard, state, .. } = status;
    let step = state.and_then(|state| match state {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                let record = record?;
                discard += record.discard;
                plain.add(record.payload);
            }
            Ok(TlsStep::Decrypted)
        }
        ConnectionState::EncodeTlsData(mut data) => {
            let mut length = OVERHEAD;
            loop {
                match data.encode(outgoing.room(length)) {
                    Ok(written) => break outgoing.add(written),
                    Err(EncodeError::InsufficientSize(needed)) => length = needed.required_size,
                    Err(EncodeError::AlreadyEncoded) => break,
                }
            }
            Ok(TlsStep::More)
        }
        ConnectionState::TransmitTlsData(data) => {
            // The queue is written before anything that is encrypted later.
            data.done();
            Ok(TlsStep::More)
        }
        ConnectionState::WriteTraffic(mut traffic) => match plaintext {
            None => Ok(TlsStep::Blocked),
            Some(bytes) => match traffic.encrypt(bytes, outgoing.room(bytes.len() + OVERHEAD)) {
                Ok(written) => {
                    outgoing.add(written);
                    Ok(TlsStep::Encrypted)
                }
                Err(EncryptError::InsufficientSize(_) | EncryptError::EncryptExhausted) => {
                    Err(rustls::Error::EncryptError)
                }
            },
        },
        ConnectionState::PeerClosed => Ok(TlsStep::Ended),
        // Also once both sides have ended the session.
        _ => Ok(TlsStep::Blocked),
    });
    (discard, step)
}

/// Makes new keys. Returns the number of processed bytes.
pub(super) fn refresh<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
) -> (usize, Result<(), rustls::Error>) {
    let refreshed = status.state.and_then(|state| match state {
        ConnectionState::WriteTraffic(traffic) => traffic.refresh_traffic_keys(),
        // The peer has ended the session, which a later operation reports.
        _ => Ok(()),
    });
    (status.discard, refreshed)
}

/// Queues the end of a session, unless the peer's bytes come first. Returns the number of processed
/// bytes.
pub(super) fn end<Data>(status: UnbufferedStatus<'_, '_, Data>, outgoing: &mut Outgoing) -> usize {
    if let Ok(ConnectionState::WriteTraffic(mut traffic)) = status.state
        && let Ok(written) = traffic.queue_close_notify(outgoing.room(OVERHEAD))
    {
        outgoing.add(written);
    }
    status.discard
}
