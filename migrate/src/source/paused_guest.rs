//! The guest while it is held at its source: before the hand-over record, and after it.
//!
//! [`Held`] gives the guest back by itself, whatever path is left by an error or a panic. Sealing it
//! needs a durable record and makes it [`Sealed`], which never lets the guest run without a permit
//! of the state machine.

use std::time::{Instant, SystemTime};

use driftline_dirty_tracker::{Epoch, Subscription};
use driftline_guest::{Guest, GuestError, Paused, SavedState};
use uuid::Uuid;

use super::{Failed, no_record};
use crate::error::{Cause, GuestPlace};
use crate::journal::{Records, SourceMark, SourceRecord, StagedSource};
use crate::protocol::ids::Token;
use crate::protocol::two_phase::{MayEnd, MayRunHere, Source, SourceEvent, SourceOrder};

/// A paused guest that is certainly this host's.
#[must_use = "dropping this gives the guest back"]
pub(super) struct Held<'g, G: Guest + ?Sized> {
    guest: &'g G,
    paused: Option<Paused<'g, G>>,
    released: bool,
    since: Instant,
    clock: SystemTime,
}

/// Proof that the record is durable. Dropping it removes the record: the guest is this host's. Drop it after what holds
/// the guest, which does not wait for the disk.
#[must_use = "dropping this removes the record"]
#[derive(Debug)]
pub(super) struct Recorded {
    records: Records,
    token: Token,
    /// None once the guest is sealed with it.
    mark: Option<SourceMark>,
    state: Source,
}

impl Recorded {
    /// Makes the hand-over record durable. It goes with what this returns, unless the guest is sealed with that.
    pub(super) fn place(
        records: &Records,
        staged: &mut Option<StagedSource>,
    ) -> Result<Self, Cause> {
        let staged = staged.take().ok_or_else(no_record)?;
        let (state, order) = Source::Streaming.on(SourceEvent::Converged);
        debug_assert_eq!(order, SourceOrder::Record);
        let token = staged.token();
        let mark = records.place_source(staged).inspect_err(|_| {
            // One that failed half-way may stand.
            remove(records, token);
        })?;
        let (state, _wait) = state.on(SourceEvent::Recorded);
        Ok(Self { records: records.clone(), token, mark: Some(mark), state })
    }

    /// The guest is not paused yet after all: the record goes, and is staged anew. Nobody shall meet one for as long as passes take.
    pub(super) fn withdraw(mut self) -> Result<StagedSource, Cause> {
        let mark = self.mark.as_ref().ok_or_else(no_record)?;
        let SourceRecord { vm_id, peer, site, .. } = mark.record().clone();
        self.records.settle(self.token)?;
        self.mark = None;
        Ok(self.records.stage_source(self.token, vm_id, &peer, site)?)
    }

    /// The destination's directory of records, as READY told it.
    pub(super) fn site(&self) -> Option<Uuid> {
        self.mark.as_ref().map(|mark| mark.record().site)
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if self.mark.is_some() {
            remove(&self.records, self.token);
        }
    }
}

/// COMMIT was not said: the record says nothing.
fn remove(records: &Records, token: Token) {
    if let Err(e) = records.settle(token) {
        tracing::warn!(
            %token, "the guest is here, and a record that says otherwise may stay: {e}"
        );
    }
}

impl<'g, G: Guest + ?Sized> Held<'g, G> {
    /// Pauses the guest and saves its state.
    pub(super) fn saving(guest: &'g G) -> Result<(Self, SavedState), GuestError> {
        let (since, clock) = (Instant::now(), SystemTime::now());
        let (paused, saved) = Paused::saving(guest)?;
        Ok((Self { guest, paused: Some(paused), released: false, since, clock }, saved))
    }

    /// When the pause was asked for.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// The same, by the host's clock.
    pub(super) fn since_by_clock(&self) -> SystemTime {
        self.clock
    }

    pub(super) fn was_running(&self) -> bool {
        self.paused.as_ref().is_some_and(Paused::was_running)
    }

    /// Everything that changed since the last drain; complete, because the guest stands still.
    pub(super) fn drain(&self, writes: &mut Subscription) -> Result<Epoch, GuestError> {
        self.guest.collect()?;
        Ok(writes.drain())
    }

    /// Lets go of what only one host may hold.
    pub(super) fn release(&mut self) -> Result<(), GuestError> {
        // Before it is tried: of a guest with two drives one may be gone when the other fails.
        self.released = true;
        self.guest.release()
    }

    /// Lets go of what peers reach the guest by; what has come for it since its state was saved.
    pub(super) fn detach(&self) -> Result<Vec<u8>, GuestError> {
        self.guest.detach()
    }

    /// Takes everything back and lets the guest run, if it ran before.
    fn take_back(&mut self) -> Result<(), GuestError> {
        let Some(paused) = self.paused.take() else { return Ok(()) };
        if self.released
            && let Err(e) = self.guest.acquire()
        {
            // Without its drives it must not run.
            paused.keep_paused();
            return Err(e);
        }
        paused.resume()
    }

    /// The migration failed: gives the guest back and says where it is.
    pub(super) fn give_up(mut self, cause: impl Into<Cause>) -> Failed {
        Failed { cause: cause.into(), place: place(self.take_back()) }
    }

    /// PREPARED came: from here on the guest may be the destination's.
    pub(super) fn seal(
        mut self,
        mut recorded: Recorded,
    ) -> Result<(Sealed<'g, G>, Source, SourceOrder), Failed> {
        let was_running = self.was_running();
        let Some(mark) = recorded.mark.take() else { return Err(self.give_up(no_record())) };
        if let Some(paused) = self.paused.take() {
            paused.keep_paused();
        }
        let (state, order) = recorded.state.on(SourceEvent::Prepared);
        Ok((Sealed { guest: self.guest, was_running, mark }, state, order))
    }
}

impl<G: Guest + ?Sized> Drop for Held<'_, G> {
    fn drop(&mut self) {
        if let Err(e) = self.take_back() {
            tracing::error!(vm = %self.guest.vm_id(), "the guest stays paused: {e}");
        }
    }
}

fn place(taken_back: Result<(), GuestError>) -> GuestPlace {
    match taken_back {
        Ok(()) => GuestPlace::Here,
        Err(e) => GuestPlace::PausedHere { why: e.to_string() },
    }
}

/// A paused guest that another host may run. Dropping it leaves it paused.
#[must_use = "the guest stays paused until the machine says whose it is"]
pub(super) struct Sealed<'g, G: Guest + ?Sized> {
    guest: &'g G,
    was_running: bool,
    mark: SourceMark,
}

impl<G: Guest + ?Sized> Sealed<'_, G> {
    pub(super) fn record(&self) -> &SourceRecord {
        self.mark.record()
    }

    /// The guest is this host's again.
    pub(super) fn take_back(self, _permit: MayRunHere, cause: Cause) -> Failed {
        let resumed = self.guest.acquire().and_then(|()| match self.was_running {
            true => self.guest.resume(),
            false => Ok(()),
        });
        Failed { cause, place: place(resumed) }
    }

    /// The guest is not this host's any more.
    pub(super) fn end(self, _permit: MayEnd, why: &str) {
        self.guest.stop(why);
    }
}
