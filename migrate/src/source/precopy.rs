//! Pre-copy: passes over memory and drives while the guest runs, until what is left is worth a
//! pause.

use std::time::{Duration, Instant};

use driftline_dirty_tracker::{Epoch, FrameRun, PAGE_SIZE, Subscription};
use driftline_guest::Guest;

use super::announce::announce;
use super::channels::Channels;
use super::drives::Drives;
use super::job::{Failed, Job};
use super::limit::Limit;
use super::options::MIN_BANDWIDTH;
use super::passes::{PassDone, Passes};
use super::record::Record;
use super::setup::SetUp;
use super::throttle::Throttled;
use super::verify::Verifier;
use crate::error::Cause;
use crate::heap;
use crate::policy::convergence::{
    Goals, Judgement, Measured, Reason, expected_downtime, link_rate,
};
use crate::report::{PassReport, VcpuThrottle, ms, per_second};

/// How often it is judged once more what the guest wrote while disks and the record were synced.
const SETTLINGS: u32 = 2;

/// How long precopy waits for disks after each pass, at most.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// Memory and drives as pre-copy left them: what was written since is in `writes`, and in theirs.
pub(super) struct Copied<'a, G: Guest + ?Sized> {
    pub(super) writes: Subscription,
    pub(super) verifier: Option<Verifier>,
    pub(super) drives: Drives,
    pub(super) passes: Passes<'a>,
    pub(super) throttled: Throttled<'a, G>,
    pub(super) stats: Stats,
    /// Stands, unless digests of memory are to be compared first.
    pub(super) record: Record,
    /// What the destination can do.
    pub(super) features: u64,
    /// Frames that were left for the last pass when the pause was decided on.
    pub(super) left: u64,
}

/// What the report will tell of pre-copy.
pub(super) struct Stats {
    pub(super) setup: Duration,
    pub(super) passes: Vec<PassReport>,
    pub(super) throttle: Vec<VcpuThrottle>,
    pub(super) reason: Reason,
}

/// A pre-copy under way.
struct Precopy<'j, 'a, G: Guest + ?Sized> {
    job: &'j Job<'a, G>,
    goals: Goals,
    limit: Limit,
    features: u64,
    setup: Duration,
    begun: Instant,
    writes: Subscription,
    drives: Drives,
    verifier: Option<Verifier>,
    passes: Passes<'a>,
    measured: Vec<Measured>,
    reports: Vec<PassReport>,
    /// When the writes were drained last.
    drained: Instant,
    settlings: u32,
    throttled: Throttled<'a, G>,
    /// Behind the throttle: a record that stands is removed after the guest has its full speed
    /// again.
    record: Record,
}

/// What follows a pass.
enum AfterPass<'j, 'a, G: Guest + ?Sized> {
    /// Another one, which sends what was drained.
    Next(Precopy<'j, 'a, G>, Epoch),
    /// The pause, with so many frames left.
    SwitchOver(Precopy<'j, 'a, G>, Reason, u64),
}

impl<'a, G: Guest + ?Sized> Job<'a, G> {
    /// Copies memory while the guest runs, until what is left is worth a pause.
    pub(super) fn precopy(
        &self,
        channels: &mut Channels,
        set_up: SetUp,
    ) -> Result<Copied<'a, G>, Failed> {
        let (mut precopy, populated) = Precopy::begin(self, channels, set_up)?;
        let mut done = precopy.first_pass(channels, &populated)?;
        loop {
            done = match precopy.settle(done)? {
                AfterPass::Next(next, epoch) => {
                    precopy = next;
                    precopy.next_pass(channels, epoch)?
                }
                AfterPass::SwitchOver(last, reason, left) => return Ok(last.finish(reason, left)),
            };
        }
    }
}

