//! The source of a migration: `send`, and the phases that it goes through.
//!
//! One thread, the caller's, does everything: it owns the connection, the subscription and the held
//! guest. Before the hand-over record is durable every failure gives the guest back here; after it
//! only the state machine's permits decide (see `handover`).

mod connections;
mod drives;
mod expect;
mod hand_over;
mod hold;
mod pacer;
mod passes;
mod throttle;
mod verify;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::{Guest, GuestDrive, MAX_LATE, RunState, Section};
use dirty_tracker::{PAGE_SIZE, Subscription};
use uuid::Uuid;

use crate::compression::Compression;
use crate::control::{Phase, SendControl, Stop};
use crate::convergence::{
    Goals, Judgement, Measured, Reason, TimeoutStrategy, expected_downtime, judge, link_rate,
};
use crate::digest::allowance;
use crate::error::{Cause, GuestPlace, MemoryDigests, SendError, WireError};
use crate::link::Link;
use crate::message::{
    COPIES_DRIVES, Counts, FEATURES, MAX_CONFIG, MAX_CONNECTIONS, MAX_PASSES, MAX_SECTION,
    MAX_SECTIONS, MAX_SLOTS, MAX_STATE, MEMORY_DIGEST, Message, PACKED_CONTENTS, Purpose,
    SEVERAL_CONNECTIONS, StateDigest, Tag, Token, section_head,
};
use crate::records::{Records, StagedSource};
use crate::report::{PassReport, SendReport, VcpuThrottle, ms, per_second};
use crate::wire::{Wire, unexpected};
use connections::{PassDone, Passes};
pub use drives::CopyDrives;
use drives::Drives;
use expect::announce;
use hold::Held;
use passes::{Limit, on_time};
use throttle::Throttled;
use verify::Verifier;

/// Connections that join at once.
const JOINS_AT_ONCE: usize = 4;

/// How long precopy waits for disks after each pass, at most.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// The least bandwidth, bytes/s, that a migration can be held to: a message of memory takes a second then, and a
/// destination waits ten for one.
pub const MIN_BANDWIDTH: u64 = 1 << 20;

/// How a guest is sent. [`SendOptions::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct SendOptions {
    /// The directory of this host's hand-over records ([`Records`]).
    pub records: PathBuf,
    /// The pause that the last pass may take. 300 ms.
    pub downtime: Duration,
    /// Passes before the last one, at most. 30; more than 4095 count as 4095.
    pub max_passes: u32,
    /// Time for precopy. An hour.
    pub timeout: Duration,
    /// What to do when one of these two runs out. Cancel.
    pub timeout_strategy: TimeoutStrategy,
    /// Bytes/s at most while the guest runs. In the pause the link is used as it is, but what that will take is
    /// judged by this: how fast a link is that was never used so is not known. Less than [`MIN_BANDWIDTH`] counts as
    /// that; `None`, the default: as fast as it goes.
    pub max_bandwidth: Option<u64>,
    /// Connections that share in the sending of memory, 1 to [`MAX_CONNECTIONS`]. 1. More of them pay where one does
    /// not fill the link: each costs a thread on either side.
    pub connections: u32,
    /// How contents are made smaller, message by message, where that wins an eighth at least. Not at all.
    pub compression: Compression,
    /// Whether both sides compare a digest of all memory in the pause: that costs the time to read it.
    pub verify: bool,
    /// Drives that go along, because the destination cannot reach them. None.
    pub copy_drives: CopyDrives,
    /// Whether vCPUs that write are held back, by short holds, when passes do not shrink (see
    /// [`throttle`](crate::throttle)). They are.
    pub throttle: bool,
    /// Time for a connection to be made. 10 s.
    pub connect_timeout: Duration,
    /// Time for the destination to build the machine. 30 s.
    pub setup_timeout: Duration,
    /// How long the destination may make no progress at all in any other phase. 10 s.
    pub patience: Duration,
    /// The longest pause until the destination is prepared, after which the guest goes on here.
    /// `None`: ten times the downtime, or ten times what the pause was expected to take where the
    /// strategy is to pause anyway; at least 5 s.
    pub switch_over_limit: Option<Duration>,
    /// Time from COMMIT to the answer, after which the migration is in doubt. 10 s.
    pub settle_timeout: Duration,
    /// How often a destination is asked while in doubt. 500 ms.
    pub ask_every: Duration,
}

