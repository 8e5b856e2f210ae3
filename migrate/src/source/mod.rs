//! The source of a migration: `send`, and the phases that it goes through.
//!
//! One thread, the caller's, does everything: it owns the connection, the subscription and the held
//! guest. Before COMMIT every failure gives the guest back here; after it only the state machine's
//! permits decide (see `protocol::two_phase`).

mod announce;
mod channels;
mod drives;
mod hand_over;
mod limit;
mod options;
mod pacer;
mod passes;
mod paused_guest;
mod setup;
mod switch_over;
mod throttle;
mod verify;

use std::time::{Duration, Instant};

use driftline_dirty_tracker::{PAGE_SIZE, Subscription};
use driftline_guest::{Guest, GuestDrive, RunState};

use crate::control::{Phase, SendControl};
use crate::error::{Cause, GuestPlace, SendError};
use crate::heap;
use crate::journal::{Records, StagedSource};
use crate::policy::convergence::{Judgement, Measured, Reason, expected_downtime, link_rate};
use crate::protocol::error::WireError;
use crate::protocol::ids::Token;
use crate::protocol::message::Counts;
use crate::protocol::tag::Tag;
use crate::report::{PassReport, SendReport, VcpuThrottle, ms, per_second};
use crate::transport::link::Link;
use crate::transport::wire::Wire;
use announce::announce;
use channels::{PassDone, Passes};
pub use drives::CopyDrives;
use drives::Drives;
use limit::Limit;
pub use options::{MIN_BANDWIDTH, SendOptions};
use paused_guest::{Held, Recorded};
use throttle::Throttled;
use verify::Verifier;

/// How often it is judged once more what the guest wrote while disks and the record were synced.
const SETTLINGS: u32 = 2;

/// How long precopy waits for disks after each pass, at most.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// A failure with where it leaves the guest.
#[derive(Debug)]
struct Failed {
    cause: Cause,
    place: GuestPlace,
}

impl<E: Into<Cause>> From<E> for Failed {
    /// For failures while the guest runs: nothing has to be taken back.
    fn from(e: E) -> Self {
        Self { cause: e.into(), place: GuestPlace::Here }
    }
}

/// Moves `guest` to the destination that listens at `to` ("HOST:PORT", "tcp:" in front allowed).
///
/// Blocks until the guest is there (then it has ended here, [`Guest::stop`]), or is certainly here.
/// While neither is known, the migration is in doubt: this asks the destination, for ever if need
/// be, until it answers or [`SendControl::resolve`] is called; `control.progress()` shows it.
///
/// Costs one bit of memory a frame for tracking (three with `verify`), and for each connection 512 KiB of buffers, or 2 MiB
/// with compression. Drives that go along cost a bit a block, and 512 KiB.
pub fn send<G: Guest + ?Sized>(
    guest: &G,
    to: &str,
    options: &SendOptions,
    control: &SendControl,
) -> Result<SendReport, SendError> {
    let begun = Instant::now();
    let job = Job { guest, to, options, control, token: Token::random(), begun };
    let result = migrate(&job).map_err(|failed| {
        let cause = match control.stop.is_cancelled() {
            true => Cause::Cancelled,
            false => failed.cause,
        };
        let phase = control.progress().phase;
        // A guest that powered itself off makes a migration fail in many ways; it never goes on.
        let place = match guest.run_state() {
            RunState::Stopped => GuestPlace::Ended,
            _ => failed.place,
        };
        SendError { peer: to.to_owned(), phase, cause, guest: place }
    });
    control.update(|p| p.phase = Phase::Finished);
    match &result {
        Ok(report) => tracing::info!(vm = %guest.vm_id(), to, ?report.status, "migration ended"),
        // Whoever asked for the migration is told, and says it.
        Err(e) => tracing::info!(vm = %guest.vm_id(), "{e}"),
    }
    result
}

