//! The paused guest at its source, before and after it is sealed.
//!
//! Dropping a [`PausedGuest`], on any path, resumes the guest here. Sealing it needs a durable
//! record and makes it a [`CommittedGuest`], which only a permit of the state machine lets run.

use std::time::{Instant, SystemTime};

use driftline_dirty_tracker::{DirtySet, Subscription};
use driftline_guest::{
    DirtyLog, GuestError, GuestIdentity, HandOver, Lifecycle, Paused, SavedState,
};

use super::job::SendFailed;
use super::record::CommittedRecord;
use crate::error::{Cause, GuestPlace};
use crate::protocol::two_phase::{MayEnd, MayRunHere};

/// A paused guest that certainly belongs to this host.
#[must_use = "dropping this gives the guest back"]
pub(super) struct PausedGuest<'g, G: GuestIdentity + Lifecycle + HandOver + ?Sized> {
    guest: &'g G,
    /// Set until the guest is resumed or sealed.
    paused: Option<Paused<'g, G>>,
    was_running: bool,
    released: bool,
    since: Instant,
    clock: SystemTime,
}

impl<'g, G: GuestIdentity + Lifecycle + HandOver + ?Sized> PausedGuest<'g, G> {
    /// Pauses the guest and saves its state.
    pub(super) fn saving(guest: &'g G) -> Result<(Self, SavedState), GuestError> {
        let (since, clock) = (Instant::now(), SystemTime::now());
        let (paused, saved) = Paused::saving(guest)?;
        let (was_running, paused) = (paused.was_running(), Some(paused));
        Ok((Self { guest, paused, was_running, released: false, since, clock }, saved))
    }

    /// When the pause was requested.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// When the pause was requested, by the host's clock.
    pub(super) fn since_by_clock(&self) -> SystemTime {
        self.clock
    }

    pub(super) fn was_running(&self) -> bool {
        self.was_running
    }

    /// Drains what changed since the last drain; complete, because the guest is paused.
    pub(super) fn drain(&self, writes: &mut Subscription) -> Result<DirtySet, GuestError>
    where
        G: DirtyLog,
    {
        self.guest.collect()?;
        Ok(writes.drain())
    }

    /// Releases what only one host may hold: disks.
    pub(super) fn release(&mut self) -> Result<(), GuestError> {
        // Set before the attempt: of two disks one may be released when the other fails.
        self.released = true;
        self.guest.release()
    }

    /// Detaches the guest from its networks. Returns the packets that came since its state was
    /// saved.
    pub(super) fn detach(&self) -> Result<Vec<u8>, GuestError> {
        self.guest.detach()
    }

    /// Acquires everything again, and resumes the guest if it ran before.
    fn take_back(&mut self) -> Result<(), GuestError> {
        let Some(paused) = self.paused.take() else { return Ok(()) };
        if self.released
            && let Err(e) = self.guest.acquire()
        {
            // Without its disks it must not run.
            paused.keep_paused();
            return Err(e);
        }
        paused.resume()
    }

    /// Resumes the guest after a failure, and returns that with where the guest is.
    pub(super) fn give_up(mut self, cause: impl Into<Cause>) -> SendFailed {
        SendFailed { cause: cause.into(), place: place(self.take_back()) }
    }

    /// Seals the guest: PREPARED has come, and the guest may be the destination's, as its record
    /// says.
    pub(super) fn commit(mut self, _proof: &CommittedRecord) -> CommittedGuest<'g, G> {
        if let Some(paused) = self.paused.take() {
            paused.keep_paused();
        }
        CommittedGuest { guest: self.guest, was_running: self.was_running }
    }
}

impl<G: GuestIdentity + Lifecycle + HandOver + ?Sized> Drop for PausedGuest<'_, G> {
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

/// A paused guest that may run at another host. Dropping it leaves it paused.
#[must_use = "the guest stays paused until the machine says whose it is"]
pub(super) struct CommittedGuest<'g, G: GuestIdentity + Lifecycle + HandOver + ?Sized> {
    guest: &'g G,
    was_running: bool,
}

impl<G: GuestIdentity + Lifecycle + HandOver + ?Sized> CommittedGuest<'_, G> {
    /// Resumes the guest here.
    pub(super) fn take_back(self, _permit: MayRunHere, cause: Cause) -> SendFailed {
        let resumed = self.guest.acquire().and_then(|()| match self.was_running {
            true => self.guest.resume(),
            false => Ok(()),
        });
        SendFailed { cause, place: place(resumed) }
    }

    /// Ends the guest here.
    pub(super) fn end(self, _permit: MayEnd, why: &str) {
        self.guest.stop(why);
    }
}
