//! The listener: accepts connections, and answers each or passes it to the receiving thread.
//!
//! One thread accepts connections. A short-lived thread serves each connection, in a bounded number
//! of [places](super::admission), so that a silent caller delays no other. The first source whose
//! CONFIG has arrived gets the session, and other sources are refused. The listener outlives the
//! migration: it answers questions until it is dropped.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::Layout;
use driftline_format::{FormatError, Header};
use driftline_guest::{DriveHead, LogLimit, SharedGuest};

use super::admission::{Admission, Admitted, ServingThread, Stage, THREADS};
use super::local;
use super::options::ReceiveOptions;
use super::security;
use super::session::{Session, SessionRefusal};
use crate::control::ReceiveControl;
use crate::protocol::decision::Verdict;
use crate::protocol::description::{DescriptionState, DescriptionStep};
use crate::protocol::error::WireError;
use crate::protocol::ids::Token;
use crate::protocol::message::{Purpose, WireMessage};
use crate::protocol::tag::Tag;
use crate::transport::link::Link;
use crate::transport::listener::Listener;
use crate::transport::protection::ReceiveTls;
use crate::transport::socket::Socket;
use crate::transport::stop::StopFlag;
use crate::transport::wait::SLICE;
use crate::transport::wire::Wire;

/// Upper bound on waiting for ENDED after a verdict was sent.
const ENDED_LIMIT: Duration = Duration::from_secs(5);

/// A connection that the listener passes to the receiving thread.
#[derive(Debug)]
pub(super) enum Incoming {
    /// A source that has the session.
    Source(Box<AcceptedSource>),
    /// An additional channel of the migration that has the session.
    Joined(Token, Box<Wire<Link>>),
    /// A source whose connection ended before CONFIG, while the session was free.
    Left { peer: String, cause: WireError },
}

/// A source that has the session, and the description of its guest.
#[derive(Debug)]
pub(super) struct AcceptedSource {
    pub(super) wire: Wire<Link>,
    pub(super) header: Header,
    pub(super) token: Token,
    pub(super) drives: Vec<DriveHead>,
    /// The source's memory, if it is handed over by descriptors.
    pub(super) memory: Option<SharedGuest>,
    pub(super) layout: Layout,
    pub(super) config: Vec<u8>,
    /// Time at which the connection was accepted.
    pub(super) since: Instant,
}

/// A source's description of its guest.
struct GuestDescription {
    token: Token,
    drives: Vec<DriveHead>,
    memory: Option<SharedGuest>,
    layout: Layout,
    config: Vec<u8>,
}

/// Answers QUERY in the background. Dropping it closes the listener.
#[derive(Debug)]
pub struct Responder {
    address: String,
    stop: Arc<StopFlag>,
    thread: Option<JoinHandle<()>>,
}

impl Responder {
    /// Returns the address on which it listens.
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        self.stop.force();
        if let Some(thread) = self.thread.take() {
            // The thread owns nothing that a panic could leave inconsistent.
            let _ = thread.join();
        }
    }
}

/// State that the threads of all connections share.
struct ListenerState {
    session: Arc<Session>,
    control: Arc<ReceiveControl>,
    incoming: Sender<Incoming>,
    stop: Arc<StopFlag>,
    progress_timeout: Duration,
    handshake: Duration,
    tls: Option<ReceiveTls>,
    admission: Arc<Admission>,
}

/// Starts the listening thread. Returns the receiving end of the connections that it passes on.
pub(super) fn open(
    listener: Listener,
    session: Arc<Session>,
    control: Arc<ReceiveControl>,
    options: &ReceiveOptions,
) -> io::Result<(Responder, Receiver<Incoming>)> {
    let address = listener.address().to_owned();
    listener.prepare()?;
    let (incoming, received) = mpsc::channel();
    let stop = Arc::new(StopFlag::default());
    let admission = Arc::default();
    let shared = ListenerState {
        session,
        control,
        incoming,
        stop: stop.clone(),
        progress_timeout: options.progress_timeout,
        handshake: options.handshake_timeout,
        tls: options.tls.clone(),
        admission,
    };
    let thread = std::thread::Builder::new()
        .name("migrate-listen".into())
        .spawn(move || accept(&listener, &Arc::new(shared)))?;
    Ok((Responder { address, stop, thread: Some(thread) }, received))
}