impl SendOptions {
    /// The defaults, with the directory for the hand-over record.
    pub fn new(records: impl Into<PathBuf>) -> Self {
        Self {
            records: records.into(),
            downtime: Duration::from_millis(300),
            max_passes: 30,
            timeout: Duration::from_secs(3600),
            timeout_strategy: TimeoutStrategy::Cancel,
            max_bandwidth: None,
            connections: 1,
            compression: Compression::None,
            verify: false,
            copy_drives: CopyDrives::None,
            throttle: true,
            connect_timeout: Duration::from_secs(10),
            setup_timeout: Duration::from_secs(30),
            patience: Duration::from_secs(10),
            switch_over_limit: None,
            settle_timeout: Duration::from_secs(10),
            ask_every: Duration::from_millis(500),
        }
    }

    /// How long the pause may be that `reason` led to.
    fn pause_limit(&self, reason: &Reason) -> Duration {
        let expected = reason.expected().unwrap_or_default().max(self.downtime);
        let usual = expected.saturating_mul(10).max(Duration::from_secs(5));
        self.switch_over_limit.unwrap_or(usual)
    }

    fn goals(&self) -> Goals {
        Goals {
            downtime: self.downtime,
            max_passes: self.max_passes.min(MAX_PASSES - 1),
            timeout: self.timeout,
            strategy: self.timeout_strategy,
        }
    }
}

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
        Err(e) => tracing::warn!(vm = %guest.vm_id(), "{e}"),
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
}

