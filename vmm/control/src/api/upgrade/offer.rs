//! What the next process gets before the guest.
//!
//! ```text
//! one byte with the descriptors | u32 length, little-endian | JSON
//! <- u32 length | JSON of the answer
//! <- one byte, once the next process has the guest and serves
//! ```

use std::env;
use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use driftline_machine::exit::SocketFile;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use crate::api::process_line::ProcessLine;
use crate::descriptors::{self, ReceivedDescriptors};
use crate::jobs::{JobNumbers, OfferedRun};

/// Version of the offer. A process refuses any other one.
const VERSION: u32 = 1;
/// Upper bound on the JSON of an offer, in bytes.
const MAX_OFFER_BYTES: u32 = 256 << 10;
/// Upper bound on the JSON of an answer, in bytes.
const MAX_ANSWER_BYTES: u32 = 16 << 10;
/// Upper bound on one read or write of the offer.
const IO_LIMIT: Duration = Duration::from_secs(10);
/// Upper bound on waiting until a next process that has the guest serves the API.
const SERVING_LIMIT: Duration = Duration::from_secs(5);
/// Upper bound on the next process's start: it may be loaded from a slow disk.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// The descriptors of a guest's process, besides those of its guest.
#[derive(Debug)]
pub struct OfferedFiles<F> {
    /// Standard input, output and error.
    pub standard: [F; 3],
    /// The listener of the API's socket.
    pub api: Option<F>,
    /// The listener of `--metrics-listen`.
    pub metrics: Option<F>,
    /// The channel over which the API's connections come.
    pub connections: F,
    /// The socket over which a checkpoint run comes.
    pub run: Option<F>,
}

/// What is offered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GuestOffer {
    version: u32,
    /// The process's command line.
    pub line: ProcessLine,
    /// The file of the API's socket, if the process removes it at its end.
    pub api_file: Option<SocketFile>,
    /// The address of the process's service manager.
    pub notify_socket: Option<String>,
    /// The numbers of the last jobs on the guest.
    pub numbers: JobNumbers,
    /// The checkpoint run that continues.
    pub run: Option<OfferedRun>,
    has_api: bool,
    has_metrics: bool,
}

/// What is offered besides descriptors.
pub(crate) struct Offered {
    pub(crate) line: ProcessLine,
    /// The file of the API's socket, if the process removes it at its end.
    pub(crate) api_file: Option<SocketFile>,
    pub(crate) numbers: JobNumbers,
    pub(crate) run: Option<OfferedRun>,
}

/// Returns the address of this process's service manager. A service manager follows only processes
/// of the same service.
pub fn notify_socket() -> Option<String> {
    env::var_os("NOTIFY_SOCKET").map(|address| address.to_string_lossy().into_owned())
}

/// An offer whose receiver is ready for the guest. Dropping it before the guest has been handed
/// over tells the receiver that the guest will not arrive.
#[derive(Debug)]
pub(crate) struct AcceptedOffer(UnixStream);

impl AcceptedOffer {
    /// Waits until the next process, which has the guest, serves the API, or has ended.
    pub(crate) fn await_serving(&self) {
        let waited = self.0.set_read_timeout(Some(SERVING_LIMIT));
        match waited.and_then(|()| (&self.0).read_exact(&mut [0])) {
            Ok(()) => {}
            Err(e) => tracing::warn!("the next process has the guest and does not answer: {e}"),
        }
    }
}

/// The answer of the next process.
#[derive(Serialize, Deserialize)]
enum OfferAnswer {
    Ready,
    Refused(String),
}

/// Why an offer fails.
#[derive(Debug, thiserror::Error)]
pub enum OfferError {
    /// The system refuses.
    #[error(transparent)]
    System(#[from] io::Error),
    /// The next process does not accept connections.
    #[error("it has not accepted earlier connections, and its backlog is full")]
    BacklogFull,
    /// It is not JSON of an offer or of an answer.
    #[error("what the other process sent is malformed: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The offer is one of another version of the program.
    #[error("the offer has version {0}, and this program understands version {VERSION}")]
    Version(u32),
    /// The offer, the answer, or what is sent of a checkpoint run, is too long.
    #[error("a message of {bytes} bytes exceeds the limit of {max} bytes")]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The upper bound.
        max: u32,
    },
    /// The number of descriptors is not the one that the offer states.
    #[error("{found} descriptors came with the offer instead of {expected}")]
    Descriptors {
        /// Number that came.
        found: usize,
        /// Number that the offer states.
        expected: usize,
    },
    /// The other process has ended.
    #[error("the other process has closed the connection")]
    Closed,
    /// The other process is another user's.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The next process refuses.
    #[error("the next process refuses: {0}")]
    Refused(String),
}