fn accept(listener: &Listener, shared: &Arc<ListenerState>) {
    while !shared.stop.is_cancelled() {
        // Callers wait in the kernel's queue while too many connections end.
        let Some(server) = shared.admission.serving_thread(SLICE) else {
            static LIMIT: LogLimit = LogLimit::new();
            let why = format_args!("callers wait until one of {THREADS} connections has ended");
            warn_limited(&LIMIT, why);
            continue;
        };
        let connection = match listener.accept() {
            Ok(accepted) => accepted,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                continue;
            }
            Err(e) => {
                static LIMIT: LogLimit = LogLimit::new();
                warn_limited(&LIMIT, format_args!("accepting a connection failed: {e}"));
                std::thread::sleep(SLICE);
                continue;
            }
        };
        let served = Socket::new(connection).and_then(|socket| shared.receive(socket, server));
        if let Err(e) = served {
            static LIMIT: LogLimit = LogLimit::new();
            warn_limited(&LIMIT, format_args!("a connection is not served: {e}"));
        }
        if listener.is_single() {
            // The last thread that serves it drops the other end of the receiving thread's queue.
            return;
        }
    }
}

impl ListenerState {
    /// Admits a connection and starts its thread.
    fn receive(self: &Arc<Self>, socket: Socket, server: ServingThread) -> io::Result<()> {
        let since = Instant::now();
        let mut link = Link::new(socket, self.progress_timeout, self.stop.clone());
        link.set_deadline(Some(since + self.handshake));
        let place = self.admission.admit(&link, link.peer_group())?;
        let shared = self.clone();
        std::thread::Builder::new().name("migrate-caller".into()).spawn(move || {
            let _server = server;
            shared.serve(link, &place, since);
        })?;
        Ok(())
    }

    fn serve(&self, link: Link, place: &Admitted, since: Instant) {
        let peer = link.peer();
        let mut stage = Stage::Undecided;
        let link = match security::secure(link, self.tls.as_ref(), place) {
            Ok(link) => link,
            Err(e) => return self.refused(stage, &peer, &end_reason(&e, place)),
        };
        let mut wire = Wire::new(link);
        let result = self.greet(&mut wire).and_then(|(header, purpose)| {
            stage = match purpose {
                Purpose::Move => Stage::Source,
                Purpose::Join => Stage::Join,
                Purpose::Query => Stage::Query,
                Purpose::Serve => {
                    let why = "a caller cannot be a destination";
                    return Err(WireError::Malformed { message: Tag::Hello, why });
                }
            };
            security::check_peer(&mut wire, self.tls.as_ref())?;
            place.advance(stage);
            match stage {
                Stage::Source => {
                    wire.stream().log_encryption();
                    self.source(wire, header, place, since);
                    Ok(())
                }
                Stage::Join => self.join(wire, place),
                _ => self.answer(&mut wire, place),
            }
        });
        if let Err(e) = result {
            self.refused(stage, &peer, &end_reason(&e, place));
        }
    }

    fn refused(&self, stage: Stage, peer: &str, reason: &str) {
        log_refusal(&self.control, stage, peer, reason);
    }

    /// Waits until the source acknowledges a final answer.
    fn await_end(&self, wire: &mut Wire<Link>, place: &Admitted, token: Token, verdict: Verdict) {
        wire.stream_mut().set_deadline(Some(Instant::now() + ENDED_LIMIT));
        let acknowledged = match wire.recv() {
            Ok(WireMessage::Ended { token: ended }) if ended == token => {
                self.session.forget(token);
                true
            }
            Ok(_) => false,
            Err(e) => closed(&e) && !place.is_displaced(),
        };
        // Last, because the receiving thread waits for this and may drop the listener afterwards.
        if acknowledged && verdict == Verdict::Discarded {
            self.session.note_source_informed(token);
        }
    }

    /// Reads a caller's header and HELLO, without answering them.
    fn greet(&self, wire: &mut Wire<Link>) -> Result<(Header, Purpose), WireError> {
        let header = match wire.recv_header() {
            Ok(header) => header,
            Err(e) => {
                // Another version of the program can read a header, and perhaps the refusal.
                if let WireError::Format(
                    FormatError::Version { .. }
                    | FormatError::Features { .. }
                    | FormatError::PageSize { .. },
                ) = &e
                {
                    wire.send_header(None)?;
                    wire.abort(Tag::Refused, &e.to_string());
                }
                security::refuse_tls(wire, &e);
                return Err(e);
            }
        };
        match wire.recv()? {
            WireMessage::Hello { purpose, .. } => Ok((header, purpose)),
            other => Err(other.unexpected("HELLO")),
        }
    }