impl<'j, 'a, G: Guest + ?Sized> Precopy<'j, 'a, G> {
    /// Begins to follow writes. The first pass is to bring the runs that are returned.
    fn begin(
        job: &'j Job<'a, G>,
        channels: &Channels,
        set_up: SetUp,
    ) -> Result<(Self, Vec<FrameRun>), Failed> {
        let SetUp { record, features, drives } = set_up;
        let setup = job.begun.elapsed();
        let begun = Instant::now();
        let (goals, guest) = (job.options.goals(), job.guest);
        let throttled = Throttled::new(guest, job.options.throttle);
        // First the subscription, then the look at what is populated: whatever is written between
        // the two is in the first epoch.
        let writes = guest.subscribe("migrate")?;
        let subscribed = begun.elapsed();
        let populated = guest.populated()?;
        let (subscribed, looked) = (ms(subscribed), ms(begun.elapsed()));
        tracing::debug!(subscribed, looked, runs = populated.len(), "ms; writes are followed");
        let drives = Drives::follow(&drives)?;
        let verifier = match job.options.verify {
            true => Some(Verifier::new(guest, &populated)?),
            false => None,
        };
        let rate = job.options.max_bandwidth.map(|rate| rate.max(MIN_BANDWIDTH));
        let compression = job.options.compression;
        let passes = Passes::new(guest.ram(), job.control, channels, features, compression, rate)?;
        let limit = Limit::of_precopy(begun, &goals);
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
            settlings: 0,
            throttled,
            record: Record::Staged(record),
        };
        Ok((precopy, populated))
    }

    /// Sends all that the guest has, as pass 0.
    fn first_pass(
        &mut self,
        channels: &mut Channels,
        populated: &[FrameRun],
    ) -> Result<PassDone, Failed> {
        let frames = populated.iter().map(|r| r.count).sum();
        let (job, begun) = (self.job, self.begun);
        self.limit
            .hold(channels, |channels| announce(&mut channels.first, job.guest.ram(), populated))?;
        tracing::debug!(ms = ms(begun.elapsed()), "announced");
        let done = self.pass(channels, populated.iter().copied(), frames)?;
        self.drives.commit();
        Ok(done)
    }

    /// Sends what was drained after the last pass.
    fn next_pass(&mut self, channels: &mut Channels, epoch: Epoch) -> Result<PassDone, Failed> {
        if let Some(verifier) = &self.verifier {
            verifier.sends(epoch.runs())?;
        }
        // An error drops the epoch, which gives it back (I4).
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
        let done = limit.hold(channels, |channels| {
            let sent = passes.begin(channels, pass, runs, frames, drives, limit)?;
            sent.await_end(&mut channels.first)
        });
        done.map_err(|cause| self.throttled.explain(cause))
    }

    /// Measures a pass, and decides what follows it. Before a pause, disks are flushed and the
    /// hand-over record is made durable, and it is judged once more what was written meanwhile.
    fn settle(mut self, done: PassDone) -> Result<AfterPass<'j, 'a, G>, Failed> {
        // Begun beside the next pass; waited for before the pause.
        self.flush_disks(Duration::ZERO);
        let mut epoch = self.drain()?;
        let window = self.drained.elapsed();
        self.drained = Instant::now();
        let dirtied = epoch.frames() + self.drives.pending();
        self.reports.push(done.report(self.drives.passed, dirtied, window));
        self.measured.push(done.measured(dirtied, self.drives.passed));
        self.throttled.measure(window);
        self.show(epoch.frames(), window);
        let mut judgement = self.judge(&epoch);
        if matches!(judgement, Judgement::SwitchOver(_)) && self.settlings <= SETTLINGS {
            self.settlings += 1;
            if self.settlings == 1 {
                self.flush_disks(FLUSH_LIMIT);
            }
            // Nor does the pause wait for the record's disk. Where digests are compared it is made
            // only after that: it takes long, and a record is in an operator's way.
            if self.verifier.is_none() {
                self.record = Record::Standing(self.record.stand()?);
            }
            // The pause is near.
            self.job.guest.stay_awake();
            heap::grow();
            // What the guest wrote to its memory meanwhile counts, unless disks are so slow that it
            // always is too much.
            if self.settlings <= SETTLINGS {
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
                self.throttled.adjust();
                self.job.control.update(|p| p.throttle = self.throttled.figures());
                Ok(AfterPass::Next(self, epoch))
            }
            Judgement::GiveUp(reason) => {
                let cause = Cause::NotConverging { why: reason.to_string() };
                Err(self.throttled.explain(cause).into())
            }
            // What was drained goes back, and is drained again with what the guest still writes.
            Judgement::SwitchOver(reason) => {
                let left = epoch.frames();
                epoch.give_back();
                self.drives.give_back();
                Ok(AfterPass::SwitchOver(self, reason, left))
            }
        }
    }

    fn finish(self, reason: Reason, left: u64) -> Copied<'a, G> {
        let throttle = self.throttled.figures();
        let stats = Stats { setup: self.setup, passes: self.reports, throttle, reason };
        Copied {
            writes: self.writes,
            verifier: self.verifier,
            drives: self.drives,
            passes: self.passes,
            throttled: self.throttled,
            stats,
            record: self.record,
            features: self.features,
            left,
        }
    }

    /// What was written since the last drain, and what was given back.
    fn drain(&mut self) -> Result<Epoch, Cause> {
        self.job.guest.collect()?;
        let epoch = self.writes.drain();
        self.drives.drain();
        Ok(epoch)
    }

    fn judge(&mut self, epoch: &Epoch) -> Judgement {
        let pending = epoch.frames() + self.drives.pending();
        self.throttled.judge(&self.goals, &self.measured, pending, self.begun.elapsed())
    }

    /// Has disks made durable while the guest runs, and waits at most `limit` for that: what is
    /// then not done, the release of the guest waits for.
    fn flush_disks(&self, limit: Duration) {
        match self.job.guest.flush(limit) {
            Ok(done) => tracing::debug!(done, "flushed"),
            // The guest's own affair until it is handed over.
            Err(e) => tracing::warn!(vm = %self.job.guest.vm_id(), "{e}"),
        }
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
