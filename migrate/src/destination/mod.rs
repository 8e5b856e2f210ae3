//! The destination of a migration: `receive`, and the phases that it goes through.
//!
//! The caller's thread owns the connection and the guest being built. It lets the guest run only
//! with the permit of the state machine (`protocol::two_phase`), which needs a decision that stands.

mod building;
mod channels;
mod copies;
mod hand_over;
mod inspect;
mod listener;
mod memory_writer;
mod places;
mod prealloc;
mod receive;
mod session;

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{Layout, Subscription};
use driftline_format::Header;
use driftline_guest::{Clock, DriveHead, Guest, GuestFactory, Section};

use crate::control::{Phase, Progress, ReceiveControl};
use crate::error::{Cause, ReceiveError};
use crate::journal::Records;
use crate::log_limit::LogLimit;
use crate::protocol::error::WireError;
use crate::protocol::ids::Token;
use crate::protocol::layout::LayoutDifference;
use crate::protocol::message::{Counts, Message};
use crate::protocol::tag::Tag;
use crate::protocol::two_phase::DestinationEvent;
use crate::report::{ReceiveReport, ms};
use crate::transport::link::{Link, SLICE};
use crate::transport::wire::Wire;
use building::Builder;
use copies::Copies;
pub use inspect::{StreamSummary, inspect};
pub use listener::Responder;
use listener::{Caller, Knock};
use places::Stage;
use receive::{Assembly, Pace, Reading};
use session::Ledger;

/// The default of [`ReceiveOptions::disk_limit`].
const DISK_LIMIT: Duration = Duration::from_secs(8);
/// Upper bound on giving copies of disks up to a guest that is taken over, with the default
/// [`ReceiveOptions::disk_limit`].
pub const YIELD_LIMIT: Duration = DISK_LIMIT.saturating_add(copies::MARGIN);

/// How a guest is received. [`ReceiveOptions::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct ReceiveOptions {
    /// The directory of this host's hand-over records ([`Records`]).
    pub records: PathBuf,
    /// Time for a caller to introduce itself and to describe its guest. 5 s.
    pub handshake_timeout: Duration,
    /// How long the source may make no progress at all. 10 s.
    pub patience: Duration,
    /// The time in which the source has to move at least 256 KiB of memory or state: a peer that
    /// trickles does not keep this receiver for nothing. A minute.
    pub pace_window: Duration,
    /// How long building a guest may take, its disks opened and copies of drives made, after which
    /// it is refused: a disk hangs. 25 s: less than a source waits for READY, so that it hears why.
    pub build_limit: Duration,
    /// How long one operation on the copy of a drive may take, after which the guest is thrown
    /// away: its storage hangs. A wait for several operations may take a second more. 8 s: a source
    /// gives up before it hears why if it waits for less without progress, or in the pause.
    pub disk_limit: Duration,
    /// Time from PREPARED to COMMIT, after which the guest is thrown away. 10 s.
    pub commit_deadline: Duration,
    /// How long a receiver that threw a prepared guest away stays to tell the source. 30 s, or 2 s
    /// once it is cancelled.
    pub linger: Duration,
    /// Take one source only: fail with it, wherever it fails before PREPARED, instead of waiting
    /// for another. False.
    pub once: bool,
}

impl ReceiveOptions {
    /// The defaults, with the directory for the hand-over record.
    pub fn new(records: impl Into<PathBuf>) -> Self {
        Self {
            records: records.into(),
            handshake_timeout: Duration::from_secs(5),
            patience: Duration::from_secs(10),
            pace_window: Duration::from_secs(60),
            build_limit: Duration::from_secs(25),
            disk_limit: DISK_LIMIT,
            commit_deadline: Duration::from_secs(10),
            linger: Duration::from_secs(30),
            once: false,
        }
    }
}

/// A guest that has arrived.
#[derive(Debug)]
pub struct Received<G: ?Sized> {
    /// The guest: running, if it ran on its source.
    pub guest: Arc<G>,
    /// What it took.
    pub report: ReceiveReport,
    /// Answers the source's questions. Keep it as long as the guest: without it a source that did
    /// not hear RUNNING stays in doubt.
    pub responder: Responder,
}

