//! The record, and the source's pause up to PREPARED: the last pass and the state.

use std::fmt::Write as _;
use std::time::Instant;

use driftline_dirty_tracker::Subscription;
use driftline_guest::{Guest, MAX_LATE, Section};
use uuid::Uuid;

use super::channels::Passes;
use super::limit::Limit;
use super::paused_guest::{Held, Recorded};
use super::{Copied, Failed, Job, Peer, Ready, Tale, fits, no_record, report_of};
use crate::error::Cause;
use crate::protocol::digest::MemoryDigests;
use crate::protocol::digest::allowance;
use crate::protocol::error::WireError;
use crate::protocol::features::{EARLY_STATE, WHOLE_STATE};
use crate::protocol::limits::{MAX_SECTION, MAX_SECTIONS, MAX_STATE};
use crate::protocol::message::{Message, StateDigest, section_head};
use crate::protocol::tag::Tag;
use crate::transport::link::Link;
use crate::transport::wire::Wire;

impl<'a, G: Guest + ?Sized> Job<'a, G> {
    /// Pauses the guest, sends the rest of it, and has the destination prepare.
    pub(super) fn switch_over(
        &self,
        peer: &mut Peer<'a>,
        mut copied: Copied<'a, G>,
    ) -> Result<Ready<'a, G>, Failed> {
        // Goes after what holds the guest.
        let mut recorded = copied.recorded.take();
        // State first: saving it may make the host write into guest memory.
        let (mut held, saved) = Held::saving(self.guest)?;
        let mut limit = self.options.pause_limit(&copied.tale.reason);
        if copied.verifier.is_some() {
            limit = limit.saturating_add(allowance(self.guest.layout().frames()));
        }
        let limit = Limit::of_pause(held.since(), limit);
        let Peer { wire, sender, records, staged, features, .. } = peer;
        let sender = sender.as_mut().ok_or_else(no_record)?;
        let rest = limit.hold(wire, |wire| {
            let sections = saved?;
            self.send_rest((wire, sender, *features), (&mut held, sections), copied, limit, || {
                recorded = Some(Recorded::place(records, staged)?);
                Ok(())
            })
        });
        let (named, tale, writes) = match rest {
            Ok(rest) => rest,
            Err(cause) => return Err(held.give_up(cause)),
        };
        let Some(recorded) = recorded else {
            return Err(held.give_up(no_record()));
        };
        if recorded.site() != Some(named) {
            let why = "PREPARED names another site than READY";
            return Err(held.give_up(WireError::Malformed { message: Tag::Prepared, why }));
        }
        Ok(Ready { held, recorded, tale, writes })
    }

    fn send_rest(
        &self,
        (wire, sender, features): (&mut Wire<Link>, &mut Passes<'a>, u64),
        (held, sections): (&mut Held<'a, G>, Vec<Section>),
        copied: Copied<'a, G>,
        limit: Limit,
        record: impl FnOnce() -> Result<(), Cause>,
    ) -> Result<(Uuid, Tale, Subscription), Cause> {
        let Copied { mut writes, verifier, mut drives, throttled, mut tale, left, .. } = copied;
        // Should the guest go on here after all, it does so at full speed.
        drop(throttled);
        let mut laps = Laps::begin(held.since());
        laps.end("saved");
        // The destination restores the state while the rest comes; where digests are compared only afterwards, because
        // restoring may write into memory, too.
        let early = verifier.is_none() && features & EARLY_STATE != 0 && !sections.is_empty();
        if early {
            wire.stream().set_cork(true);
            send_sections(wire, &sections)?;
            if features & WHOLE_STATE != 0 {
                let sections = sections.len() as u32;
                wire.send(&Message::StateWhole { sections, frames: left })?;
            }
            wire.stream().set_cork(false);
        }
        let epoch = held.drain(&mut writes)?;
        laps.end("drained");
        // The devices stand: nothing is under way any more.
        drives.drain();
        let pass = tale.passes.len() as u32;
        sender.hurry();
        if let Some(verifier) = &verifier {
            verifier.sends(epoch.runs())?;
        }
        // What is small goes together with the words around it. VERIFY is to be heard at once.
        wire.stream().set_cork(verifier.is_none());
        let sent = sender.begin(wire, pass, epoch.runs(), epoch.frames(), &mut drives, limit)?;
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
        if !early {
            send_sections(wire, &sections)?;
        }
        let (count, was_running) = (sections.len() as u32, held.was_running());
        wire.send(&Message::StateEnd { sections: count, was_running, counts: tale.totals })?;
        wire.stream().set_cork(false);
        laps.end("sent");
        held.release()?;
        laps.end("released");
        let state_digest = StateDigest::of(&sections);
        // Heard only now: the way there and back is not worth a pause of its own.
        let done = sent.await_end(wire)?;
        if let Some(ours) = digest {
            self.same_memory(wire, ours)?;
            record()?;
            laps.end("verified");
        }
        epoch.commit();
        drives.commit();
        tale.passes.push(report_of(&done, &drives, 0, done.time));
        let says = match wire.recv()? {
            Message::Prepared(says) => says,
            other => return Err(other.unexpected("PREPARED").into()),
        };
        laps.end("prepared");
        tracing::debug!("the pause, in us: {}", laps.text);
        self.own(Tag::Prepared, says.token)?;
        let same = |what, ours: u64, theirs: u64| match ours == theirs {
            true => Ok(()),
            false => Err(Cause::Differs { what, ours, theirs }),
        };
        same("the state's digest", state_digest.into(), says.digest.into())?;
        same("the count of frames with content", tale.totals.normal, says.counts.normal)?;
        same("the count of zero frames", tale.totals.zero, says.counts.zero)?;
        let late = held.detach()?;
        fits("what came late for the guest", late.len() as u64, MAX_LATE as u64)?;
        wire.send(&Message::Late(&late))?;
        Ok((says.site, tale, writes))
    }

    /// Hears the destination's digest of all memory, which must be ours.
    fn same_memory(&self, wire: &mut Wire<Link>, ours: u128) -> Result<(), Cause> {
        match wire.recv()? {
            Message::Digest(theirs) if theirs == ours => {}
            Message::Digest(theirs) => {
                let digests = MemoryDigests { ours, theirs };
                return Err(Cause::MemoryDiffers(Box::new(digests)));
            }
            other => return Err(other.unexpected("DIGEST").into()),
        }
        wire.stream_mut().set_patience(self.options.patience);
        Ok(())
    }
}

/// What the pause is spent on, for the log.
struct Laps {
    last: Instant,
    text: String,
}

impl Laps {
    fn begin(last: Instant) -> Self {
        Self { last, text: String::with_capacity(128) }
    }

    /// A step has ended.
    fn end(&mut self, step: &str) {
        let now = Instant::now();
        // Writing to a text cannot fail.
        let _ = write!(self.text, "{step} {} ", now.duration_since(self.last).as_micros());
        self.last = now;
    }
}

fn send_sections(wire: &mut Wire<Link>, sections: &[Section]) -> Result<(), Cause> {
    fits("the guest's state", sections.len() as u64, MAX_SECTIONS.into())?;
    let all = sections.iter().map(|s| s.bytes.len() as u64).sum();
    fits("the guest's state", all, MAX_STATE)?;
    for section in sections {
        fits("a state section", section.bytes.len() as u64, MAX_SECTION.into())?;
        wire.send_parts(Tag::State, &[&section_head(section), &section.bytes])?;
    }
    Ok(())
}