    fn say_hello(&self, wire: &mut Wire<Link>) -> Result<(), WireError> {
        wire.send_header(None)?;
        let (version, features) = (env!("CARGO_PKG_VERSION"), local::features(wire.stream()));
        wire.send(&WireMessage::Hello { purpose: Purpose::Serve, features, version })
    }

    /// Serves a source: reads its CONFIG, and gives it the session if the session is still free.
    fn source(&self, mut wire: Wire<Link>, header: Header, place: &Admitted, since: Instant) {
        let peer = wire.stream().peer();
        let refuse = |mut wire: Wire<Link>, reason: &str| {
            self.refused(Stage::Source, &peer, reason);
            wire.abort(Tag::Refused, reason);
        };
        if let Err(why) = self.session.vacant() {
            // A header precedes a refusal, as it precedes HELLO.
            return match wire.send_header(None) {
                Ok(()) => refuse(wire, &why.to_string()),
                Err(e) => self.refused(Stage::Source, &peer, &format!("{why}; {e}")),
            };
        }
        let described = match self.configuration(&mut wire) {
            Ok(described) => described,
            Err(e) if place.is_displaced() => {
                return self.refused(Stage::Source, &peer, &end_reason(&e, place));
            }
            Err(e) if e.is_loss() => return self.left(peer, e),
            Err(e) => return refuse(wire, &e.to_string()),
        };
        match self.session.claim(header.vm_id(), described.token, || leave(place)) {
            Ok(()) => {
                wire.stream_mut().set_deadline(None);
                let GuestDescription { token, drives, memory, layout, config } = described;
                let caller =
                    AcceptedSource { wire, header, token, drives, memory, layout, config, since };
                if self.incoming.send(Incoming::Source(Box::new(caller))).is_err() {
                    self.session.vacate();
                }
            }
            Err(why) => refuse(wire, &why.to_string()),
        }
    }

    /// Answers a source's HELLO, and reads the description of its guest.
    fn configuration(&self, wire: &mut Wire<Link>) -> Result<GuestDescription, WireError> {
        self.say_hello(wire)?;
        wire.stream_mut().set_deadline(Some(Instant::now() + self.handshake));
        let (mut state, mut memory) = (DescriptionState::default(), None::<SharedGuest>);
        loop {
            match state.on(wire.recv()?)? {
                DescriptionStep::Noted => {}
                DescriptionStep::Memory(places) => memory = Some(local::receive(wire, &places)?),
                DescriptionStep::Files(names) => {
                    let shared = memory.take();
                    let shared = shared.ok_or(WireError::unexpected(Tag::Files, "CONFIG"))?;
                    memory = Some(local::receive_files(wire, names, shared)?);
                }
                DescriptionStep::Complete { token, layout, config } => {
                    let (drives, config) = (state.into_drives(), config.to_vec());
                    return Ok(GuestDescription { token, drives, memory, layout, config });
                }
            }
        }
    }

    /// Serves an additional channel of the current migration: passes it to the receiving thread.
    fn join(&self, mut wire: Wire<Link>, place: &Admitted) -> Result<(), WireError> {
        self.say_hello(&mut wire)?;
        let (token, secret) = match wire.recv()? {
            WireMessage::Join { token, secret } => (token, secret),
            other => return Err(other.unexpected("JOIN")),
        };
        if let Err(why) = self.session.join(token, &secret, || leave(place)) {
            let reason = why.to_string();
            self.refused(Stage::Join, &wire.stream().peer(), &reason);
            wire.abort(Tag::Refused, &reason);
            return Ok(());
        }
        wire.send(&WireMessage::Ready { site: self.session.site(), secret })?;
        wire.stream_mut().set_deadline(None);
        // If the receiving thread has ended, so has the migration.
        drop(self.incoming.send(Incoming::Joined(token, Box::new(wire))));
        Ok(())
    }