/// Waits on `listener` for one source and receives its guest, which `factory` builds.
///
/// Callers that are no proper source, or whose guest cannot be built here, are refused, and the
/// waiting goes on; see `control.progress()` for them. A migration that fails before PREPARED
/// leaves nothing here: its source has its guest and hears why, and the waiting goes on, unless
/// [`ReceiveOptions::once`] is set. A failure after PREPARED ends this: then the guest does not run
/// here and never will, which is made durable, and this stays [`ReceiveOptions::linger`] to tell
/// the source.
///
/// The listener's side costs one thread, and one for each caller while it introduces itself, in a
/// bounded number.
pub fn receive<F: GuestFactory + ?Sized + 'static>(
    listener: TcpListener,
    factory: Arc<F>,
    options: &ReceiveOptions,
    control: &Arc<ReceiveControl>,
) -> Result<Received<F::Guest>, ReceiveError> {
    let result = open(listener, factory, options, control).and_then(|(host, responder)| {
        let (guest, report) = migrate(&host)?;
        Ok(Received { guest, report, responder })
    });
    let result = result.map_err(|failed| {
        let cause = match control.stop.is_cancelled() {
            true => Cause::Cancelled,
            false => failed.cause,
        };
        let phase = control.progress().phase;
        ReceiveError { phase, cause, was_prepared: failed.was_prepared }
    });
    control.update(|p| p.phase = Phase::Finished);
    match &result {
        Ok(r) => tracing::info!(vm = %r.report.vm_id, running = r.report.running, "received"),
        // The caller says it.
        Err(e) => tracing::info!("{e}"),
    }
    result
}

/// The migration, a phase a line.
fn migrate<F: GuestFactory + ?Sized + 'static>(
    host: &Host<'_, F>,
) -> Result<(Arc<F::Guest>, ReceiveReport), Failed> {
    let (arrival, prepared) = loop {
        let mut arrival = host.phase(Phase::Waiting, || host.welcome())?;
        let whole = host.phase(Phase::Precopy, || host.assemble(&mut arrival));
        let restored = whole
            .and_then(|whole| host.phase(Phase::SwitchOver, || host.restore(&mut arrival, whole)));
        match restored {
            Ok(prepared) => break (arrival, prepared),
            Err(failed) => host.wait_on(arrival, failed)?,
        }
    };
    host.phase(Phase::HandOver, || host.hand_over(arrival, prepared))
}

#[derive(Debug)]
struct Failed {
    cause: Cause,
    was_prepared: bool,
}

impl<E: Into<Cause>> From<E> for Failed {
    /// For failures before PREPARED.
    fn from(e: E) -> Self {
        Self { cause: e.into(), was_prepared: false }
    }
}

/// What all phases know.
struct Host<'a, F: GuestFactory + ?Sized> {
    builder: Builder<F>,
    options: &'a ReceiveOptions,
    control: &'a ReceiveControl,
    ledger: Arc<Ledger>,
    callers: Receiver<Knock>,
}

/// A source whose guest has been built, paused and zeroed.
struct Arrival<G: Guest + ?Sized> {
    wire: Wire<Link>,
    guest: Arc<G>,
    /// The drives that come along.
    drives: Vec<DriveHead>,
    /// Their copies, which go with this unless they are kept.
    copies: Copies,
    token: Token,
    came: Instant,
}

/// Why a source was not told READY.
struct Unready {
    cause: Cause,
    /// Of its drives, to be removed.
    copies: Option<Box<Copies>>,
}

impl From<Cause> for Unready {
    fn from(cause: Cause) -> Self {
        Self { cause, copies: None }
    }
}

/// Everything of a guest: memory in place, state to be restored.
struct Whole {
    sections: Arc<[Section]>,
    /// The state came before the last pass, and is in the guest.
    restored: bool,
    was_running: bool,
    totals: Counts,
    /// Of drives that came along.
    drive_totals: Counts,
    passes: u32,
    /// Over connections that have joined.
    received_bytes: u64,
    /// Goes when the guest runs: its memory takes time to be given back.
    written: Option<Subscription>,
}

