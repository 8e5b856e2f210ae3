//! `--verify`: which frames the source's digest is of.
//!
//! Of all that the host has memory for, but for what the guest called free when pass 0 began and
//! has not written since: that was not sent, and its content is of no use to anybody. So a frame
//! that tracking missed is in the digest, and the destination does not have it.

use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, Gfn, Subscription, Tracker};
use driftline_guest::Guest;

use crate::error::Cause;
use crate::protocol::digest;

/// Follows what was sent, so that the digest can be told which frames count.
pub(super) struct Verifier {
    /// What the host had memory for when pass 0 began.
    had: Marked,
    /// What passes have brought.
    sent: Marked,
}

struct Marked {
    tracker: Arc<Tracker>,
    marks: Subscription,
}

impl Marked {
    fn new<G: Guest + ?Sized>(guest: &G) -> Result<Self, Cause> {
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
    /// Before pass 0, which will bring `populated`.
    pub(super) fn new<G: Guest + ?Sized>(guest: &G, populated: &[FrameRun]) -> Result<Self, Cause> {
        let (had, sent) = (Marked::new(guest)?, Marked::new(guest)?);
        had.add(guest.resident()?)?;
        sent.add(populated.iter().copied())?;
        Ok(Self { had, sent })
    }

    /// A pass brings these.
    pub(super) fn sends(&self, runs: impl IntoIterator<Item = FrameRun>) -> Result<(), Cause> {
        self.sent.add(runs)
    }

    /// The digest of the guest's memory; it stands still.
    pub(super) fn digest<G: Guest + ?Sized>(&self, guest: &G) -> Result<u128, Cause> {
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
