//! The source's pause up to PREPARED: sends the state and the last pass.

use std::fmt::Write as _;
use std::time::Instant;

use driftline_dirty_tracker::{DirtySet, Subscription};
use driftline_guest::{MAX_QUEUED_PACKET_BYTES, NextHost, Section};
use uuid::Uuid;

use super::channels::Channels;
use super::drives::Drives;
use super::guest::Migratable;
use super::job::{SendFailed, SendJob};
use super::limit::Limit;
use super::passes::{PassDone, PassSent, Passes};
use super::paused_guest::PausedGuest;
use super::precopy::{PrecopyResult, Stats};
use super::record::{DurableRecord, HandOverRecord};
use super::shared_guest;
use super::verify::Verifier;
use crate::error::{Cause, fits};
use crate::protocol::digest::{MemoryDigests, allowance};
use crate::protocol::error::WireError;
use crate::protocol::features::{EARLY_STATE, WHOLE_STATE};
use crate::protocol::limits::{MAX_SECTION, MAX_SECTIONS, MAX_STATE};
use crate::protocol::message::{Counts, StateDigest, WireMessage, section_head};
use crate::protocol::tag::Tag;
use crate::transport::link::Link;
use crate::transport::wire::Wire;

/// A migration whose destination is prepared. The guest here is paused, and its record is durable.
pub(super) struct PreparedMigration<'a, G: Migratable + ?Sized> {
    pub(super) paused: PausedGuest<'a, G>,
    pub(super) record: DurableRecord,
    pub(super) stats: Stats,
    /// Frames of all passes.
    pub(super) totals: Counts,
    /// Blocks of all passes.
    pub(super) drive_totals: Counts,
    pub(super) deferred: DeferredDrop<'a>,
}

/// Memory that is no longer needed. Freeing it takes time, so it is dropped after the guest has
/// moved, or once the migration is in doubt.
pub(super) struct DeferredDrop<'a> {
    _writes: Option<Subscription>,
    _verifier: Option<Verifier>,
    _drives: Drives,
    _passes: Passes<'a>,
    _sections: Vec<Section>,
}

/// The state and memory that are sent in the pause.
struct PauseTransfer<'j, 'a, G: Migratable + ?Sized> {
    job: &'j SendJob<'a, G>,
    limit: Limit,
    features: u64,
    /// `None` if memory is handed over as it is: the last pass has no frames.
    writes: Option<Subscription>,
    /// Set if digests of memory are compared.
    verifier: Option<Verifier>,
    drives: Drives,
    passes: Passes<'a>,
    sections: Vec<Section>,
    /// Number of the last pass.
    pass: u32,
    /// Dirty frames at the time of the decision to pause.
    left: u64,
    timings: PauseTimings,
}

/// A paused guest at the start of the pause.
struct PauseStart<'j, 'a, G: Migratable + ?Sized> {
    paused: PausedGuest<'a, G>,
    transfer: PauseTransfer<'j, 'a, G>,
    record: HandOverRecord,
    stats: Stats,
}

/// The last pass, acknowledged.
struct LastPass {
    /// The set that it sent, not committed yet (I4).
    epoch: Option<DirtySet>,
    done: PassDone,
    state_digest: u32,
}

impl<'a, G: Migratable + ?Sized> SendJob<'a, G> {
    /// Pauses the guest, sends the rest of it, and waits for PREPARED.
    pub(super) fn switch_over(
        &self,
        channels: &mut Channels,
        precopy: PrecopyResult<'a, G>,
    ) -> Result<PreparedMigration<'a, G>, SendFailed> {
        // Every failure below resumes the guest (`give_up`) before the record is dropped.
        // `record` is bound first, so that it is dropped last.
        let PauseStart { record, mut paused, mut transfer, mut stats } = self.pause(precopy)?;
        let limit = transfer.limit;
        let last = match limit.enforce(channels, |channels| transfer.send(channels, &mut paused)) {
            Ok(last) => last,
            Err(cause) => return Err(paused.give_up(cause)),
        };
        // Durable, unless digests had to be compared first.
        let record = match record.make_durable() {
            Ok(record) => record,
            Err(cause) => return Err(paused.give_up(cause)),
        };
        transfer.timings.end("recorded");
        let prepared = limit.enforce(channels, |channels| {
            transfer.await_prepared(&mut channels.first, &paused, last, &mut stats)
        });
        let named = match prepared {
            Ok(site) => site,
            Err(cause) => return Err(paused.give_up(cause)),
        };
        if record.site() != named {
            let why = "PREPARED names another site than READY";
            return Err(paused.give_up(WireError::Malformed { message: Tag::Prepared, why }));
        }
        let (totals, drive_totals) = (transfer.passes.totals, transfer.drives.totals);
        let deferred = transfer.into_deferred();
        Ok(PreparedMigration { paused, record, stats, totals, drive_totals, deferred })
    }

    /// Pauses the guest and saves its state. A failure resumes the guest.
    fn pause(&self, precopy: PrecopyResult<'a, G>) -> Result<PauseStart<'_, 'a, G>, SendFailed> {
        let PrecopyResult {
            record,
            writes,
            verifier,
            drives,
            passes,
            guest_throttle,
            stats,
            features,
            left,
        } = precopy;
        // State first: saving it may make the host write to guest memory.
        let (paused, saved) = PausedGuest::saving(self.guest)?;
        // The throttle ends here, so that a guest that is resumed has its full speed.
        drop(guest_throttle);
        let sections = match saved {
            Ok(sections) => sections,
            Err(e) => return Err(paused.give_up(e)),
        };
        let mut limit = self.options.pause_limit(&stats.reason);
        if verifier.is_some() {
            limit = limit.saturating_add(allowance(self.guest.layout().frames()));
        }
        let limit = Limit::of_pause(paused.since(), limit);
        let (pass, timings) = (stats.passes.len() as u32, PauseTimings::begin(paused.since()));
        let transfer = PauseTransfer {
            job: self,
            limit,
            features,
            writes,
            verifier,
            drives,
            passes,
            sections,
            pass,
            left,
            timings,
        };
        Ok(PauseStart { paused, transfer, record, stats })
    }
}

