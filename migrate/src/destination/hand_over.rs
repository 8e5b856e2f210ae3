//! The destination's end of the hand-over: sends PREPARED, makes the decision, and runs or discards
//! the guest.
//!
//! `crate::protocol::two_phase::Destination` gives the orders; this module performs them. A guest
//! is discarded before the source is informed of it.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::{
    GuestContents, GuestError, GuestFactory, GuestIdentity, HandOver, Lifecycle, NextHost,
};

use super::copies::Copies;
use super::host::{ReceiveFailed, ReceiveHost};
use super::listener;
use super::precopy::RestoredGuest;
use super::setup::{Arrival, detach, discard_guest};
use crate::error::Cause;
use crate::protocol::error::WireError;
use crate::protocol::ids::Token;
use crate::protocol::message::{PreparedPayload, StateDigest, WireMessage};
use crate::protocol::tag::Tag;
use crate::protocol::two_phase::{DestinationEvent, DestinationOrder, MayRun};
use crate::report::{ReceiveReport, ms, unix_us};
use crate::transport::link::Link;
use crate::transport::wire::Wire;

/// Upper bound on waiting for ENDED after RUNNING.
const END_LIMIT: Duration = Duration::from_secs(10);

impl<F: GuestFactory + ?Sized + 'static> ReceiveHost<'_, F> {
    /// Sends PREPARED, waits for COMMIT, makes the decision, and takes the guest over.
    pub(super) fn hand_over(
        &self,
        arrival: Arrival<F::Guest>,
        restored: RestoredGuest,
    ) -> Result<(Arc<F::Guest>, ReceiveReport), ReceiveFailed> {
        let Arrival { mut wire, guest, mut copies, shares_memory, token, since, .. } = arrival;
        let asks = !shares_memory;
        let was_running = restored.was_running;
        let (_say_prepared, _) = self.session.post(DestinationEvent::Restored);
        if let Err(cause) = self.await_commit(&mut wire, &*guest, token, &restored) {
            return Err(self.discard(&mut wire, &*guest, copies, token, asks, cause));
        }
        let (committed, committed_at) = (Instant::now(), SystemTime::now());
        let permit = match self.session.post(DestinationEvent::Commit) {
            (DestinationOrder::TakeOver(permit), _) => permit,
            (_, fault) => {
                // Not stored, or another process of this site has decided to discard the guest.
                self.control.stop.undo_commit();
                discard_guest(
                    &*guest,
                    "it was not received: the decision to run it could not be made",
                );
                drop(copies);
                let cause = fault.map_or(Cause::Discarded { unanswered: None }, Cause::Records);
                return Err(self.inform_source(&mut wire, token, asks, cause));
            }
        };
        let taken_over_at = match take_over(&*guest, &mut copies, permit, was_running) {
            Ok(at) => at,
            Err(e) => return Err(self.take_over_failed(&mut wire, guest, copies, token, asks, e)),
        };
        // The clock may have been set meanwhile, so this thread's measurement is the upper bound.
        let took = taken_over_at.duration_since(committed_at).unwrap_or_default();
        let took = took.min(committed.elapsed());
        copies.keep();
        let (_say_running, _) = self.session.post(DestinationEvent::Resumed);
        // A source that does not receive RUNNING asks, and the listener answers; or it reads the
        // claim.
        if let Err(e) = wire.send(&WireMessage::Running { token, took_us: took.as_micros() as u64 })
        {
            tracing::warn!(%token, "sending RUNNING failed, so the source will find out: {e}");
        }
        drop((restored.written, copies));
        let figures = restored.figures;
        let report = ReceiveReport {
            vm_id: guest.vm_id(),
            running: was_running,
            total_time_ms: ms(since.elapsed()),
            take_over_ms: ms(took),
            taken_over_at_unix_us: unix_us(taken_over_at),
            received_bytes: wire.received_bytes() + figures.joined_bytes,
            zero_frames: figures.totals.zero,
            normal_frames: figures.totals.normal,
            disk_bytes: figures.drive_totals.normal.saturating_mul(PAGE_SIZE),
            passes: figures.passes,
        };
        listener::await_end(wire, self.session.clone(), token, END_LIMIT);
        Ok((guest, report))
    }

    /// Sends PREPARED and waits for COMMIT, after which the migration cannot be cancelled.
    fn await_commit(
        &self,
        wire: &mut Wire<Link>,
        guest: &F::Guest,
        token: Token,
        restored: &RestoredGuest,
    ) -> Result<(), Cause> {
        let deadline = self.options.commit_deadline;
        wire.send(&WireMessage::Prepared(PreparedPayload {
            token,
            site: self.session.site(),
            digest: StateDigest::of(&restored.sections),
            counts: restored.figures.totals,
        }))?;
        wire.stream_mut().set_deadline(Some(Instant::now() + deadline));
        wire.stream_mut().set_progress_timeout(deadline);
        let mut attached = false;
        let found = loop {
            match wire.recv() {
                Ok(WireMessage::Late(late)) if !attached => {
                    attached = true;
                    guest.attach(late);
                }
                Ok(WireMessage::Commit { token }) => break token,
                Ok(other) => return Err(other.unexpected("COMMIT").into()),
                Err(e) if e.is_silence() => return Err(Cause::NoCommit { after: deadline }),
                Err(e) => return Err(e.into()),
            }
        };
        if found != token {
            let (message, expected) = (Tag::Commit, token);
            return Err(WireError::Token { message, found, expected }.into());
        }
        wire.stream_mut().set_deadline(None);
        wire.stream_mut().set_progress_timeout(self.options.progress_timeout);
        if self.control.stop.commit() { Ok(()) } else { Err(Cause::Cancelled) }
    }