/// The migration, a phase a line.
fn migrate<G: Guest + ?Sized>(job: &Job<'_, G>) -> Result<SendReport, Failed> {
    let mut peer = job.phase(Phase::Connect, || job.connect())?;
    job.told(Phase::Setup, &mut peer, |peer| job.set_up(peer))?;
    let copied = job.told(Phase::Precopy, &mut peer, |peer| job.precopy(peer))?;
    let ready = job.told(Phase::SwitchOver, &mut peer, |peer| job.switch_over(peer, copied))?;
    let handed = job.told(Phase::HandOver, &mut peer, |peer| job.seal(peer, ready))?;
    job.settle(peer, handed)
}

/// What all phases know.
struct Job<'a, G: Guest + ?Sized> {
    guest: &'a G,
    to: &'a str,
    options: &'a SendOptions,
    control: &'a SendControl,
    token: Token,
    begun: Instant,
}

/// The connections, and where the record of this migration goes.
struct Peer<'a> {
    wire: Wire<Link>,
    records: Records,
    /// Connections that have joined, until precopy has them.
    joined: Vec<Wire<Link>>,
    /// From precopy on. Kept to the end: who closes a connection that has joined before saying why has said "lost".
    sender: Option<Passes<'a>>,
    /// What the destination can do, from its HELLO.
    features: u64,
    /// That go along.
    drives: Vec<Box<dyn GuestDrive>>,
    /// The record of this migration, from READY on, which tells the destination's site.
    staged: Option<StagedSource>,
}

/// Memory and drives as precopy left them: what was written since is in `writes`, and in theirs.
struct Copied<'a, G: Guest + ?Sized> {
    writes: Subscription,
    verifier: Option<Verifier>,
    drives: Drives,
    throttled: Throttled<'a, G>,
    tale: Tale,
    /// The record, where it stands before the pause.
    recorded: Option<Recorded>,
    /// Frames that were left for the last pass when the pause was decided on.
    left: u64,
}

/// The destination has everything and is prepared; the guest here is held, and the record stands.
struct Ready<'a, G: Guest + ?Sized> {
    held: Held<'a, G>,
    recorded: Recorded,
    tale: Tale,
    /// Goes when the guest has gone: its memory takes time to be given back.
    writes: Subscription,
}

/// What the report will tell.
struct Tale {
    setup: Duration,
    passes: Vec<PassReport>,
    throttle: Vec<VcpuThrottle>,
    totals: Counts,
    /// Bytes sent over connections that have joined.
    shared_bytes: u64,
    drive_totals: Counts,
    reason: Reason,
}

impl<'a, G: Guest + ?Sized> Job<'a, G> {
    fn phase<T>(
        &self,
        phase: Phase,
        work: impl FnOnce() -> Result<T, Failed>,
    ) -> Result<T, Failed> {
        let begun = Instant::now();
        let (vm, token) = (self.guest.vm_id(), self.token);
        tracing::info!(%vm, %token, ?phase, "begin");
        self.control.update(|p| p.phase = phase);
        let result = work();
        let (ms, ok) = (ms(begun.elapsed()), result.is_ok());
        tracing::info!(%vm, %token, ?phase, ms, ok, "end");
        result
    }