/// The destination has everything and is prepared; the guest here is held.
struct Ready<'a, G: Guest + ?Sized> {
    held: Held<'a, G>,
    record: StagedSource,
    tale: Tale,
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

    /// Connects and introduces itself.
    fn connect(&self) -> Result<Peer<'a>, Failed> {
        // Opened now, so that a directory that cannot be used fails before the guest is paused.
        let records = Records::open(&self.options.records)?;
        let stop = self.control.stop.clone();
        let drives = drives::chosen(self.guest, &self.options.copy_drives)?;
        let limit = self.options.connect_timeout;
        let (wire, features) = self.introduce(Purpose::Move, limit, stop)?;
        let joined = Vec::new();
        Ok(Peer { wire, records, joined, sender: None, features, drives, staged: None })
    }

    /// A connection with introductions made; both within `limit`, and not once `stop` says so.
    fn introduce(
        &self,
        purpose: Purpose,
        limit: Duration,
        stop: Arc<Stop>,
    ) -> Result<(Wire<Link>, u64), Cause> {
        let link = Link::connect(self.to, limit, self.options.patience, stop)
            .map_err(|cause| Cause::Connect { peer: self.to.to_owned(), cause })?;
        let mut wire = Wire::new(link);
        wire.stream_mut().set_deadline(Some(Instant::now() + limit));
        wire.send_header(Some((self.guest.vm_id(), self.guest.layout().hash())))?;
        let version = env!("CARGO_PKG_VERSION");
        wire.send(&Message::Hello { purpose, features: FEATURES, version })?;
        wire.recv_header()?;
        let features = match wire.recv()? {
            Message::Hello { version, features, .. } => {
                tracing::debug!(to = self.to, version, features, "connected");
                features
            }
            other => return Err(unexpected(&other, "HELLO").into()),
        };
        wire.stream_mut().set_deadline(None);
        Ok((wire, features))
    }

    /// Has the machine built at the destination.
    fn set_up(&self, peer: &mut Peer<'a>) -> Result<(), Failed> {
        self.offered(peer.features)?;
        let config = self.guest.config();
        fits("the guest's configuration", config.len() as u64, MAX_CONFIG.into())?;
        let layout = self.guest.layout().clone();
        fits("the guest's memory layout", layout.slots().len() as u64, MAX_SLOTS.into())?;
        if !peer.drives.is_empty() && peer.features & COPIES_DRIVES == 0 {
            return Err(Cause::NotOffered { feature: "copies of disks (--copy-disks)" }.into());
        }
        let wire = &mut peer.wire;
        drives::announce(wire, &peer.drives)?;
        wire.send(&Message::Config { token: self.token, layout, config: &config })?;
        // Building a machine shows no progress on the wire.
        wire.stream_mut().set_patience(self.options.setup_timeout);
        match wire.recv()? {
            Message::Ready { site } => {
                let (vm, records) = (self.guest.vm_id(), &peer.records);
                peer.staged = Some(records.stage_source(self.token, vm, self.to, site)?);
            }
            other => return Err(unexpected(&other, "READY").into()),
        }
        wire.stream_mut().set_patience(self.options.patience);
        self.join(peer)
    }

    /// Whether the destination knows all that is asked for.
    fn offered(&self, features: u64) -> Result<(), Cause> {
        let asked = [
            (self.options.verify, MEMORY_DIGEST, "a digest of memory (--verify)"),
            (
                self.options.compression != Compression::None,
                PACKED_CONTENTS,
                "compressed contents (--compress)",
            ),
            (
                self.options.connections > 1,
                SEVERAL_CONNECTIONS,
                "several connections (--connections)",
            ),
        ];
        match asked.into_iter().find(|(is, bit, _)| *is && features & bit == 0) {
            Some((.., feature)) => Err(Cause::NotOffered { feature }),
            None => Ok(()),
        }
    }

    /// Makes the connections that share in the sending, all at once.
    fn join(&self, peer: &mut Peer<'a>) -> Result<(), Failed> {
        let more = self.options.connections.clamp(1, MAX_CONNECTIONS) - 1;
        if more == 0 {
            return Ok(());
        }
        let numbers: Vec<u32> = (2..more + 2).collect();
        // The destination's door hears so many at once, and others may call, too.
        for batch in numbers.chunks(JOINS_AT_ONCE) {
            let joined: Result<Vec<_>, Cause> = std::thread::scope(|scope| {
                let join = |which: &u32| {
                    let (which, of) = (*which, more + 1);
                    let named = move |cause| {
                        let cause = Box::new(cause);
                        Cause::Connection { which, of, cause }
                    };
                    scope.spawn(move || self.join_one().map_err(named))
                };
                let threads: Vec<_> = batch.iter().map(join).collect();
                let ended = |thread: std::thread::ScopedJoinHandle<'_, _>| match thread.join() {
                    Ok(result) => result,
                    Err(panic) => std::panic::resume_unwind(panic),
                };
                threads.into_iter().map(ended).collect()
            });
            peer.joined.extend(joined?);
        }
        Ok(peer.wire.send(&Message::Connections { joined: more })?)
    }

    fn join_one(&self) -> Result<Wire<Link>, Cause> {
        let (limit, stop) = (self.options.connect_timeout, self.control.stop.clone());
        let (mut wire, _) = self.introduce(Purpose::Join, limit, stop)?;
        wire.stream_mut().set_deadline(Some(Instant::now() + limit));
        wire.send(&Message::Join { token: self.token })?;
        match wire.recv()? {
            Message::Ready { .. } => {}
            other => return Err(unexpected(&other, "READY").into()),
        }
        wire.stream_mut().set_deadline(None);
        Ok(wire)
    }

    /// Copies memory while the guest runs, until what is left is worth a pause.
    fn precopy(&self, peer: &mut Peer<'a>) -> Result<Copied<'a, G>, Failed> {
        let setup = self.begun.elapsed();
        let begun = Instant::now();
        let goals = self.options.goals();
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
        let late = || Cause::NotConverging {
            why: format!("precopy took longer than its {} s", goals.timeout.as_secs_f64()),
        };
        // Where the pause is to come at any price, a pass is finished first: it makes it shorter.
        let deadline = match goals.strategy {
            // A time beyond what the clock can say is no deadline.
            TimeoutStrategy::Cancel => begun
                .checked_add(goals.timeout)
                .map(|at| (at, &late as &(dyn Fn() -> Cause + Sync))),
            TimeoutStrategy::Switchover => None,
        };
        let frames = populated.iter().map(|r| r.count).sum();
        on_time(&mut peer.wire, deadline, |wire| announce(wire, self.guest.ram(), &populated))?;
        let mut done = on_time(&mut peer.wire, deadline, |wire| {
            tracing::debug!(ms = ms(begun.elapsed()), "announced");
            let runs = populated.iter().copied();
            sender.begin(wire, 0, runs, frames, &mut drives, deadline)?.await_end(wire)
        })
        .map_err(|cause| throttled.explain(cause))?;
        drives.commit();
        let mut since = begun;
        let mut disks_settled = false;
        loop {
            // Begun beside the next pass; waited for before the pause.
            self.flush_disks(Duration::ZERO);
            self.guest.collect()?;
            let mut epoch = writes.drain();
            drives.drain();
            let window = since.elapsed();
            since = Instant::now();
            let dirtied = epoch.frames() + drives.pending();
            passes.push(report_of(&done, &drives, dirtied, window));
            measured.push(done.measured(dirtied, drives.passed));
            throttled.measure(window);
            self.show(&measured, epoch.frames(), &drives, window);
            let mut judgement = judge(&goals, &measured, dirtied, begun.elapsed());
            if matches!(judgement, Judgement::SwitchOver(_)) && !disks_settled {
                disks_settled = true;
                self.flush_disks(FLUSH_LIMIT);
                // What the guest wrote to its memory meanwhile counts.
                epoch.give_back();
                self.guest.collect()?;
                epoch = writes.drain();
                drives.drain();
                let pending = epoch.frames() + drives.pending();
                judgement = judge(&goals, &measured, pending, begun.elapsed());
            }
            match judgement {
                Judgement::KeepGoing => throttled.adjust(&goals, &measured, dirtied),
                Judgement::GiveUp(reason) => {
                    let cause = Cause::NotConverging { why: reason.to_string() };
                    return Err(throttled.explain(cause).into());
                }
                // What was drained goes back, and is drained again with what the guest still writes.
                Judgement::SwitchOver(reason) => {
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
                    return Ok(Copied { writes, verifier, drives, throttled, tale });
                }
            }
            self.control.update(|p| p.throttle = throttled.figures());
            let pass = measured.len() as u32;
            if let Some(verifier) = &verifier {
                verifier.sends(epoch.runs())?;
            }
            // An error drops the epoch, which gives it back (I4).
            done = on_time(&mut peer.wire, deadline, |wire| {
                let (runs, frames) = (epoch.runs(), epoch.frames());
                sender.begin(wire, pass, runs, frames, &mut drives, deadline)?.await_end(wire)
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

    /// Pauses the guest, sends the rest of it, and has the destination prepare.
    fn switch_over(
        &self,
        peer: &mut Peer<'a>,
        copied: Copied<'a, G>,
    ) -> Result<Ready<'a, G>, Failed> {
        let record = peer.staged.take().ok_or_else(no_record)?;
        let mut held = Held::new(self.guest)?;
        let mut limit = self.options.pause_limit(&copied.tale.reason);
        if copied.verifier.is_some() {
            limit = limit.saturating_add(allowance(self.guest.layout().frames()));
        }
        let late = || Cause::PauseTooLong { limit };
        let until = held.since().checked_add(limit);
        let until: Limit<'_> = until.map(|at| (at, &late as &(dyn Fn() -> Cause + Sync)));
        let Peer { wire, sender, .. } = peer;
        let sender = sender.as_mut().ok_or_else(no_record)?;
        let rest =
            on_time(wire, until, |wire| self.send_rest((wire, sender), &mut held, copied, until));
        match rest {
            Ok((site, _)) if site != record.site() => {
                let why = "PREPARED names another site than READY";
                Err(held.give_up(WireError::Malformed { message: Tag::Prepared, why }))
            }
            Ok((_, tale)) => Ok(Ready { held, record, tale }),
            Err(cause) => Err(held.give_up(cause)),
        }
    }

    fn send_rest(
        &self,
        (wire, sender): (&mut Wire<Link>, &mut Passes<'a>),
        held: &mut Held<'a, G>,
        copied: Copied<'a, G>,
        until: Limit<'_>,
    ) -> Result<(Uuid, Tale), Cause> {
        let Copied { mut writes, verifier, mut drives, throttled, mut tale } = copied;
        // Should the guest go on here after all, it does so at full speed.
        drop(throttled);
        // State first: saving it may make the host write into guest memory.
        let sections = held.save_state()?;
        let epoch = held.drain(&mut writes)?;
        // The devices stand: nothing is under way any more.
        drives.drain();
        let pass = tale.passes.len() as u32;
        sender.hurry();
        if let Some(verifier) = &verifier {
            verifier.sends(epoch.runs())?;
        }
        let sent = sender.begin(wire, pass, epoch.runs(), epoch.frames(), &mut drives, until)?;
        (tale.totals, tale.shared_bytes) = (sender.totals, sender.shared_bytes());
        tale.drive_totals = drives.totals;
        if verifier.is_some() {
            wire.send(&Message::Verify)?;
            let patience =
                self.options.patience.saturating_add(allowance(self.guest.layout().frames()));
            wire.stream_mut().set_patience(patience);
        }
        // Beside the destination's, and before the state: once it has that, it waits for COMMIT no longer than it must.
        let digest = verifier.map(|verifier| verifier.digest(self.guest)).transpose()?;
        send_state(wire, &sections, held.was_running(), tale.totals)?;
        held.release()?;
        // Heard only now: the way there and back is not worth a pause of its own.
        let done = sent.await_end(wire)?;
        epoch.commit();
        drives.commit();
        tale.passes.push(report_of(&done, &drives, 0, done.time));
        if let Some(ours) = digest {
            match wire.recv()? {
                Message::Digest(theirs) if theirs == ours => {}
                Message::Digest(theirs) => {
                    let digests = MemoryDigests { ours, theirs };
                    return Err(Cause::MemoryDiffers(Box::new(digests)));
                }
                other => return Err(unexpected(&other, "DIGEST").into()),
            }
            wire.stream_mut().set_patience(self.options.patience);
        }
        let says = match wire.recv()? {
            Message::Prepared(says) => says,
            other => return Err(unexpected(&other, "PREPARED").into()),
        };
        self.own(Tag::Prepared, says.token)?;
        let same = |what, ours: u64, theirs: u64| match ours == theirs {
            true => Ok(()),
            false => Err(Cause::Differs { what, ours, theirs }),
        };
        same("the state's digest", StateDigest::of(&sections).into(), says.digest.into())?;
        same("the count of frames with content", tale.totals.normal, says.counts.normal)?;
        same("the count of zero frames", tale.totals.zero, says.counts.zero)?;
        let late = held.detach()?;
        fits("what came late for the guest", late.len() as u64, MAX_LATE as u64)?;
        wire.send(&Message::Late(&late))?;
        Ok((says.site, tale))
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

/// Sends the state sections and their end.
fn send_state(
    wire: &mut Wire<Link>,
    sections: &[Section],
    was_running: bool,
    counts: Counts,
) -> Result<(), Cause> {
    fits("the guest's state", sections.len() as u64, MAX_SECTIONS.into())?;
    let all = sections.iter().map(|s| s.bytes.len() as u64).sum();
    fits("the guest's state", all, MAX_STATE)?;
    for section in sections {
        fits("a state section", section.bytes.len() as u64, MAX_SECTION.into())?;
        wire.send_parts(Tag::State, &[&section_head(section), &section.bytes])?;
    }
    let sections = sections.len() as u32;
    Ok(wire.send(&Message::StateEnd { sections, was_running, counts })?)
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