/// The other process is another user's.
#[derive(Debug, thiserror::Error)]
#[error("the other process is that of user {theirs}, and this one that of user {ours}")]
pub struct PeerError {
    /// The other process's user.
    pub theirs: u32,
    /// This process's user.
    pub ours: u32,
}

/// An offer that was received, and the connection over which it came.
#[derive(Debug)]
pub struct TakenOffer {
    /// What is offered.
    pub offer: GuestOffer,
    /// The descriptors.
    pub files: OfferedFiles<OwnedFd>,
    stream: UnixStream,
}

impl GuestOffer {
    /// Makes an offer to the process at the other end of `stream`. Returns once that process is
    /// ready for the guest.
    ///
    /// # Errors
    ///
    /// See [`OfferError`]. The guest is not affected.
    pub(crate) fn make(
        mut stream: UnixStream,
        offered: Offered,
        files: &OfferedFiles<BorrowedFd<'_>>,
    ) -> Result<AcceptedOffer, OfferError> {
        check_peer(&stream)?;
        let OfferedFiles { standard, api, metrics, connections, run: to_run } = files;
        let Offered { line, api_file, numbers, run } = offered;
        let (has_api, has_metrics) = (api.is_some(), metrics.is_some());
        let notify_socket = notify_socket();
        let offer = Self {
            version: VERSION,
            line,
            api_file,
            notify_socket,
            numbers,
            run,
            has_api,
            has_metrics,
        };
        let json = serde_json::to_vec(&offer)?;
        if json.len() > MAX_OFFER_BYTES as usize {
            return Err(OfferError::TooLong { bytes: json.len() as u64, max: MAX_OFFER_BYTES });
        }
        let optional = api.iter().chain(metrics).chain([connections]).chain(to_run);
        let all: Vec<BorrowedFd<'_>> = standard.iter().chain(optional).copied().collect();
        stream.set_write_timeout(Some(IO_LIMIT))?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        descriptors::send(&stream, &all)?;
        write(&mut stream, &json)?;
        match serde_json::from_slice(&read(&mut stream, MAX_ANSWER_BYTES)?)? {
            OfferAnswer::Ready => Ok(AcceptedOffer(stream)),
            OfferAnswer::Refused(why) => Err(OfferError::Refused(why)),
        }
    }
}

impl TakenOffer {
    /// Receives an offer over `stream`, or tells the other process why not.
    ///
    /// # Errors
    ///
    /// See [`OfferError`].
    pub fn receive(mut stream: UnixStream) -> Result<Self, OfferError> {
        stream.set_read_timeout(Some(IO_LIMIT))?;
        stream.set_write_timeout(Some(IO_LIMIT))?;
        let received = Self::read(&mut stream);
        let (offer, files) = received.inspect_err(|e| Self::refuse(&mut stream, &e.to_string()))?;
        Ok(Self { offer, files, stream })
    }

    fn read(stream: &mut UnixStream) -> Result<(GuestOffer, OfferedFiles<OwnedFd>), OfferError> {
        check_peer(stream)?;
        let received = descriptors::receive(&*stream)?.ok_or(OfferError::Closed)?;
        let json = read(stream, MAX_OFFER_BYTES)?;
        let version: OfferVersion = serde_json::from_slice(&json)?;
        if version.version != VERSION {
            return Err(OfferError::Version(version.version));
        }
        let offer: GuestOffer = serde_json::from_slice(&json)?;
        let files = files_of(&offer, received)?;
        Ok((offer, files))
    }

    /// Answers that this process is ready for the guest. The other process closes the connection
    /// when it no longer has the guest.
    ///
    /// # Errors
    ///
    /// See [`OfferError`].
    pub fn accept(stream: &mut UnixStream) -> Result<(), OfferError> {
        answer(stream, &OfferAnswer::Ready)?;
        Ok(stream.set_read_timeout(None)?)
    }

    /// Tells the other process that this one has the guest and serves the API.
    pub fn note_serving(mut stream: &UnixStream) {
        if let Err(e) = stream.write_all(&[0]) {
            tracing::debug!("the previous process has ended already: {e}");
        }
    }

    /// Answers why this process cannot take the guest.
    pub fn refuse(stream: &mut UnixStream, why: &str) {
        if let Err(e) = answer(stream, &OfferAnswer::Refused(why.to_owned())) {
            tracing::debug!("the refusal of an offer did not arrive: {e}");
        }
    }

    /// Returns the parts, with the connection for the answer.
    pub fn into_parts(self) -> (GuestOffer, OfferedFiles<OwnedFd>, UnixStream) {
        (self.offer, self.files, self.stream)
    }
}

