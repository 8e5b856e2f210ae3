//! Takes one epoch: what is copied while the guest runs, the snapshot, and the hand-over to the
//! commit thread.

use std::time::Instant;

use driftline_guest::GuestError;
use driftline_store::{EpochWriter, StoreError};

use super::{Checkpointer, CommittingEpoch};
use crate::chain::EpochChain;
use crate::disk_copy::DiskCopy;
use crate::live_copy::LiveCopy;
use crate::pause::Epoch;
use crate::report::{EpochFailure, EpochStep, step};
use crate::snapshot::Snapshot;
use crate::staging::Staging;

impl Checkpointer {
    /// Takes an epoch up to the hand-over to the commit thread.
    pub(super) fn attempt(
        &mut self,
        epoch: u64,
        full: bool,
    ) -> Result<CommittingEpoch, (EpochStep, EpochFailure)> {
        let Self { guest, drives, store, commit_thread, bounds, staging, chain, .. } = self;
        let Self { policy, protection, write_waits, times, cost, ahead: ahead_cost, .. } = self;
        let policy = &*policy;
        let guest = &**guest;
        let parent = chain.as_ref().and_then(|c| c.last);
        let commit_thread = commit_thread.as_ref().ok_or_else(|| {
            // `make_ready` has opened it, or has returned why it cannot be opened.
            let dir = store.location().to_owned();
            (EpochStep::Begin, StoreError::LockLost { dir }.into())
        })?;
        let pages = commit_thread.pages().clone();
        let mut file = step(EpochStep::Begin, || {
            store.check_lock()?;
            EpochWriter::new(pages, epoch, guest, parent, drives.clone())
        })?;
        if full {
            *chain = Some(EpochChain::begin(guest, drives)?);
        }
        let Some(chain) = chain else {
            return Err((EpochStep::Subscribe, GuestError::NotTracked.into()));
        };
        let EpochChain { subscription, drives, .. } = &mut *chain;
        let mut changed = Vec::new();
        if full {
            changed = step(EpochStep::CopyLive, || {
                drives.copy_live(policy, staging, &mut file)?;
                LiveCopy { guest, policy, subscription, staging, file: &mut file }.copy_all()
            })?;
        }
        let begun = Instant::now();
        let ahead = || drives.copy_ahead(policy, staging, &mut file);
        let mut ahead = step(EpochStep::CopyDrives, ahead)?;
        ahead_cost.note(begun.elapsed(), ahead.due);
        if full && !ahead.passes.is_empty() {
            // Memory has changed while the drives were copied.
            let mut live = LiveCopy { guest, policy, subscription, staging, file: &mut file };
            changed.append(&mut step(EpochStep::CopyLive, || live.catch_up(u64::MAX))?);
        }
        changed.append(&mut ahead.passes);
        let (protection, writes_may_wait) =
            (protection.next(policy, guest), write_waits.next_may_wait());
        let disks = DiskCopy::new(drives, policy, writes_may_wait);
        let (pause_gate, file_of) = (store.pause_gate(), &mut file);
        let epoch_of = Epoch { guest, policy, pause_gate, subscription, disks, file: file_of };
        let mut taken = Snapshot { epoch: epoch_of, protection, times, staging }.take()?;
        changed.append(&mut taken.changed);
        commit_thread.commit(file.finish(), *bounds);
        (chain.last, chain.since) = (Some(epoch), taken.resumed);
        if taken.staged > 0 {
            cost.note(policy, taken.pause, taken.in_pause, taken.staged);
        }
        grow(staging, taken.staged);
        Ok(CommittingEpoch { full, changed, taken })
    }
}

/// Makes room for the next epoch after one that needed room for `frames` frames.
fn grow(staging: &mut Staging, frames: u64) {
    let room = staging.frames();
    if frames > room {
        tracing::warn!(frames, room, "pages were written to the store during the pause");
    }
    staging.grow_to(frames);
}