impl<'a, G: Migratable + ?Sized> PauseTransfer<'_, 'a, G> {
    /// Keeps the memory of the transfer until it may be freed.
    fn into_deferred(self) -> DeferredDrop<'a> {
        DeferredDrop {
            _writes: self.writes,
            _verifier: self.verifier,
            _drives: self.drives,
            _passes: self.passes,
            _sections: self.sections,
        }
    }

    /// Sends the state and the last pass, and waits for the pass to be acknowledged.
    fn send(
        &mut self,
        channels: &mut Channels,
        paused: &mut PausedGuest<'a, G>,
    ) -> Result<LastPass, Cause> {
        self.timings.end("saved");
        // The destination restores an early state while the last pass arrives. With `verify` the
        // state follows the digests, because restoring it may write to memory.
        let offered = self.features & EARLY_STATE != 0;
        let early = self.verifier.is_none() && offered && !self.sections.is_empty();
        if early {
            self.send_early_state(&mut channels.first)?;
        }
        let (epoch, sent) = self.send_last_pass(channels, paused)?;
        let wire = &mut channels.first;
        let digest = self.digest(wire)?;
        if !early {
            send_sections(wire, &self.sections, None)?;
        }
        let (sections, counts) = (self.sections.len() as u32, self.passes.totals);
        wire.send(&WireMessage::StateEnd { sections, was_running: paused.was_running(), counts })?;
        wire.stream().set_cork(false);
        self.timings.end("sent");
        match self.next_host() {
            NextHost::Another => paused.release(NextHost::Another)?,
            // The guest's peers stay attached through the same files, so there is nothing to wait
            // for. Packets are queued only if an earlier migration brought them.
            NextHost::This => match paused.release_and_detach(NextHost::This)? {
                late if late.is_empty() => {}
                late => send_late(wire, &late)?,
            },
        }
        self.timings.end("released");
        let state_digest = StateDigest::of(&self.sections);
        // Read only now, because a separate round trip would prolong the pause.
        let done = sent.await_end(wire)?;
        if let Some(ours) = digest {
            self.same_memory(wire, ours)?;
            self.timings.end("verified");
        }
        Ok(LastPass { epoch, done, state_digest })
    }

    fn next_host(&self) -> NextHost {
        shared_guest::next_host(self.job.options, self.features)
    }

    /// Sends the state ahead of the last pass.
    fn send_early_state(&self, wire: &mut Wire<Link>) -> Result<(), Cause> {
        let sections = self.sections.len() as u32;
        let whole = WireMessage::StateWhole { sections, frames: self.left };
        let whole = Some(whole).filter(|_| self.features & WHOLE_STATE != 0);
        send_sections(wire, &self.sections, whole.as_ref())
    }

    /// Sends the frames and blocks written since the last pass. Small messages that follow share
    /// its packets, except VERIFY, which must arrive immediately.
    fn send_last_pass(
        &mut self,
        channels: &mut Channels,
        paused: &PausedGuest<'a, G>,
    ) -> Result<(Option<DirtySet>, PassSent), Cause> {
        let epoch = self.writes.as_mut().map(|writes| paused.drain(writes)).transpose()?;
        self.timings.end("drained");
        // The devices are paused, so no write is in flight.
        self.drives.drain();
        self.passes.pause();
        if let Some(verifier) = &mut self.verifier {
            verifier.sends(epoch.iter().flat_map(DirtySet::runs))?;
        }
        channels.first.stream().set_cork(self.verifier.is_none());
        let runs = epoch.iter().flat_map(DirtySet::runs);
        let frames = epoch.as_ref().map_or(0, DirtySet::frames);
        let drives = &mut self.drives;
        let sent = self.passes.begin(channels, self.pass, runs, frames, drives, self.limit)?;
        Ok((epoch, sent))
    }

    /// Asks for the destination's digest of all memory, and returns this side's; `None` if digests
    /// are not compared. Both sides compute in parallel. This precedes the state, because after the
    /// state the destination waits for COMMIT.
    fn digest(&self, wire: &mut Wire<Link>) -> Result<Option<u128>, Cause> {
        let Some(verifier) = &self.verifier else { return Ok(None) };
        wire.send(&WireMessage::Verify)?;
        let allowance = allowance(self.job.guest.layout().frames());
        wire.stream_mut()
            .set_progress_timeout(self.job.options.progress_timeout.saturating_add(allowance));
        verifier.digest(self.job.guest).map(Some)
    }

    /// Reads the destination's digest of all memory, and compares it with `ours`.
    fn same_memory(&self, wire: &mut Wire<Link>, ours: u128) -> Result<(), Cause> {
        match wire.recv()? {
            WireMessage::Digest(theirs) if theirs == ours => {}
            WireMessage::Digest(theirs) => {
                let digests = MemoryDigests { ours, theirs };
                return Err(Cause::MemoryDiffers(Box::new(digests)));
            }
            other => return Err(other.unexpected("DIGEST").into()),
        }
        wire.stream_mut().set_progress_timeout(self.job.options.progress_timeout);
        Ok(())
    }

    /// Reads PREPARED, compares it with what was sent, and detaches the guest unless that was done.
    /// Returns the site that PREPARED names.
    fn await_prepared(
        &mut self,
        wire: &mut Wire<Link>,
        paused: &PausedGuest<'a, G>,
        last: LastPass,
        stats: &mut Stats,
    ) -> Result<Uuid, Cause> {
        let LastPass { epoch, done, state_digest } = last;
        if let Some(epoch) = epoch {
            epoch.commit();
        }
        self.drives.commit();
        stats.passes.push(done.report(self.drives.passed, 0, done.time));
        let prepared = match wire.recv()? {
            WireMessage::Prepared(payload) => payload,
            other => return Err(other.unexpected("PREPARED").into()),
        };
        self.timings.end("prepared");
        tracing::debug!("the pause, in us: {}", self.timings.text);
        self.job.check_token(Tag::Prepared, prepared.token)?;
        let same = |what, ours: u64, theirs: u64| match ours == theirs {
            true => Ok(()),
            false => Err(Cause::Differs { what, ours, theirs }),
        };
        let ours = self.passes.totals;
        same("the state's digest", state_digest.into(), prepared.digest.into())?;
        same("the count of frames with content", ours.normal, prepared.counts.normal)?;
        same("the count of zero frames", ours.zero, prepared.counts.zero)?;
        if self.next_host() == NextHost::Another {
            // Last, because no peer reaches the guest afterwards.
            send_late(wire, &paused.detach(NextHost::Another)?)?;
        }
        Ok(prepared.site)
    }
}

