//! `--verify`: which frames the source's digest covers.
//!
//! It covers all memory that the host has backed, except what the guest reported as free when pass
//! 0 began and has not written since. So a write that tracking missed is in the digest, and the
//! destination does not have it.

use driftline_dirty_tracker::{FrameRun, Tree};
use driftline_guest::{GuestContents, GuestIdentity};

use crate::error::Cause;
use crate::protocol::digest;

/// Records what was sent, to select the frames of the digest.
pub(super) struct Verifier {
    /// Memory that was resident when pass 0 began.
    had: Tree,
    /// Frames that passes have sent.
    sent: Tree,
}

fn tree<G: GuestIdentity + ?Sized>(guest: &G) -> Result<Tree, Cause> {
    Tree::new(guest.layout().clone())
        .map_err(|e| Cause::System { what: "preparing --verify", cause: std::io::Error::other(e) })
}

fn add(tree: &mut Tree, runs: impl IntoIterator<Item = FrameRun>) -> Result<(), Cause> {
    let mut tree = tree.exclusive();
    runs.into_iter()
        .try_for_each(|run| tree.mark(run))
        .map_err(|e| Cause::System { what: "noting what is sent", cause: std::io::Error::other(e) })
}

impl Verifier {
    /// Begins before pass 0, which sends `populated`.
    pub(super) fn new<G: GuestIdentity + GuestContents + ?Sized>(
        guest: &G,
        populated: &[FrameRun],
    ) -> Result<Self, Cause> {
        let (mut had, mut sent) = (tree(guest)?, tree(guest)?);
        add(&mut had, guest.resident()?)?;
        add(&mut sent, populated.iter().copied())?;
        Ok(Self { had, sent })
    }

    /// Notes what a pass sends.
    pub(super) fn sends(&mut self, runs: impl IntoIterator<Item = FrameRun>) -> Result<(), Cause> {
        add(&mut self.sent, runs)
    }

    /// Returns the digest of the memory of the guest, which must be paused.
    pub(super) fn digest<G: GuestContents + ?Sized>(&self, guest: &G) -> Result<u128, Cause> {
        let (mut had, mut sent) = (self.had.cursor(), self.sent.cursor());
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
