//! The listener: who calls, and what they are told.
//!
//! One thread accepts; each caller is heard by a short-lived thread of its own, so that nobody who is
//! silent keeps another waiting. The first source whose CONFIG is here gets the seat, the others are
//! refused; a question is answered, all else is turned away. The door outlives the migration: it
//! answers questions until it is dropped.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use checkpoint::DriveHead;
use checkpoint::format::{FormatError, Header};
use dirty_tracker::Layout;
use socket2::SockRef;

use super::ledger::Ledger;
use crate::control::{ReceiveControl, Stop};
use crate::error::WireError;
use crate::link::{Link, SLICE};
use crate::message::{DriveMessage, FEATURES, Message, Purpose, Tag, Token, Verdict};
use crate::wire::{Wire, unexpected};

/// Callers heard at once; more are turned away without a word.
const MAX_CALLERS: usize = 16;

/// How long a source that was told the verdict may take to say that it is settled.
const ENDED_LIMIT: Duration = Duration::from_secs(5);

/// What the door tells the thread that receives.
#[derive(Debug)]
pub(super) enum Knock {
    /// A source that has the seat.
    Source(Box<Caller>),
    /// One more connection of the migration that has the seat.
    Joined(Box<Wire<Link>>),
    /// A source that was heard and then lost, while nobody had the seat.
    Left { peer: String, cause: WireError },
}

/// A source that has the seat, and the guest that it wants to have built.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) wire: Wire<Link>,
    pub(super) header: Header,
    pub(super) token: Token,
    pub(super) drives: Vec<DriveHead>,
    pub(super) layout: Layout,
    pub(super) config: Vec<u8>,
    pub(super) came: Instant,
}

/// What a source says of its guest.
struct Described {
    token: Token,
    drives: Vec<DriveHead>,
    layout: Layout,
    config: Vec<u8>,
}

/// Answers QUERY in the background; dropping it closes the listener.
#[derive(Debug)]
pub struct Responder {
    address: SocketAddr,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl Responder {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        self.stop.force();
        if let Some(thread) = self.thread.take() {
            // It owns nothing that a panic could have left undone.
            let _ = thread.join();
        }
    }
}

/// What each caller's thread needs.
struct Porter {
    ledger: Arc<Ledger>,
    control: Arc<ReceiveControl>,
    callers: Sender<Knock>,
    stop: Arc<Stop>,
    patience: Duration,
    handshake: Duration,
    busy: AtomicUsize,
}

/// Opens the door: sources come out of the channel.
pub(super) fn open(
    listener: TcpListener,
    ledger: Arc<Ledger>,
    control: Arc<ReceiveControl>,
    patience: Duration,
    handshake: Duration,
) -> io::Result<(Responder, Receiver<Knock>)> {
    let address = listener.local_addr()?;
    listener.set_nonblocking(false)?;
    // accept(2) honours the receive timeout: the thread looks at its stop flag once a slice.
    SockRef::from(&listener).set_read_timeout(Some(SLICE))?;
    let (callers, called) = mpsc::channel();
    let stop = Arc::new(Stop::default());
    let busy = AtomicUsize::new(0);
    let porter = Porter { ledger, control, callers, stop: stop.clone(), patience, handshake, busy };
    let thread = std::thread::Builder::new()
        .name("migrate-door".into())
        .spawn(move || accept(&listener, &Arc::new(porter)))?;
    Ok((Responder { address, stop, thread: Some(thread) }, called))
}

/// One of the callers that are heard at once; given back however its thread ends.
struct Slot(Arc<Porter>);

impl Slot {
    fn take(porter: &Arc<Porter>) -> Option<Self> {
        let slot = Self(porter.clone());
        (porter.busy.fetch_add(1, Ordering::SeqCst) < MAX_CALLERS).then_some(slot)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::SeqCst);
    }
}

fn accept(listener: &TcpListener, porter: &Arc<Porter>) {
    while !porter.stop.is_cancelled() {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                continue;
            }
            Err(e) => {
                tracing::warn!("accepting a connection failed: {e}");
                std::thread::sleep(SLICE);
                continue;
            }
        };
        let Some(slot) = Slot::take(porter) else { continue };
        let hear = move || slot.0.hear(stream);
        if let Err(e) = std::thread::Builder::new().name("migrate-caller".into()).spawn(hear) {
            tracing::warn!("hearing a caller failed: {e}");
        }
    }
}

