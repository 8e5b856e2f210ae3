//! Takes one epoch: what is copied while the guest runs, the snapshot, and the hand-over to the
//! commit thread.

use std::time::Instant;

use driftline_dirty_tracker::DirtySet;
use driftline_guest::DriveHead;
use driftline_store::{Bounds, EpochWriter, Store};

use crate::chain::EpochChain;
use crate::commit_thread::{CommitThread, PendingCommit};
use crate::copy_planner::CopyPlanner;
use crate::disk_copy::DiskCopy;
use crate::epoch_copy::{EpochCopier, EpochCopy};
use crate::guest::Checkpointable;
use crate::live_copy::LiveCopy;
use crate::pause::Epoch;
use crate::report::{EpochStep, FailedStep, step};
use crate::staging::Staging;

/// All that an epoch needs: its number, and a store whose files are open.
pub(crate) struct Ready<'c> {
    pub(crate) epoch: u64,
    pub(crate) guest: &'c dyn Checkpointable,
    /// Drives that are part of the epochs.
    pub(crate) drives: &'c [DriveHead],
    pub(crate) store: &'c Store,
    pub(crate) commit_thread: &'c CommitThread,
    pub(crate) bounds: Bounds,
    pub(crate) staging: &'c mut Staging,
    pub(crate) planner: &'c mut CopyPlanner,
    /// The chain that the epoch continues; an epoch that finds none begins one, and is full.
    pub(crate) chain: &'c mut Option<EpochChain>,
}

/// An epoch that was handed over.
pub(crate) struct CommittingEpoch {
    pub(crate) full: bool,
    pub(crate) commit: PendingCommit,
    /// Changed frames and blocks: committed when the epoch is durable, given back if it never is.
    pub(crate) changed: Vec<DirtySet>,
    pub(crate) taken: EpochCopy,
}

impl Ready<'_> {
    /// Takes the epoch up to the hand-over to the commit thread.
    pub(crate) fn attempt(self) -> Result<CommittingEpoch, FailedStep> {
        let Self { epoch, guest, drives, store, commit_thread, bounds, staging, .. } = self;
        let CopyPlanner { policy, protection, write_waits, times, ahead: ahead_cost, .. } =
            &mut *self.planner;
        let policy = &*policy;
        let full = self.chain.is_none();
        let parent = self.chain.as_ref().and_then(|c| c.last);
        let pages = commit_thread.pages().clone();
        let mut file = step(EpochStep::Begin, || {
            store.check_lock()?;
            EpochWriter::new(pages, epoch, guest, parent, drives.to_vec())
        })?;
        let chain = match self.chain {
            Some(chain) => chain,
            none => none.insert(EpochChain::begin(guest, drives)?),
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
        let mut taken = EpochCopier { epoch: epoch_of, protection, times, staging }.run()?;
        changed.append(&mut taken.changed);
        let commit = commit_thread.commit(file.finish(), bounds);
        (chain.last, chain.since) = (Some(epoch), taken.resumed);
        self.planner.copied(&taken);
        staging.check_room(taken.staged);
        staging.grow_to(taken.staged);
        Ok(CommittingEpoch { full, commit, changed, taken })
    }
}