    /// Discards a guest whose take-over failed. It never ran, holds nothing, and never will run.
    fn take_over_failed(
        &self,
        wire: &mut Wire<Link>,
        guest: Arc<F::Guest>,
        copies: Copies,
        token: Token,
        asks: bool,
        cause: Cause,
    ) -> ReceiveFailed {
        self.control.stop.undo_commit();
        guest.stop(&format!("it was not received: {cause}"));
        drop(copies);
        self.post_discard(DestinationEvent::NotResumed, token);
        // Closes its files, and with them locks that could not be released.
        drop(guest);
        self.inform_source(wire, token, asks, cause)
    }

    /// Discards a guest after PREPARED was sent, perhaps in part, and COMMIT did not arrive.
    fn discard(
        &self,
        wire: &mut Wire<Link>,
        guest: &F::Guest,
        copies: Copies,
        token: Token,
        asks: bool,
        cause: Cause,
    ) -> ReceiveFailed {
        discard_guest(guest, &format!("it was not received: {cause}"));
        drop(copies);
        tracing::info!(vm = %guest.vm_id(), %token, "the guest was discarded: {cause}");
        if matches!(cause, Cause::Wire(WireError::Aborted { .. })) {
            self.session.post(DestinationEvent::Aborted);
            return ReceiveFailed { cause, was_prepared: true };
        }
        self.post_discard(DestinationEvent::Failed, token);
        self.inform_source(wire, token, asks, cause)
    }

    /// Passes an event after which the guest is discarded. If that cannot be made durable, each
    /// question of the source tries again.
    fn post_discard(&self, event: DestinationEvent, token: Token) {
        if let (_, Some(fault)) = self.session.post(event) {
            tracing::error!(%token, "the guest is discarded, but not durably: {fault}");
        }
    }

    /// Sends the source the verdict over this connection. If the source does not acknowledge it and
    /// `asks`, waits for its question. A source that shares its memory reads the claim instead.
    fn inform_source(
        &self,
        wire: &mut Wire<Link>,
        token: Token,
        asks: bool,
        cause: Cause,
    ) -> ReceiveFailed {
        let verdict = self.session.verdict(token);
        wire.stream_mut().begin_closing();
        let acknowledged = wire.send(&WireMessage::Answer { token, verdict }).is_ok()
            && matches!(wire.recv(), Ok(WireMessage::Ended { token: ended }) if ended == token);
        if acknowledged {
            self.session.forget(token);
        } else if asks {
            wire.stream().close();
            let limit = self.options.answer_timeout;
            tracing::warn!(%token, "waiting up to {limit:?} until the source asks");
            if !self.session.await_source_informed(self.options.answer_timeout, &self.control.stop)
            {
                tracing::warn!(
                    %token,
                    "the source does not know that the guest does not run here: if it is in doubt, \
                     run `driftline resolve --run` there"
                );
            }
        }
        ReceiveFailed { cause, was_prepared: true }
    }
}

/// Acquires what only one host may hold, and resumes the guest if it ran at its source. Returns
/// when the last vCPU has resumed. On failure the guest holds nothing and is detached from its
/// networks, because its source may resume it.
fn take_over<G: GuestIdentity + GuestContents + Lifecycle + HandOver + ?Sized>(
    guest: &G,
    copies: &mut Copies,
    _permit: MayRun,
    was_running: bool,
) -> Result<SystemTime, Cause> {
    if let Err(cause) = copies.yield_to_guest() {
        detach(guest);
        return Err(cause);
    }
    let begun = Instant::now();
    // Releases everything again if it fails.
    guest.acquire()?;
    let acquired = begun.elapsed();
    let right = guest.memory_right();
    let resume = || if was_running { guest.resume() } else { Ok(()) };
    // The source may keep memory that both have until this takes it.
    let run = || {
        right.start();
        resume()
    };
    if let Err(e) = right.take().map_err(GuestError::from).and_then(|()| run()) {
        if let Err(e) = guest.release(NextHost::Another) {
            tracing::warn!(vm = %guest.vm_id(), "releasing the guest's disks failed: {e}");
        }
        detach(guest);
        // Last, because the source may then run the guest.
        right.give_back();
        return Err(e.into());
    }
    // The vCPUs' own time, because this thread may wait for a processor that they use.
    let resumed = guest.vcpu_pauses().iter().filter_map(|vcpu| vcpu.resumed).max();
    let taken_over_at = resumed.unwrap_or_else(SystemTime::now);
    right.mark_running(taken_over_at);
    tracing::debug!(
        "the take-over, in us: acquired {} all {}",
        acquired.as_micros(),
        begun.elapsed().as_micros()
    );
    Ok(taken_over_at)
}