impl Porter {
    fn hear(&self, stream: TcpStream) {
        let came = Instant::now();
        let link = match Link::new(stream, self.patience, self.stop.clone()) {
            Ok(link) => link,
            Err(e) => return tracing::warn!("a caller was gone at once: {e}"),
        };
        let peer = link.peer();
        let mut wire = Wire::new(link);
        wire.stream_mut().set_deadline(Some(came + self.handshake));
        let heard = match self.greet(&mut wire) {
            Ok((header, Purpose::Move)) => return self.seat(wire, header, came),
            Ok((_, Purpose::Join)) => self.join(wire),
            Ok((_, Purpose::Query)) => self.answer(&mut wire),
            Ok((_, Purpose::Serve)) => {
                let why = "a caller cannot be a destination";
                Err(WireError::Malformed { message: Tag::Hello, why })
            }
            Err(e) => Err(e),
        };
        if let Err(e) = heard {
            self.refused(&peer, &e.to_string());
        }
    }

    fn refused(&self, peer: &str, reason: &str) {
        turned_away(&self.control, peer, reason);
    }

    /// Stays a moment after an answer that settles it, to learn that it was heard.
    fn await_end(&self, wire: &mut Wire<Link>, token: Token, verdict: Verdict) {
        wire.stream_mut().set_deadline(Some(Instant::now() + ENDED_LIMIT));
        let heard = match wire.recv() {
            Ok(Message::Ended { token: ended }) if ended == token => {
                self.ledger.forget(token);
                true
            }
            Ok(_) => false,
            Err(e) => closed(&e),
        };
        // Last: whoever waits for this may close the door at once.
        if heard && verdict == Verdict::Discarded {
            self.ledger.told(token);
        }
    }

    /// Who calls, and what for. It has not been answered yet.
    fn greet(&self, wire: &mut Wire<Link>) -> Result<(Header, Purpose), WireError> {
        let header = match wire.recv_header() {
            Ok(header) => header,
            Err(e) => {
                // One of ours, of another time: it can read a header, and so perhaps the refusal.
                if let WireError::Format(
                    FormatError::Version { .. }
                    | FormatError::Features { .. }
                    | FormatError::PageSize { .. },
                ) = &e
                {
                    wire.send_header(None)?;
                    wire.abort(Tag::Refused, &e.to_string());
                }
                return Err(e);
            }
        };
        match wire.recv()? {
            Message::Hello { purpose, .. } => Ok((header, purpose)),
            other => Err(unexpected(&other, "HELLO")),
        }
    }

    fn say_hello(&self, wire: &mut Wire<Link>) -> Result<(), WireError> {
        wire.send_header(None)?;
        let version = env!("CARGO_PKG_VERSION");
        wire.send(&Message::Hello { purpose: Purpose::Serve, features: FEATURES, version })
    }

    /// A source: hears its CONFIG, and gives it the seat if nobody else was faster.
    fn seat(&self, mut wire: Wire<Link>, header: Header, came: Instant) {
        let peer = wire.stream().peer();
        let refuse = |mut wire: Wire<Link>, reason: &str| {
            self.refused(&peer, reason);
            wire.abort(Tag::Refused, reason);
        };
        if let Err(reason) = self.ledger.vacant() {
            // Where a HELLO would stand, a header comes first.
            return match wire.send_header(None) {
                Ok(()) => refuse(wire, &reason),
                Err(e) => self.refused(&peer, &format!("{reason}; {e}")),
            };
        }
        let described = match self.configuration(&mut wire) {
            Ok(described) => described,
            Err(e) if e.is_loss() => return self.left(peer, e),
            Err(e) => return refuse(wire, &e.to_string()),
        };
        match self.ledger.claim(header.vm_id(), described.token) {
            Ok(()) => {
                wire.stream_mut().set_deadline(None);
                let Described { token, drives, layout, config } = described;
                let caller = Caller { wire, header, token, drives, layout, config, came };
                if self.callers.send(Knock::Source(Box::new(caller))).is_err() {
                    self.ledger.vacate();
                }
            }
            Err(reason) => refuse(wire, &reason),
        }
    }

