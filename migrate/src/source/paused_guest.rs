//! The guest while it is paused at its source: before the hand-over record, and after it.
//!
//! [`PausedGuest`] gives the guest back by itself, whatever path is left by an error or a panic.
//! Sealing it needs a durable record and makes it [`SealedGuest`], which never lets the guest run
//! without a permit of the state machine.

use std::time::{Instant, SystemTime};

use driftline_dirty_tracker::{Epoch, Subscription};
use driftline_guest::{Guest, GuestError, Paused, SavedState};

use super::job::Failed;
use super::record::SealedRecord;
use crate::error::{Cause, GuestPlace};
use crate::protocol::two_phase::{MayEnd, MayRunHere};

/// A paused guest that is certainly this host's.
#[must_use = "dropping this gives the guest back"]
pub(super) struct PausedGuest<'g, G: Guest + ?Sized> {
    guest: &'g G,
    /// Until the guest is given back or sealed.
    paused: Option<Paused<'g, G>>,
    was_running: bool,
    released: bool,
    since: Instant,
    clock: SystemTime,
}

impl<'g, G: Guest + ?Sized> PausedGuest<'g, G> {
    /// Pauses the guest and saves its state.
    pub(super) fn saving(guest: &'g G) -> Result<(Self, SavedState), GuestError> {
        let (since, clock) = (Instant::now(), SystemTime::now());
        let (paused, saved) = Paused::saving(guest)?;
        let (was_running, paused) = (paused.was_running(), Some(paused));
        Ok((Self { guest, paused, was_running, released: false, since, clock }, saved))
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
        self.was_running
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

    /// PREPARED came: from here on the guest may be the destination's, as its record says.
    pub(super) fn seal(mut self, _proof: &SealedRecord) -> SealedGuest<'g, G> {
        if let Some(paused) = self.paused.take() {
            paused.keep_paused();
        }
        SealedGuest { guest: self.guest, was_running: self.was_running }
    }
}

impl<G: Guest + ?Sized> Drop for PausedGuest<'_, G> {
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
pub(super) struct SealedGuest<'g, G: Guest + ?Sized> {
    guest: &'g G,
    was_running: bool,
}

impl<G: Guest + ?Sized> SealedGuest<'_, G> {
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
