//! Pre-copy: passes over memory and disks while the guest runs, until the rest fits into a pause.

use std::time::{Duration, Instant};

use driftline_dirty_tracker::{DirtySet, FrameRun, PAGE_SIZE, Subscription};

use super::announce::announce;
use super::channels::Channels;
use super::drives::Drives;
use super::guest::Migratable;
use super::job::{SendFailed, SendJob};
use super::limit::Limit;
use super::options::MIN_BANDWIDTH;
use super::passes::{PassDone, Passes};
use super::record::HandOverRecord;
use super::setup::SetUp;
use super::throttle::GuestThrottle;
use super::verify::Verifier;
use crate::error::Cause;
use crate::heap;
use crate::policy::convergence::{
    Goals, Judgement, PassMeasurement, Reason, expected_downtime, link_rate,
};
use crate::report::{PassReport, VcpuThrottle, ms, per_second};

/// Upper bound on repeating the judgement after disks and the record were synced.
const MAX_RECHECKS: u32 = 2;

/// Upper bound on flushing disks before the first judgement is repeated.
pub(super) const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// The result of pre-copy. Later writes are in `writes` and in the disks' own subscriptions.
pub(super) struct PrecopyResult<'a, G: Migratable + ?Sized> {
    /// `None` if memory is handed over as it is.
    pub(super) writes: Option<Subscription>,
    pub(super) verifier: Option<Verifier>,
    pub(super) drives: Drives,
    pub(super) passes: Passes<'a>,
    pub(super) guest_throttle: GuestThrottle<'a, G>,
    pub(super) stats: Stats,
    /// Durable, unless digests of memory are compared first.
    pub(super) record: HandOverRecord,
    /// Feature bits of the destination's HELLO.
    pub(super) features: u64,
    /// Dirty frames at the time of the decision to pause.
    pub(super) left: u64,
}

/// Figures of pre-copy for the report.
pub(super) struct Stats {
    pub(super) setup: Duration,
    pub(super) passes: Vec<PassReport>,
    pub(super) throttle: Vec<VcpuThrottle>,
    pub(super) reason: Reason,
}

/// A pre-copy in progress.
struct Precopy<'j, 'a, G: Migratable + ?Sized> {
    job: &'j SendJob<'a, G>,
    goals: Goals,
    limit: Limit,
    features: u64,
    setup: Duration,
    begun: Instant,
    writes: Subscription,
    drives: Drives,
    verifier: Option<Verifier>,
    passes: Passes<'a>,
    measured: Vec<PassMeasurement>,
    reports: Vec<PassReport>,
    /// Time of the last drain.
    drained: Instant,
    rechecks: u32,
    guest_throttle: GuestThrottle<'a, G>,
    /// Declared after `guest_throttle`, so that on failure the throttle ends before a durable
    /// record is removed.
    record: HandOverRecord,
}

/// What follows a pass.
enum AfterPass<'j, 'a, G: Migratable + ?Sized> {
    /// Another pass, which sends the drained set.
    Next(Precopy<'j, 'a, G>, DirtySet),
    /// The pause, with this number of dirty frames.
    SwitchOver(Precopy<'j, 'a, G>, Reason, u64),
}

impl<'a, G: Migratable + ?Sized> SendJob<'a, G> {
    /// Copies memory and disks while the guest runs, until the rest fits into a pause.
    pub(super) fn precopy(
        &self,
        channels: &mut Channels,
        set_up: SetUp,
    ) -> Result<PrecopyResult<'a, G>, SendFailed> {
        let (mut precopy, populated) = Precopy::begin(self, channels, set_up)?;
        let mut done = precopy.first_pass(channels, &populated)?;
        loop {
            done = match precopy.decide_next(done)? {
                AfterPass::Next(next, epoch) => {
                    precopy = next;
                    precopy.next_pass(channels, epoch)?
                }
                AfterPass::SwitchOver(last, reason, left) => return Ok(last.finish(reason, left)),
            };
        }
    }
}