    /// Answers a source's HELLO and hears the guest that it has.
    fn configuration(&self, wire: &mut Wire<Link>) -> Result<Described, WireError> {
        self.say_hello(wire)?;
        wire.stream_mut().set_deadline(Some(Instant::now() + self.handshake));
        let mut drives = Vec::new();
        loop {
            match wire.recv()? {
                Message::Drive(DriveMessage::Drives(heads)) if drives.is_empty() => drives = heads,
                Message::Config { token, layout, config } => {
                    return Ok(Described { token, drives, layout, config: config.to_vec() });
                }
                other => return Err(unexpected(&other, "CONFIG")),
            }
        }
    }

    /// One more connection of the migration that is under way: it goes to the thread that receives.
    fn join(&self, mut wire: Wire<Link>) -> Result<(), WireError> {
        self.say_hello(&mut wire)?;
        let token = match wire.recv()? {
            Message::Join { token } => token,
            other => return Err(unexpected(&other, "JOIN")),
        };
        if let Err(reason) = self.ledger.join(token) {
            self.refused(&wire.stream().peer(), &reason);
            wire.abort(Tag::Refused, &reason);
            return Ok(());
        }
        wire.send(&Message::Ready { site: self.ledger.site() })?;
        wire.stream_mut().set_deadline(None);
        // Where nobody listens any more, the migration is over.
        drop(self.callers.send(Knock::Joined(Box::new(wire))));
        Ok(())
    }

    /// A source said who it is, and its connection ended before it said more.
    fn left(&self, peer: String, cause: WireError) {
        match self.ledger.vacant() {
            // Where nobody listens any more, nobody waits for a source.
            Ok(()) => drop(self.callers.send(Knock::Left { peer, cause })),
            Err(_) => left_early(&self.control, &peer, &cause),
        }
    }

    /// Answers a question.
    fn answer(&self, wire: &mut Wire<Link>) -> Result<(), WireError> {
        self.say_hello(wire)?;
        let (token, site) = match wire.recv()? {
            Message::Query { token, site } => (token, site),
            other => return Err(unexpected(&other, "QUERY")),
        };
        let verdict = self.ledger.answer(token, site);
        tracing::info!(%token, ?verdict, peer = wire.stream().peer(), "asked");
        wire.send(&Message::Answer { token, verdict })?;
        if matches!(verdict, Verdict::Discarded | Verdict::Running) {
            self.await_end(wire, token, verdict);
        }
        Ok(())
    }
}

/// The peer closed the connection in good order; a reset or silence is something else.
fn closed(e: &WireError) -> bool {
    let end = io::ErrorKind::UnexpectedEof;
    matches!(e, WireError::Format(FormatError::Io(e)) if e.kind() == end)
}

/// Logs a refusal and shows it in the progress.
pub(super) fn turned_away(control: &ReceiveControl, peer: &str, reason: &str) {
    tracing::warn!(peer, "turned away: {reason}");
    control.update(|p| {
        p.refused += 1;
        p.last_refusal = Some(format!("{peer}: {reason}"));
    });
}

/// A source left without a CONFIG, which matters to nobody: another has the seat.
pub(super) fn left_early(control: &ReceiveControl, peer: &str, cause: &WireError) {
    turned_away(control, peer, &format!("it left before its CONFIG: {cause}"));
}

/// In the background: makes the decision durable, and waits for the source to say that its guest has ended; then the
/// decision is not needed any more.
pub(super) fn await_end(mut wire: Wire<Link>, ledger: Arc<Ledger>, token: Token, limit: Duration) {
    let records = ledger.clone();
    let wait = move || {
        // The guest runs, and its operator does not wait for a disk.
        ledger.sync(token);
        wire.stream_mut().set_deadline(Some(Instant::now() + limit));
        if let Ok(Message::Ended { token: ended }) = wire.recv()
            && ended == token
        {
            ledger.forget(token);
        }
    };
    if let Err(e) = std::thread::Builder::new().name("migrate-end".into()).spawn(wait) {
        records.sync(token);
        tracing::warn!("a settled migration leaves its record: {e}");
    }
}