/// The part of an offer that every version has.
#[derive(Deserialize)]
struct OfferVersion {
    version: u32,
}

fn answer(stream: &mut UnixStream, answer: &OfferAnswer) -> Result<(), OfferError> {
    Ok(write(stream, &serde_json::to_vec(answer)?)?)
}

pub(super) fn write(mut stream: impl Write, json: &[u8]) -> io::Result<()> {
    stream.write_all(&[&(json.len() as u32).to_le_bytes()[..], json].concat())
}

/// Reads JSON of at most `max` bytes.
pub(super) fn read(mut stream: impl Read, max: u32) -> Result<Vec<u8>, OfferError> {
    let mut length = [0; 4];
    match stream.read_exact(&mut length) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(OfferError::Closed),
        read => read?,
    }
    let length = u32::from_le_bytes(length);
    if length > max {
        return Err(OfferError::TooLong { bytes: length.into(), max });
    }
    // Grows with the bytes that arrive, whatever the length says.
    let mut json = Vec::new();
    stream.take(length.into()).read_to_end(&mut json)?;
    if json.len() < length as usize {
        return Err(OfferError::Closed);
    }
    Ok(json)
}

fn files_of(
    offer: &GuestOffer,
    received: ReceivedDescriptors,
) -> Result<OfferedFiles<OwnedFd>, OfferError> {
    let found = received.all.len();
    let optional = [offer.has_api, offer.has_metrics, offer.run.is_some()];
    let expected = 4 + optional.into_iter().filter(|has| *has).count();
    let mut all = received.all.into_iter();
    let wrong = || OfferError::Descriptors { found, expected };
    if found != expected || received.truncated {
        return Err(wrong());
    }
    let mut next = || all.next().ok_or_else(wrong);
    Ok(OfferedFiles {
        standard: [next()?, next()?, next()?],
        api: if offer.has_api { Some(next()?) } else { None },
        metrics: if offer.has_metrics { Some(next()?) } else { None },
        connections: next()?,
        run: if offer.run.is_some() { Some(next()?) } else { None },
    })
}

fn check_peer(stream: &UnixStream) -> Result<(), OfferError> {
    let theirs = socket_peercred(stream).map_err(io::Error::from)?.uid.as_raw();
    let ours = geteuid().as_raw();
    match theirs == ours || theirs == 0 {
        true => Ok(()),
        false => Err(PeerError { theirs, ours }.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn cut_message_is_a_closed_connection() {
        let mut message = Vec::new();
        write(&mut message, b"[1, 2]").unwrap();
        assert_eq!(read(&message[..], 6).unwrap(), b"[1, 2]");
        assert!(matches!(read(&message[..], 5), Err(OfferError::TooLong { bytes: 6, max: 5 })));
        for cut in 0..message.len() {
            assert!(matches!(read(&message[..cut], 6), Err(OfferError::Closed)), "{cut} bytes");
        }
    }

    /// Offers `json` with `count` descriptors. Returns what the next process finds, and what it
    /// answers.
    fn received(json: &[u8], count: usize) -> (OfferError, OfferAnswer) {
        let (mut offers, next) = UnixStream::pair().unwrap();
        let file = io::stdin();
        descriptors::send(&offers, &vec![file.as_fd(); count]).unwrap();
        write(&mut offers, json).unwrap();
        let refused = TakenOffer::receive(next).unwrap_err();
        let answer = read(&mut offers, MAX_ANSWER_BYTES).unwrap();
        (refused, serde_json::from_slice(&answer).unwrap())
    }

    #[test]
    fn refused_offer_is_answered_with_the_reason() {
        let json = br#"{"version":1,"line":{"arguments":[],"directory":"/"},"api_file":null,
            "notify_socket":null,"numbers":{"jobs":1,"watches":1},"run":null,"has_api":true,
            "has_metrics":false}"#;
        for count in [4, 6] {
            let (refused, answer) = received(json, count);
            assert!(matches!(refused, OfferError::Descriptors { expected: 5, .. }), "{refused}");
            let OfferAnswer::Refused(why) = answer else { panic!("it is ready") };
            assert_eq!(why, format!("{count} descriptors came with the offer instead of 5"));
        }
        // A later version may have other fields.
        let (refused, answer) = received(br#"{"version":2,"more":[]}"#, 4);
        assert!(matches!(refused, OfferError::Version(2)));
        let OfferAnswer::Refused(why) = answer else { panic!("it is ready") };
        assert_eq!(why, "the offer has version 2, and this program understands version 1");
    }
}
