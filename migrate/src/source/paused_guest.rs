//! The paused guest at its source, before and after the point of no return.
//!
//! Dropping a [`PausedGuest`], on any path, resumes the guest here. Committing it needs a durable
//! record and returns a [`CommittedGuest`], which resumes only with a permit of the state machine.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use driftline_dirty_tracker::{DirtySet, Subscription};
use driftline_guest::{
    DirtyLog, GuestContents, GuestError, GuestIdentity, HandOver, Lifecycle, NextHost, Paused,
    SavedPause, SavedState,
};

use super::job::SendFailed;
use super::record::CommittedRecord;
use crate::error::{Cause, GuestPlace};
use crate::protocol::two_phase::{MayEnd, MayRunHere};

/// Time between two attempts to acquire what a destination on this host has not released yet.
const ACQUIRE_INTERVAL: Duration = Duration::from_millis(20);

/// A paused guest that certainly belongs to this host.
#[must_use = "dropping this gives the guest back"]
pub(super) struct PausedGuest<'g, G: GuestIdentity + GuestContents + Lifecycle + HandOver + ?Sized>
{
    guest: &'g G,
    /// Set until the guest is resumed or committed.
    paused: Option<Paused<'g, G>>,
    was_running: bool,
    released: bool,
    since: Instant,
    clock: SystemTime,
}

impl<'g, G: GuestIdentity + GuestContents + Lifecycle + HandOver + ?Sized> PausedGuest<'g, G> {
    /// Pauses the guest and saves its state.
    pub(super) fn saving(guest: &'g G) -> Result<(Self, SavedState), GuestError> {
        let (paused, SavedPause { since, saved, .. }) = Paused::timed(guest)?;
        let clock = SystemTime::now() - since.elapsed();
        let (was_running, paused) = (paused.was_running(), Some(paused));
        Ok((Self { guest, paused, was_running, released: false, since, clock }, saved))
    }

    /// Returns the time of the pause request.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Returns the time of the pause request by the host's clock.
    pub(super) fn since_by_clock(&self) -> SystemTime {
        self.clock
    }

    pub(super) fn was_running(&self) -> bool {
        self.was_running
    }

    /// Drains the frames dirtied since the last drain. The set is complete, because the guest is
    /// paused.
    pub(super) fn drain(&self, writes: &mut Subscription) -> Result<DirtySet, GuestError>
    where
        G: DirtyLog,
    {
        self.guest.collect()?;
        Ok(writes.drain())
    }

    /// Releases the disks, which only one host may hold, for `next`.
    pub(super) fn release(&mut self, next: NextHost) -> Result<(), GuestError> {
        // Set before the attempt, because one disk may be released before another fails.
        self.released = true;
        self.guest.release(next)
    }

    /// Releases the disks and detaches the guest from its networks. Returns the packets that
    /// arrived since its state was saved.
    pub(super) fn release_and_detach(&mut self, next: NextHost) -> Result<Vec<u8>, GuestError> {
        // Set before the attempt, as above.
        self.released = true;
        self.guest.release_and_detach(next)
    }

    /// Detaches the guest from its networks. Returns the packets that arrived since its state was
    /// saved.
    pub(super) fn detach(&self, next: NextHost) -> Result<Vec<u8>, GuestError> {
        self.guest.detach(next)
    }

    /// Acquires everything again, and resumes the guest if it ran before.
    fn take_back(&mut self) -> Result<(), GuestError> {
        let Some(paused) = self.paused.take() else { return Ok(()) };
        let acquired = match self.released {
            true => self.guest.acquire(),
            false => self.guest.memory_right().keep().map_err(GuestError::from),
        };
        if let Err(e) = acquired {
            // The guest must not run without its disks.
            paused.keep_paused();
            return Err(e);
        }
        paused.resume()
    }

    /// Resumes the guest after a failure. Returns the failure with the guest's place.
    pub(super) fn give_up(mut self, cause: impl Into<Cause>) -> SendFailed {
        SendFailed { cause: cause.into(), place: place(self.take_back()) }
    }

    /// Passes the point of no return. The caller proves that a durable record names the
    /// destination.
    pub(super) fn commit(mut self, _proof: &CommittedRecord) -> CommittedGuest<'g, G> {
        if let Some(paused) = self.paused.take() {
            paused.keep_paused();
        }
        CommittedGuest { guest: self.guest, was_running: self.was_running }
    }
}

impl<G: GuestIdentity + GuestContents + Lifecycle + HandOver + ?Sized> Drop for PausedGuest<'_, G> {
    fn drop(&mut self) {
        if let Err(e) = self.take_back() {
            tracing::error!(vm = %self.guest.vm_id(), "the guest stays paused: {e}");
        }
    }
}

fn place(taken_back: Result<(), GuestError>) -> GuestPlace {
    match taken_back {
        Ok(()) => GuestPlace::Here,
        Err(e) => GuestPlace::PausedHere { cause: e.into() },
    }
}

/// A paused guest that may run at another host. Dropping it leaves it paused.
#[must_use = "the guest stays paused until a permit resumes or ends it"]
pub(super) struct CommittedGuest<
    'g,
    G: GuestIdentity + GuestContents + Lifecycle + HandOver + ?Sized,
> {
    guest: &'g G,
    was_running: bool,
}

impl<G: GuestIdentity + GuestContents + Lifecycle + HandOver + ?Sized> CommittedGuest<'_, G> {
    /// Resumes the guest here. Waits up to `limit` for a destination on this host to release what
    /// it has acquired.
    pub(super) fn take_back(
        self,
        _permit: MayRunHere,
        cause: Cause,
        limit: Duration,
    ) -> SendFailed {
        let (began, mut acquired) = (Instant::now(), self.guest.acquire());
        while acquired.is_err() && began.elapsed() < limit {
            thread::sleep(ACQUIRE_INTERVAL);
            acquired = self.guest.acquire();
        }
        let resumed = acquired.and_then(|()| match self.was_running {
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
