//! `--verify`: which frames the source's digest covers.
//!
//! It covers all memory that the host has backed, except what the guest reported as free when pass
//! 0 began and has not written since. So a write that tracking missed is in the digest, and the
//! destination does not have it.

use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, Gfn, Subscription, Tracker};
use driftline_guest::{GuestContents, GuestIdentity};

use crate::error::Cause;
use crate::protocol::digest;

/// Records what was sent, to select the frames of the digest.
pub(super) struct Verifier {
    /// Memory that was resident when pass 0 began.
    had: Marked,
    /// Frames that passes have sent.
    sent: Marked,
}

struct Marked {
    tracker: Arc<Tracker>,
    marks: Subscription,
}

impl Marked {
    fn new<G: GuestIdentity + ?Sized>(guest: &G) -> Result<Self, Cause> {
        let tracker = Arc::new(Tracker::new(guest.layout().clone()));
        let marks = tracker.subscribe("verify").map_err(|e| Cause::System {
            what: "preparing --verify",
            cause: std::io::Error::other(e),
        })?;
        Ok(Self { tracker, marks })
    }

    fn add(&self, runs: impl IntoIterator<Item = FrameRun>) -> Result<(), Cause> {
        runs.into_iter().try_for_each(|run| self.tracker.mark(run)).map_err(|e| Cause::System {
            what: "noting what is sent",
            cause: std::io::Error::other(e),
        })
    }
}

impl Verifier {
    /// Begins before pass 0, which sends `populated`.
    pub(super) fn new<G: GuestIdentity + GuestContents + ?Sized>(
        guest: &G,
        populated: &[FrameRun],
    ) -> Result<Self, Cause> {
        let (had, sent) = (Marked::new(guest)?, Marked::new(guest)?);
        had.add(guest.resident()?)?;
        sent.add(populated.iter().copied())?;
        Ok(Self { had, sent })
    }

    /// Notes what a pass sends.
    pub(super) fn sends(&self, runs: impl IntoIterator<Item = FrameRun>) -> Result<(), Cause> {
        self.sent.add(runs)
    }

    /// Returns the digest of the memory of the guest, which must be paused.
    pub(super) fn digest<G: GuestContents + ?Sized>(&self, guest: &G) -> Result<u128, Cause> {
        let counts = |gfn: &Gfn| self.sent.marks.is_marked(*gfn) || !self.had.marks.is_marked(*gfn);
        let mut runs: Vec<FrameRun> = Vec::new();
        for gfn in guest.resident()?.into_iter().flat_map(|run| run.frames()).filter(counts) {
            match runs.last_mut() {
                Some(run) if run.end() == gfn => run.count += 1,
                _ => runs.push(FrameRun { start: gfn, count: 1 }),
            }
        }
        digest::of(guest.ram(), &runs)
            .map_err(|cause| Cause::System { what: "reading guest memory", cause })
    }
}