fn open<'a, F: GuestFactory + ?Sized + 'static>(
    listener: TcpListener,
    factory: Arc<F>,
    options: &'a ReceiveOptions,
    control: &'a Arc<ReceiveControl>,
) -> Result<(Host<'a, F>, Responder), Failed> {
    let records = Records::open(&options.records)?;
    records.sweep_settled();
    let ledger = Arc::new(Ledger::new(records));
    let (patience, handshake) = (options.patience, options.handshake_timeout);
    let (responder, callers) =
        listener::open(listener, ledger.clone(), control.clone(), patience, handshake)
            .map_err(|cause| Cause::System { what: "listening", cause })?;
    let builder = Builder::new(factory, options.build_limit, options.disk_limit);
    Ok((Host { builder, options, control, ledger, callers }, responder))
}

impl<F: GuestFactory + ?Sized + 'static> Host<'_, F> {
    fn phase<T>(
        &self,
        phase: Phase,
        work: impl FnOnce() -> Result<T, Failed>,
    ) -> Result<T, Failed> {
        let begun = Instant::now();
        tracing::info!(?phase, "begin");
        self.control.update(|p| p.phase = phase);
        let result = work();
        let (ms, ok) = (ms(begun.elapsed()), result.is_ok());
        tracing::info!(?phase, ms, ok, "end");
        result
    }

    /// Waits for a source whose guest can be built here.
    fn welcome(&self) -> Result<Arrival<F::Guest>, Failed> {
        loop {
            match self.callers.recv_timeout(SLICE) {
                Ok(Knock::Source(caller)) => {
                    self.control.update(|p| p.phase = Phase::Setup);
                    if let Some(arrival) = self.admit(*caller)? {
                        return Ok(arrival);
                    }
                    self.control.update(|p| p.phase = Phase::Waiting);
                }
                // Of a migration that is over.
                Ok(Knock::Joined(..)) => {}
                // It was queued while nobody had the seat: a source that has it now goes on.
                Ok(Knock::Left { peer, cause })
                    if !self.options.once || self.ledger.vacant().is_err() =>
                {
                    listener::left_early(self.control, &peer, &cause);
                }
                Ok(Knock::Left { peer, cause }) => {
                    let (before, cause) = ("it sent its configuration", Box::new(cause));
                    return Err(Cause::SourceLeft { peer, before, cause }.into());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let cause = std::io::Error::other("the listening thread has ended");
                    return Err(Cause::System { what: "listening", cause }.into());
                }
            }
            if self.control.stop.is_cancelled() {
                return Err(Cause::Cancelled.into());
            }
        }
    }

    /// Builds a caller's guest, or refuses it and frees the seat; an error if the caller has gone
    /// and no other is to come.
    fn admit(&self, caller: Caller) -> Result<Option<Arrival<F::Guest>>, Failed> {
        let Caller { mut wire, header, token, drives, layout, config, came } = caller;
        wire.stream_mut().set_stop(self.control.stop.clone());
        let built = self.build(&mut wire, &header, token, &layout, &config, &drives);
        let (cause, copies) = match built {
            Ok((guest, copies)) => {
                return Ok(Some(Arrival { wire, guest, drives, copies, token, came }));
            }
            Err(Unready { cause, copies }) => (cause, copies),
        };
        let peer = wire.stream().peer();
        match cause {
            Cause::Wire(cause) if cause.is_loss() && self.options.once => {
                self.ledger.vacate();
                let (before, cause) = ("its guest stood here", Box::new(cause));
                Err(Cause::SourceLeft { peer, before, cause }.into())
            }
            cause => {
                let reason = words(&cause);
                listener::turned_away(self.control, Stage::Source, &peer, &reason);
                wire.abort(Tag::Refused, &reason);
                // Removing them takes time, and the next source with the seat waits for READY.
                drop(copies);
                self.ledger.vacate();
                Ok(None)
            }
        }
    }