    /// Reports that a source's connection ended between HELLO and CONFIG.
    fn left(&self, peer: String, cause: WireError) {
        match self.session.vacant() {
            // If the receiving thread has ended, no source is awaited.
            Ok(()) => drop(self.incoming.send(Incoming::Left { peer, cause })),
            Err(_) => log_early_leave(&self.control, &peer, &cause),
        }
    }

    /// Serves a source that asks about a migration: answers its QUERY.
    fn answer(&self, wire: &mut Wire<Link>, place: &Admitted) -> Result<(), WireError> {
        self.say_hello(wire)?;
        let (token, site, secret) = match wire.recv()? {
            WireMessage::Query { token, site, secret } => (token, site, secret),
            other => return Err(other.unexpected("QUERY")),
        };
        let verdict = match self.session.answer(token, site, &secret) {
            Ok(verdict) => verdict,
            Err(why) => {
                let reason = why.to_string();
                self.refused(Stage::Query, &wire.stream().peer(), &reason);
                wire.abort(Tag::Refused, &reason);
                return Ok(());
            }
        };
        static LIMIT: LogLimit = LogLimit::new();
        if let Some(unshown) = LIMIT.admit() {
            tracing::info!(%token, ?verdict, peer = wire.stream().peer(), unshown, "asked");
        }
        wire.send(&WireMessage::Answer { token, verdict })?;
        if matches!(verdict, Verdict::Discarded | Verdict::Running) {
            self.await_end(wire, place, token, verdict);
        }
        Ok(())
    }
}

/// Whether the peer closed the connection without a reset or a timeout.
fn closed(e: &WireError) -> bool {
    let end = io::ErrorKind::UnexpectedEof;
    matches!(e, WireError::Format(FormatError::Io(e)) if e.kind() == end)
}

/// Frees the place of a connection that the session accepts. A refused connection keeps its place
/// until it has received the refusal, so that another one can displace it and its thread counts.
fn leave(place: &Admitted) -> Result<(), SessionRefusal> {
    if place.leave() { Ok(()) } else { Err(SessionRefusal::Displaced) }
}

/// Returns why a connection has ended.
fn end_reason(e: &WireError, place: &Admitted) -> String {
    match place.is_displaced() {
        true => SessionRefusal::Displaced.to_string(),
        false => e.to_string(),
    }
}

fn warn_limited(limit: &LogLimit, what: std::fmt::Arguments<'_>) {
    if let Some(unshown) = limit.admit() {
        tracing::warn!(unshown, "{what}");
    }
}

/// Logs a refusal, at most one a second for each stage, and counts it in the progress.
pub(super) fn log_refusal(control: &ReceiveControl, stage: Stage, peer: &str, reason: &str) {
    static LIMITS: [LogLimit; 4] = [const { LogLimit::new() }; 4];
    if let Some(unshown) = LIMITS.get(stage as usize).and_then(LogLimit::admit) {
        tracing::warn!(peer, unshown, "refused: {reason}");
    }
    note_refusal(control, peer, reason);
}

/// Counts in the progress a caller whose guest was not received.
pub(super) fn note_refusal(control: &ReceiveControl, peer: &str, reason: &str) {
    control.update(|p| {
        p.refused += 1;
        p.last_refusal = Some(format!("{peer}: {reason}"));
    });
}

/// Logs that a source left before its CONFIG.
pub(super) fn log_early_leave(control: &ReceiveControl, peer: &str, cause: &WireError) {
    log_refusal(control, Stage::Source, peer, &format!("it left before its CONFIG: {cause}"));
}

/// Makes the decision durable in the background, and removes it once ENDED has arrived.
pub(super) fn await_end(
    mut wire: Wire<Link>,
    session: Arc<Session>,
    token: Token,
    limit: Duration,
) {
    let records = session.clone();
    let wait = move || {
        // In the background, because the guest runs already and its operator need not wait.
        session.sync(token);
        wire.stream_mut().set_deadline(Some(Instant::now() + limit));
        if let Ok(WireMessage::Ended { token: ended }) = wire.recv()
            && ended == token
        {
            session.forget(token);
        }
    };
    if let Err(e) = std::thread::Builder::new().name("migrate-end".into()).spawn(wait) {
        records.sync(token);
        tracing::warn!("the records of a finished migration stay: {e}");
    }
}