impl<'j, 'a, G: Migratable + ?Sized> Precopy<'j, 'a, G> {
    /// Subscribes to writes. Returns the runs that the first pass has to send.
    fn begin(
        job: &'j SendJob<'a, G>,
        channels: &Channels,
        set_up: SetUp,
    ) -> Result<(Self, Vec<FrameRun>), SendFailed> {
        let SetUp { record, features, drives } = set_up;
        let setup = job.begun.elapsed();
        let begun = Instant::now();
        let (goals, guest) = (job.options.goals(), job.guest);
        let guest_throttle = GuestThrottle::new(guest, job.options.throttle);
        // Subscribe before reading which memory is populated: a write in between is in the first
        // drained set.
        let writes = guest.subscribe("migrate")?;
        let subscribed = begun.elapsed();
        let populated = guest.populated()?;
        let (subscribed_ms, populated_ms) = (ms(subscribed), ms(begun.elapsed()));
        let runs = populated.len();
        tracing::debug!(subscribed_ms, populated_ms, runs, "subscribed to writes");
        let limit = Limit::of_precopy(begun, &goals);
        let drives = Drives::follow(drives, job.options.disk_limit, &job.control.stop, limit)?;
        let verifier = match job.options.verify {
            true => Some(Verifier::new(guest, &populated)?),
            false => None,
        };
        let rate = job.options.max_bandwidth.map(|rate| rate.max(MIN_BANDWIDTH));
        let compression = job.options.compression;
        let passes = Passes::new(guest.ram(), job.control, channels, features, compression, rate)?;
        let precopy = Self {
            job,
            goals,
            limit,
            features,
            setup,
            begun,
            writes,
            drives,
            verifier,
            passes,
            measured: Vec::new(),
            reports: Vec::new(),
            drained: begun,
            rechecks: 0,
            guest_throttle,
            record: HandOverRecord::Staged(record),
        };
        Ok((precopy, populated))
    }

    /// Sends all populated memory as pass 0.
    fn first_pass(
        &mut self,
        channels: &mut Channels,
        populated: &[FrameRun],
    ) -> Result<PassDone, SendFailed> {
        let frames = populated.iter().map(|r| r.count).sum();
        let (job, begun) = (self.job, self.begun);
        self.limit.enforce(channels, |channels| {
            announce(&mut channels.first, job.guest.ram(), populated)
        })?;
        tracing::debug!(ms = ms(begun.elapsed()), "announced");
        let done = self.pass(channels, populated.iter().copied(), frames)?;
        self.drives.commit();
        Ok(done)
    }

    /// Sends the set that was drained after the last pass.
    fn next_pass(
        &mut self,
        channels: &mut Channels,
        epoch: DirtySet,
    ) -> Result<PassDone, SendFailed> {
        if let Some(verifier) = &mut self.verifier {
            verifier.sends(epoch.runs())?;
        }
        // On an error the set is dropped, which gives it back (I4).
        let done = self.pass(channels, epoch.runs(), epoch.frames())?;
        epoch.commit();
        self.drives.commit();
        Ok(done)
    }

    fn pass(
        &mut self,
        channels: &mut Channels,
        runs: impl Iterator<Item = FrameRun> + Send,
        frames: u64,
    ) -> Result<PassDone, Cause> {
        let (pass, limit) = (self.measured.len() as u32, self.limit);
        let (passes, drives) = (&mut self.passes, &mut self.drives);
        let done = limit.enforce(channels, |channels| {
            let sent = passes.begin(channels, pass, runs, frames, drives, limit)?;
            sent.await_end(&mut channels.first)
        });
        done.map_err(|cause| self.guest_throttle.explain(cause))
    }

