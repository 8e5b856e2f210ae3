//! `--verify`: selects the frames of the source's digest.
//!
//! The digest covers all resident memory, except frames that the guest had reported as free when
//! pass 0 began and has not written since. So if tracking missed a write, the digest of the source
//! includes it and that of the destination does not.

use driftline_dirty_tracker::{FrameRun, Tree};
use driftline_guest::{GuestContents, GuestIdentity};

use crate::error::Cause;
use crate::protocol::digest;

/// The sets of frames from which those of the digest follow.
pub(super) struct Verifier {
    /// Frames that were resident when pass 0 began.
    resident_at_start: Tree,
    /// Frames that passes have sent.
    sent: Tree,
}

fn tree<G: GuestIdentity + ?Sized>(guest: &G) -> Result<Tree, Cause> {
    Tree::new(guest.layout().clone())
        .map_err(|cause| Cause::NoMemory { what: "preparing --verify", cause })
}

fn add(tree: &mut Tree, runs: impl IntoIterator<Item = FrameRun>) -> Result<(), Cause> {
    let mut tree = tree.exclusive();
    let recorded = runs.into_iter().try_for_each(|run| tree.mark(run));
    recorded.map_err(|cause| Cause::OutOfSlot { what: "recording sent frames", cause })
}

impl Verifier {
    /// Records the memory before pass 0, which sends `populated`.
    pub(super) fn new<G: GuestIdentity + GuestContents + ?Sized>(
        guest: &G,
        populated: &[FrameRun],
    ) -> Result<Self, Cause> {
        let (mut resident_at_start, mut sent) = (tree(guest)?, tree(guest)?);
        add(&mut resident_at_start, guest.resident()?)?;
        add(&mut sent, populated.iter().copied())?;
        Ok(Self { resident_at_start, sent })
    }

    /// Records the frames that a pass sends.
    pub(super) fn sends(&mut self, runs: impl IntoIterator<Item = FrameRun>) -> Result<(), Cause> {
        add(&mut self.sent, runs)
    }

    /// Returns the digest of the memory of the guest, which must be paused.
    pub(super) fn digest<G: GuestContents + ?Sized>(&self, guest: &G) -> Result<u128, Cause> {
        let (mut had, mut sent) = (self.resident_at_start.cursor(), self.sent.cursor());
        let mut runs: Vec<FrameRun> = Vec::new();
        for gfn in guest.resident()?.into_iter().flat_map(|run| run.frames()) {
            if had.contains(gfn) && !sent.contains(gfn) {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end() == gfn => run.count += 1,
                _ => runs.push(FrameRun { start: gfn, count: 1 }),
            }
        }
        digest::of(guest.ram(), &runs)
            .map_err(|cause| Cause::System { what: "reading guest memory", cause })
    }
}