/// Sends the packets that arrived for the guest since its state was saved.
fn send_late(wire: &mut Wire<Link>, late: &[u8]) -> Result<(), Cause> {
    fits("the guest's late packets", late.len() as u64, MAX_QUEUED_PACKET_BYTES as u64, "bytes")?;
    Ok(wire.send(&WireMessage::Late(late))?)
}

/// Durations of the steps of a pause, for the log.
struct PauseTimings {
    last: Instant,
    text: String,
}

impl PauseTimings {
    fn begin(last: Instant) -> Self {
        Self { last, text: String::with_capacity(128) }
    }

    /// Records the end of a step.
    fn end(&mut self, step: &str) {
        let now = Instant::now();
        // Writing to a String cannot fail.
        let _ = write!(self.text, "{step} {} ", now.duration_since(self.last).as_micros());
        self.last = now;
    }
}

/// Sends all sections, and `last` with them: a message of its own would wake the destination once
/// more.
fn send_sections(
    wire: &mut Wire<Link>,
    sections: &[Section],
    last: Option<&WireMessage<'_>>,
) -> Result<(), Cause> {
    fits("the guest's state", sections.len() as u64, MAX_SECTIONS.into(), "sections")?;
    let all = sections.iter().map(|s| s.bytes.len() as u64).sum();
    fits("the guest's state", all, MAX_STATE, "bytes")?;
    for section in sections {
        fits("a state section", section.bytes.len() as u64, MAX_SECTION.into(), "bytes")?;
    }
    let heads: Vec<_> = sections.iter().map(section_head).collect();
    let last = last.map(|message| (message.tag(), message.to_bytes()));
    let sections = heads.iter().zip(sections);
    let sections = sections.map(|(head, s)| (Tag::State, [&head[..], &s.bytes[..]]));
    let last = last.as_ref().map(|(tag, bytes)| (*tag, [&bytes[..], &[]]));
    Ok(wire.send_records(&sections.chain(last).collect::<Vec<_>>())?)
}