    /// Measures a pass and decides what follows it. Before a pause it flushes disks, makes the
    /// hand-over record durable, and repeats the decision with the writes of that time.
    fn decide_next(mut self, done: PassDone) -> Result<AfterPass<'j, 'a, G>, SendFailed> {
        // Starts the flush without waiting for it.
        flush_disks(self.job.guest, Duration::ZERO);
        let mut epoch = self.drain()?;
        let window = self.drained.elapsed();
        self.drained = Instant::now();
        let dirtied = epoch.frames() + self.drives.pending();
        self.reports.push(done.report(self.drives.passed, dirtied, window));
        self.measured.push(done.measured(dirtied, self.drives.passed));
        self.guest_throttle.measure(window);
        self.show(epoch.frames(), window);
        let mut judgement = self.judge(&epoch);
        if matches!(judgement, Judgement::SwitchOver(_)) && self.rechecks <= MAX_RECHECKS {
            self.rechecks += 1;
            if self.rechecks == 1 {
                flush_disks(self.job.guest, FLUSH_LIMIT);
            }
            // The record is made durable now, so that the pause does not wait for its disk. With
            // `verify` it is made after the comparison of digests, which takes long: an operator
            // could find the record meanwhile and think that the migration is in doubt.
            if self.verifier.is_none() {
                self.record = HandOverRecord::Durable(self.record.make_durable()?);
            }
            // The pause may be next.
            self.job.guest.stay_awake();
            heap::grow();
            // Writes during the syncs count, but not without end: slow disks could always let them
            // exceed the target.
            if self.rechecks <= MAX_RECHECKS {
                epoch.give_back();
                epoch = self.drain()?;
                judgement = self.judge(&epoch);
            }
            if let Judgement::KeepGoing = judgement {
                self.record = self.record.withdraw()?;
            }
        }
        match judgement {
            Judgement::KeepGoing => {
                self.guest_throttle.adjust();
                self.job.control.update(|p| p.throttle = self.guest_throttle.figures());
                Ok(AfterPass::Next(self, epoch))
            }
            Judgement::GiveUp(limit) => {
                let cause = Cause::NotConverging { limit: limit.into(), throttle: None };
                Err(self.guest_throttle.explain(cause).into())
            }
            // The set is given back, and drained again once the guest is paused.
            Judgement::SwitchOver(reason) => {
                let left = epoch.frames();
                epoch.give_back();
                self.drives.give_back();
                Ok(AfterPass::SwitchOver(self, reason, left))
            }
        }
    }

    fn finish(self, reason: Reason, left: u64) -> PrecopyResult<'a, G> {
        let throttle = self.guest_throttle.figures();
        let stats = Stats { setup: self.setup, passes: self.reports, throttle, reason };
        PrecopyResult {
            writes: Some(self.writes),
            verifier: self.verifier,
            drives: self.drives,
            passes: self.passes,
            guest_throttle: self.guest_throttle,
            stats,
            record: self.record,
            features: self.features,
            left,
        }
    }

    /// Drains the frames and blocks written or given back since the last drain.
    fn drain(&mut self) -> Result<DirtySet, Cause> {
        self.job.guest.collect()?;
        let epoch = self.writes.drain();
        self.drives.drain();
        Ok(epoch)
    }

    fn judge(&mut self, epoch: &DirtySet) -> Judgement {
        let pending = epoch.frames() + self.drives.pending();
        self.guest_throttle.judge(&self.goals, &self.measured, pending, self.begun.elapsed())
    }

    fn show(&self, frames: u64, window: Duration) {
        let pending = frames + self.drives.pending();
        let dirty = per_second(pending.saturating_mul(PAGE_SIZE), window);
        let link = link_rate(&self.measured).unwrap_or(0);
        let expected = expected_downtime(pending, link).map_or(0.0, ms);
        tracing::info!(pass = self.measured.len() - 1, pending, dirty, link, expected, "pass done");
        self.job.control.update(|p| {
            p.remaining_frames = frames;
            p.remaining_disk_bytes = self.drives.pending().saturating_mul(PAGE_SIZE);
            p.dirty_rate_bytes_per_s = dirty;
            p.link_rate_bytes_per_s = link;
            p.expected_downtime_ms = expected;
        });
    }
}

/// Flushes disks while the guest runs, and waits at most `limit`. The rest of the flush delays the
/// release of the disks in the pause.
pub(super) fn flush_disks<G: Migratable + ?Sized>(guest: &G, limit: Duration) {
    match guest.flush(limit) {
        Ok(done) => tracing::debug!(done, "flushed"),
        // Until the hand-over a failed flush is reported to the guest, and fails no migration.
        Err(e) => tracing::warn!(vm = %guest.vm_id(), "{e}"),
    }
}