    fn build(
        &self,
        wire: &mut Wire<Link>,
        header: &Header,
        token: Token,
        layout: &Layout,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<(Arc<F::Guest>, Copies), Unready> {
        let vm_id = header.vm_id();
        let (theirs, ours) = (header.layout_hash().into(), layout.hash().into());
        if theirs != ours {
            return Err(Cause::Differs { what: "the layout's hash", ours, theirs }.into());
        }
        let (guest, copies) = self.builder.build(vm_id, config, drives, &self.control.stop)?;
        let differs = LayoutDifference::between(guest.layout(), layout);
        let ready = differs.map_or(Ok(()), |d| Err(Cause::LayoutDiffers(d))).and_then(|()| {
            self.ledger.begin(token, vm_id)?;
            Ok(wire.send(&Message::Ready { site: self.ledger.site() })?)
        });
        match ready {
            Ok(()) => Ok((guest, copies)),
            Err(cause) => {
                guest.stop(&format!("it was not received: {cause}"));
                let (_drop, _) = self.ledger.post(DestinationEvent::Failed);
                Err(Unready { cause, copies: Some(Box::new(copies)) })
            }
        }
    }

    /// Before PREPARED: the source has its guest, and this host takes another one, or the same
    /// again.
    fn wait_on(&self, arrival: Arrival<F::Guest>, failed: Failed) -> Result<(), Failed> {
        if self.options.once || self.control.stop.is_cancelled() {
            return Err(failed);
        }
        let (peer, phase) = (arrival.wire.stream().peer(), self.control.progress().phase);
        // Its memory, files and devices are free before another guest comes.
        drop(arrival);
        self.ledger.vacate();
        let reason = format!("no guest was received ({phase}): {}", failed.cause);
        static LIMIT: LogLimit = LogLimit::new();
        if let Some(unshown) = LIMIT.admit() {
            tracing::warn!(peer, unshown, "{reason}; waiting for another source");
        }
        listener::note_refusal(self.control, &peer, &reason);
        self.control.update(Progress::forget_stream);
        Ok(())
    }

    /// Receives memory, pass by pass, and the state.
    fn assemble(&self, arrival: &mut Arrival<F::Guest>) -> Result<Whole, Failed> {
        let Arrival { wire, guest, drives, copies, token, .. } = arrival;
        let reading = Reading {
            control: self.control,
            pace: Pace::begin(self.options.pace_window),
            patience: self.options.patience,
            joined: &|count| self.joined(*token, count),
        };
        let received = Assembly::new(&**guest, drives, copies).run(wire, reading);
        received.map_err(|cause| self.give_up(arrival, cause))
    }

    /// The connections that have joined; the source has heard of each before it says how many there
    /// are.
    fn joined(&self, token: Token, count: u32) -> Result<Vec<Wire<Link>>, Cause> {
        let mut joined = Vec::with_capacity(count as usize);
        let until = Instant::now() + self.options.handshake_timeout;
        while (joined.len() as u32) < count {
            match self.callers.recv_timeout(SLICE) {
                Ok(Knock::Joined(of, mut wire)) if of == token => {
                    wire.stream_mut().set_stop(self.control.stop.clone());
                    joined.push(*wire);
                }
                // Nobody else gets the seat, and others have joined a migration that is over.
                Ok(_) => {}
                Err(_) if self.control.stop.is_cancelled() => return Err(Cause::Cancelled),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(_) => {
                    let what = "the number of connections";
                    let (found, expected) = (count.into(), joined.len() as u64);
                    return Err(WireError::Count { what, found, expected }.into());
                }
            }
        }
        Ok(joined)
    }

    /// Puts the state into the guest, if that was not done beside the last pass.
    fn restore(&self, arrival: &mut Arrival<F::Guest>, whole: Whole) -> Result<Whole, Failed> {
        if whole.restored {
            return Ok(whole);
        }
        match arrival.guest.restore_state(&whole.sections, Clock::Advance) {
            Ok(()) => Ok(whole),
            Err(e) => Err(self.give_up(arrival, e.into())),
        }
    }

    /// Before PREPARED: the guest is thrown away, and the source told why. It cannot have said
    /// COMMIT, so it will never ask.
    fn give_up(&self, arrival: &mut Arrival<F::Guest>, cause: Cause) -> Failed {
        let cause = if self.control.stop.is_cancelled() { Cause::Cancelled } else { cause };
        hand_over::throw_away(&*arrival.guest, &format!("it was not received: {cause}"));
        let (_drop, _) = self.ledger.post(DestinationEvent::Failed);
        if !matches!(cause, Cause::Wire(WireError::Aborted { .. })) {
            arrival.wire.abort(Tag::Abort, &words(&cause));
        }
        arrival.copies.throw_away();
        cause.into()
    }
}

/// What a source is told: "it" of "it was cancelled" would be the source's own migration.
fn words(cause: &Cause) -> String {
    match cause {
        Cause::Cancelled => "the receiver was stopped".to_owned(),
        cause => cause.to_string(),
    }
}

#[cfg(test)]
mod tests;