    /// A phase after whose failure the two sides tell each other why. The guest has been given back
    /// by then: it does not wait for anyone's last words.
    fn told<T>(
        &self,
        phase: Phase,
        peer: &mut Peer<'a>,
        work: impl FnOnce(&mut Peer<'a>) -> Result<T, Failed>,
    ) -> Result<T, Failed> {
        self.phase(phase, || work(peer)).map_err(|failed| {
            let cause = self.last_words(&mut peer.wire, failed.cause);
            Failed { cause, place: failed.place }
        })
    }

    /// Hears the peer's last words, or says ours. Returns the cause, in the peer's words where it
    /// had some.
    fn last_words(&self, wire: &mut Wire<Link>, cause: Cause) -> Cause {
        let cancelled = self.control.stop.is_cancelled();
        match cause {
            Cause::Wire(WireError::Refused { .. } | WireError::Aborted { .. }) => cause,
            Cause::Connection { .. } if !cancelled => match wire.words_at_hand() {
                Some(e) => Cause::Wire(e),
                None => {
                    wire.abort(Tag::Abort, &cause.to_string());
                    cause
                }
            },
            Cause::Wire(WireError::Format(_)) if !cancelled => {
                wire.last_words().map_or(cause, Cause::Wire)
            }
            cause => {
                let cause = if cancelled { Cause::Cancelled } else { cause };
                wire.abort(Tag::Abort, &cause.to_string());
                cause
            }
        }
    }

    /// Copies memory while the guest runs, until what is left is worth a pause.
    fn precopy(&self, peer: &mut Peer<'a>) -> Result<Copied<'a, G>, Failed> {
        let setup = self.begun.elapsed();
        let begun = Instant::now();
        let goals = self.options.goals();
        // Removed after the guest has its full speed again.
        let mut recorded = None;
        let mut throttled = Throttled::new(self.guest, self.options.throttle);
        // First the subscription, then the look at what is populated: whatever is written between
        // the two is in the first epoch.
        let mut writes = self.guest.subscribe("migrate")?;
        let subscribed = begun.elapsed();
        let populated = self.guest.populated()?;
        let (subscribed, looked) = (ms(subscribed), ms(begun.elapsed()));
        tracing::debug!(subscribed, looked, runs = populated.len(), "ms; writes are followed");
        let mut drives = Drives::follow(&peer.drives)?;
        let rate = self.options.max_bandwidth.map(|rate| rate.max(MIN_BANDWIDTH));
        let verifier = match self.options.verify {
            true => Some(Verifier::new(self.guest, &populated)?),
            false => None,
        };
        let (speed, joined) = ((rate, self.options.compression), std::mem::take(&mut peer.joined));
        let sender = Passes::new(self.guest.ram(), self.control, speed, (joined, peer.features))?;
        let sender = peer.sender.insert(sender);
        let (mut measured, mut passes) = (Vec::new(), Vec::new());
        let limit = Limit::of_precopy(begun, &goals);
        let frames = populated.iter().map(|r| r.count).sum();
        limit.hold(&mut peer.wire, |wire| announce(wire, self.guest.ram(), &populated))?;
        let mut done = limit
            .hold(&mut peer.wire, |wire| {
                tracing::debug!(ms = ms(begun.elapsed()), "announced");
                let runs = populated.iter().copied();
                sender.begin(wire, 0, runs, frames, &mut drives, limit)?.await_end(wire)
            })
            .map_err(|cause| throttled.explain(cause))?;
        drives.commit();
        let mut since = begun;
        let mut settlings = 0;
        loop {
            // Begun beside the next pass; waited for before the pause.
            self.flush_disks(Duration::ZERO);
            self.guest.collect()?;
            let mut epoch = writes.drain();
            drives.drain();
            let window = since.elapsed();
            since = Instant::now();
            let mut dirtied = epoch.frames() + drives.pending();
            passes.push(report_of(&done, &drives, dirtied, window));
            measured.push(done.measured(dirtied, drives.passed));
            throttled.measure(window);
            self.show(&measured, epoch.frames(), &drives, window);
            let mut judgement = throttled.judge(&goals, &measured, dirtied, begun.elapsed());
            if matches!(judgement, Judgement::SwitchOver(_)) && settlings <= SETTLINGS {
                settlings += 1;
                if settlings == 1 {
                    self.flush_disks(FLUSH_LIMIT);
                }
                // Nor does the pause wait for the record's disk. Where digests are compared it is made only after that: it takes
                // long, and a record is in an operator's way.
                if verifier.is_none() {
                    recorded = Some(Recorded::place(&peer.records, &mut peer.staged)?);
                }
                // The pause is near.
                self.guest.stay_awake();
                heap::grow();
                // What the guest wrote to its memory meanwhile counts, unless disks are so slow that it always is too much.
                if settlings <= SETTLINGS {
                    epoch.give_back();
                    self.guest.collect()?;
                    epoch = writes.drain();
                    drives.drain();
                    dirtied = epoch.frames() + drives.pending();
                    judgement = throttled.judge(&goals, &measured, dirtied, begun.elapsed());
                }
                if let Judgement::KeepGoing = judgement
                    && let Some(early) = recorded.take()
                {
                    peer.staged = Some(Recorded::withdraw(early)?);
                }
            }
            match judgement {
                Judgement::KeepGoing => throttled.adjust(),
                Judgement::GiveUp(reason) => {
                    let cause = Cause::NotConverging { why: reason.to_string() };
                    return Err(throttled.explain(cause).into());
                }
                // What was drained goes back, and is drained again with what the guest still writes.
                Judgement::SwitchOver(reason) => {
                    let left = epoch.frames();
                    epoch.give_back();
                    drives.give_back();
                    let (totals, shared_bytes) = (sender.totals, sender.shared_bytes());
                    let (drive_totals, throttle) = (drives.totals, throttled.figures());
                    let tale = Tale {
                        setup,
                        passes,
                        throttle,
                        totals,
                        shared_bytes,
                        drive_totals,
                        reason,
                    };
                    return Ok(Copied {
                        writes,
                        verifier,
                        drives,
                        throttled,
                        tale,
                        recorded,
                        left,
                    });
                }
            }
            self.control.update(|p| p.throttle = throttled.figures());
            let pass = measured.len() as u32;
            if let Some(verifier) = &verifier {
                verifier.sends(epoch.runs())?;
            }
            // An error drops the epoch, which gives it back (I4).
            done = limit
                .hold(&mut peer.wire, |wire| {
                    let (runs, frames) = (epoch.runs(), epoch.frames());
                    sender.begin(wire, pass, runs, frames, &mut drives, limit)?.await_end(wire)
                })
                .map_err(|cause| throttled.explain(cause))?;
            epoch.commit();
            drives.commit();
        }
    }

    /// Has disks made durable while the guest runs, and waits at most `limit` for that: what is then not done, the
    /// release of the guest waits for.
    fn flush_disks(&self, limit: Duration) {
        match self.guest.flush(limit) {
            Ok(done) => tracing::debug!(done, "flushed"),
            // The guest's own affair until it is handed over.
            Err(e) => tracing::warn!(vm = %self.guest.vm_id(), "{e}"),
        }
    }

    fn show(&self, measured: &[Measured], frames: u64, drives: &Drives, window: Duration) {
        let pending = frames + drives.pending();
        let dirty = per_second(pending.saturating_mul(PAGE_SIZE), window);
        let link = link_rate(measured).unwrap_or(0);
        let expected = expected_downtime(pending, link).map_or(0.0, ms);
        tracing::info!(pass = measured.len() - 1, pending, dirty, link, expected, "pass done");
        self.control.update(|p| {
            p.remaining_frames = frames;
            p.remaining_disk_bytes = drives.pending().saturating_mul(PAGE_SIZE);
            p.dirty_rate_bytes_per_s = dirty;
            p.link_rate_bytes_per_s = link;
            p.expected_downtime_ms = expected;
        });
    }

    /// A message that decides something must name this migration.
    fn own(&self, message: Tag, found: Token) -> Result<(), WireError> {
        let expected = self.token;
        match found == expected {
            true => Ok(()),
            false => Err(WireError::Token { message, found, expected }),
        }
    }
}

/// Setting up stages it.
fn no_record() -> Cause {
    Cause::System {
        what: "staging the hand-over record",
        cause: std::io::ErrorKind::NotFound.into(),
    }
}

fn fits(what: &'static str, found: u64, limit: u64) -> Result<(), Cause> {
    if found > limit { Err(Cause::TooLarge { what, found, limit }) } else { Ok(()) }
}

/// Of the last pass.
fn report_of(done: &PassDone, drives: &Drives, dirtied: u64, window: Duration) -> PassReport {
    let blocks = drives.passed.normal + drives.passed.zero;
    PassReport {
        frames: done.counts.normal + done.counts.zero,
        bytes: done.bytes,
        disk_bytes: blocks.saturating_mul(PAGE_SIZE),
        time_ms: ms(done.time),
        dirty_rate_bytes_per_s: per_second(dirtied.saturating_mul(PAGE_SIZE), window),
    }
}
