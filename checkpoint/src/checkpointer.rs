//! Takes epochs of a running guest. The pause only copies frames and saves state; everything else
//! happens outside it.
//!
//! ```text
//! launch   takes an epoch, writes its frames to the page file, hands it to the commit thread
//! land     waits until the oldest epoch handed over is durable or has failed
//! ```
//!
//! Several epochs may be in flight. If one fails, so do all later ones that build on it. Their
//! frames return to the tracker (I4). Once the last epoch in flight has landed, the next epoch
//! builds on a durable one or is full.

mod early;
mod moved;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use driftline_dirty_tracker::DirtySet;
use driftline_guest::DriveHead;
use driftline_store::{Bounds, Committer, MAX_EPOCH, Store, StoreError};

use crate::attempt::{CommittingEpoch, Ready};
use crate::chain::EpochChain;
use crate::commit_thread::{CommitAnswer, CommitThread};
use crate::copy_planner::CopyPlanner;
use crate::epoch_drives::drives_of;
use crate::guest::Checkpointable;
use crate::report::{CheckpointError, EpochFailure, EpochReport, EpochStep, FailedStep};
use crate::staging::{Staging, StagingLimits};

/// Takes epochs of one guest into one store.
///
/// The first epoch is full; later ones build on the one before. The next epoch is full again in
/// three cases:
///
/// - The checkpointer is new and the store already has epochs: nothing tracked the guest's writes
///   in between.
/// - The store's files or its lock were removed or replaced. The epoch that notices this fails; the
///   next one takes the lock again, unless another writer has it.
/// - A sync failed: what reached the disk is unknown.
///
/// Drop waits, without a limit, until every epoch in flight is durable or has failed.
///
/// ```
/// use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
/// use driftline_checkpoint::{Checkpointer, restore};
/// use driftline_store::Store;
/// use driftline_guest::Clock;
/// let dir = tempfile::tempdir()?;
/// let guest = MemoryGuest::start(MemoryConfig::small())?;
/// let mut checkpointer = Checkpointer::new(guest, Store::create_or_open(dir.path())?)?;
/// let first = checkpointer.take()?;
/// let second = checkpointer.take()?;
/// assert!(second.epoch > first.epoch && second.durable);
///
/// let store = Store::open(dir.path())?;
/// let (copy, _) = restore(&store, None, &MemoryGuestFactory::default(), Clock::Continue)?;
/// copy.verify()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Checkpointer {
    guest: Arc<dyn Checkpointable>,
    /// Drives that are part of the epochs.
    drives: Vec<DriveHead>,
    store: Arc<Store>,
    /// `None` until the store has files, and after a failure that requires opening them again.
    commit_thread: Option<CommitThread>,
    /// Epochs that were launched and have not landed, in order.
    pending: VecDeque<PendingEpoch>,
    failure: FailureEffects,
    bounds: Bounds,
    staging: Staging,
    /// `None` until the first full epoch; its `last` is the parent of the next epoch.
    chain: Option<EpochChain>,
    next: u64,
    /// Whether the store's lock turned out to be a different one.
    lock_lost: bool,
    planner: CopyPlanner,
}

/// An epoch that was launched.
struct PendingEpoch {
    epoch: u64,
    state: PendingState,
}

enum PendingState {
    /// Handed over; the commit thread has not answered yet.
    Committing(Box<CommittingEpoch>),
    /// Failed before it was handed over.
    Failed(FailedStep),
}

/// Consequences of failures, applied when nothing is in flight.
#[derive(Default)]
struct FailureEffects {
    /// An epoch failed that others may have been built on.
    any: bool,
    /// The next epoch must be full.
    chain: bool,
    /// The store's files may have been replaced or belong to another writer.
    files: bool,
    /// This process no longer holds the store's lock.
    lock: bool,
}

impl fmt::Debug for Checkpointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (store, next) = (&self.store, self.next);
        f.debug_struct("Checkpointer").field("store", store).field("next", &next).finish()
    }
}

impl Checkpointer {
    /// Creates a checkpointer of `guest` that writes to `store`. Reserves the staging area. The
    /// guest notices nothing until the first [`take`](Self::take).
    ///
    /// # Errors
    ///
    /// `store` is read-only, holds another guest's epochs, or has no epoch number left.
    pub fn new(guest: Arc<dyn Checkpointable>, store: Store) -> Result<Self, StoreError> {
        Self::with_staging(guest, store, StagingLimits::default())
    }

    /// Like [`new`](Self::new), with other limits for the staging area.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_staging(
        guest: Arc<dyn Checkpointable>,
        store: Store,
        mut limits: StagingLimits,
    ) -> Result<Self, StoreError> {
        if !store.is_writable() {
            return Err(StoreError::ReadOnly { dir: store.location().to_owned() });
        }
        let store = Arc::new(store);
        let drives = drives_of(&*guest);
        let commit_thread =
            Committer::open(&store, &*guest)?.map(CommitThread::start).transpose()?;
        let next = next_number(&store, commit_thread.as_ref())?;
        let all = guest.layout().frames() * driftline_dirty_tracker::PAGE_SIZE;
        limits.most_bytes = limits.most_bytes.min(all);
        let staging = Staging::new(limits);
        Ok(Self {
            guest,
            drives,
            store,
            commit_thread,
            pending: VecDeque::new(),
            failure: FailureEffects::default(),
            bounds: Bounds::default(),
            staging,
            chain: None,
            next,
            lock_lost: false,
            planner: CopyPlanner::default(),
        })
    }

    /// For tests and benches: sets the number of changed frames from which an epoch is copied while
    /// the guest runs, if the guest can write-protect its frames meanwhile
    /// ([`GuestContents::write_protection`](driftline_guest::GuestContents::write_protection)).
    /// `u64::MAX` disables the background copy. The default is 1,280 frames, and 5,120 frames if
    /// the previous epoch suggests that a copy before the pause leaves little for the pause.
    #[cfg(feature = "testing")]
    pub fn background_copy_from(&mut self, frames: u64) {
        self.planner.background_from(frames);
    }

    /// Excludes the guest's drives from the epochs. The caller must then preserve the content of
    /// each drive as it is in the pause of an epoch. By default epochs include all drives that the
    /// guest can write to. Must be called before the first epoch.
    pub fn leave_drives(&mut self) {
        self.drives.clear();
    }

    /// Sets how many epochs are kept, at least 1. Each stored epoch drops the oldest ones beyond
    /// that number. While an epoch is being read, neither it nor any later one is dropped. `None`,
    /// the default, keeps all.
    pub fn keep(&mut self, epochs: Option<u64>) {
        self.bounds.keep = epochs;
    }

    /// For tests: sets the size in bytes from which the log is rewritten when it is three times as
    /// long as the rewritten log would be. The default is 16 MiB.
    #[cfg(feature = "testing")]
    pub fn log_bound(&mut self, bytes: u64) {
        self.bounds.log = bytes;
    }

    /// For tests: raises the number of the next epoch to `epoch` if it is lower.
    #[cfg(feature = "testing")]
    pub fn number_from(&mut self, epoch: u64) {
        self.next = self.next.max(epoch);
    }

    /// Returns the store that this checkpointer writes to.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Takes one epoch and returns when it is durable.
    ///
    /// The guest is paused while its state is saved. Changed frames are copied and written after
    /// the guest has resumed; a write to a frame that has not been copied waits for the copy. If
    /// few frames changed, or the guest offers no [write
    /// protection](driftline_guest::GuestContents::write_protection), they are copied before the
    /// pause or in it, and written afterwards. Frames that do not fit into the staging area are
    /// then written in the pause, at the speed of the disk's cache; the area grows, within its
    /// limit, before the next epoch. A full epoch first copies populated memory while the guest
    /// runs, and then, a few times, what changed meanwhile.
    ///
    /// Waits for the storage of the store without a limit: a sync that has begun cannot be given
    /// up.
    ///
    /// # Errors
    ///
    /// The epoch is not stored; what changed in it is in the next one (I4).
    pub fn take(&mut self) -> Result<EpochReport, CheckpointError> {
        // A series leaves no epoch in flight, unless its callback has panicked.
        while self.land(None).is_some() {}
        let PendingEpoch { epoch, state } = self.begin();
        match state {
            PendingState::Committing(committing) => {
                let answer = committing.commit.recv();
                self.landed(epoch, *committing, answer)
            }
            PendingState::Failed(failed) => {
                self.recover_from_failure(None);
                Err(self.failed(epoch, failed))
            }
        }
    }

    /// Returns the number of epochs that were launched and have not landed.
    pub(crate) fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Returns whether an epoch has failed and epochs that may have been built on it have not
    /// landed. An epoch launched in that state would fail, too.
    pub(crate) fn must_land(&self) -> bool {
        self.failure.any && self.is_committing()
    }

    fn is_committing(&self) -> bool {
        self.pending.iter().any(|epoch| matches!(epoch.state, PendingState::Committing(_)))
    }

    /// Takes one epoch and hands it to the commit thread. [`land`](Self::land) returns the outcome.
    pub(crate) fn launch(&mut self) {
        let launched = self.begin();
        self.pending.push_back(launched);
        self.recover_from_failure(None);
    }

    fn begin(&mut self) -> PendingEpoch {
        let span = tracing::info_span!("checkpoint", number = self.next);
        let _entered = span.enter();
        let (epoch, full, launched) = match self.make_ready() {
            Ok(ready) => (ready.epoch, ready.chain.is_none(), ready.attempt()),
            Err(failed) => (self.next, self.chain.is_none(), Err(failed)),
        };
        // This checkpointer never reuses the number, stored or not: a crash may bring a failed
        // epoch back.
        self.next = epoch.saturating_add(1).min(MAX_EPOCH + 1);
        let state = match launched {
            Ok(committing) => PendingState::Committing(Box::new(committing)),
            Err(failed) => {
                let FailedStep { step, cause } = &failed;
                tracing::warn!(full, %step, %cause, "not stored");
                self.planner.failed(*step, cause);
                // No epoch holds what was copied for a failed full one; the next epoch copies it
                // again.
                self.note_failure(cause, full);
                PendingState::Failed(failed)
            }
        };
        PendingEpoch { epoch, state }
    }

    /// Returns the outcome of the oldest epoch that has not landed, as soon as it is known. Returns
    /// `None` after `limit`, or if there is no such epoch.
    pub(crate) fn land(
        &mut self,
        limit: Option<Duration>,
    ) -> Option<Result<EpochReport, CheckpointError>> {
        let PendingEpoch { epoch, state } = self.pending.pop_front()?;
        let committing = match state {
            PendingState::Failed(failed) => return Some(Err(self.failed(epoch, failed))),
            PendingState::Committing(committing) => committing,
        };
        let answer = match limit {
            Some(limit) => committing.commit.recv_timeout(limit),
            None => Some(committing.commit.recv()),
        };
        let Some(answer) = answer else {
            let state = PendingState::Committing(committing);
            self.pending.push_front(PendingEpoch { epoch, state });
            return None;
        };
        Some(self.landed(epoch, *committing, answer))
    }

    fn landed(
        &mut self,
        epoch: u64,
        committing: CommittingEpoch,
        answer: CommitAnswer,
    ) -> Result<EpochReport, CheckpointError> {
        let CommittingEpoch { full, changed, taken, .. } = committing;
        let outcome = match answer.result {
            Ok(published) => {
                changed.into_iter().for_each(DirtySet::commit);
                let (frames, pause_us) = (published.frames, taken.pause.as_micros() as u64);
                tracing::info!(checkpoint = epoch, full, frames, pause_us, "stored");
                let write = answer.at.saturating_duration_since(taken.resumed);
                Ok(EpochReport {
                    epoch,
                    frames,
                    disk_blocks: published.blocks,
                    pause_us,
                    copied_after_frames: taken.copied_after,
                    waits: taken.waits,
                    waited_us: taken.waited.as_micros() as u64,
                    write_ms: write.as_micros() as f64 / 1000.0,
                    written_bytes: published.bytes,
                    durable: true,
                })
            }
            Err(cause) => {
                drop(changed);
                tracing::warn!(checkpoint = epoch, full, %cause, "not stored");
                // After a failed sync, what reached the disk is unknown: the next epoch copies all
                // of memory.
                self.note_failure(&cause, full || answer.lost);
                self.failure.files |= answer.thread_ended;
                Err(self.failed(epoch, FailedStep { step: EpochStep::Publish, cause }))
            }
        };
        self.recover_from_failure(answer.last);
        outcome
    }

    fn failed(&self, epoch: u64, failed: FailedStep) -> CheckpointError {
        let FailedStep { step, cause } = failed;
        CheckpointError { epoch, step, guest: self.guest.run_state(), cause }
    }

    fn note_failure(&mut self, cause: &EpochFailure, chain: bool) {
        let lock = matches!(cause, EpochFailure::Store(StoreError::LockLost { .. }));
        let replaced = matches!(cause, EpochFailure::Store(StoreError::Replaced { .. }));
        self.failure.any = true;
        self.failure.chain |= chain;
        self.failure.files |= lock || replaced;
        self.failure.lock |= lock;
    }

    /// Applies the consequences of failures once nothing is in flight. `durable` is the latest
    /// durable epoch, if one has just landed.
    fn recover_from_failure(&mut self, durable: Option<u64>) {
        if !self.failure.any || self.is_committing() {
            return;
        }
        let FailureEffects { chain, files, lock, .. } = std::mem::take(&mut self.failure);
        if files {
            self.commit_thread = None;
        }
        self.lock_lost |= lock;
        match &mut self.chain {
            _ if chain || files => self.chain = None,
            Some(chain) if durable.is_some() => chain.last = durable,
            _ => {}
        }
    }

    /// Ensures that the store's files are open and were not replaced, and that an epoch number is
    /// left. Returns what the next epoch needs.
    fn make_ready(&mut self) -> Result<Ready<'_>, FailedStep> {
        let failed = |cause| FailedStep { step: EpochStep::Begin, cause };
        let begin = |e: StoreError| failed(e.into());
        if self.next > MAX_EPOCH {
            let (dir, last) = (self.store.location().to_owned(), self.next - 1);
            return Err(begin(StoreError::Full { dir, last }));
        }
        // While an epoch is in flight, the commit thread checks before each commit.
        if !self.is_committing() {
            if self.lock_lost {
                self.lock_again().map_err(begin)?;
            }
            self.close_replaced().map_err(failed)?;
        }
        let Self { guest, drives, store, bounds, staging, planner, chain, next, .. } = self;
        let guest = &**guest;
        let commit_thread = match &mut self.commit_thread {
            Some(open) => open,
            none => {
                let opened = open_files(store, guest).map_err(begin)?;
                *next = (*next).max(next_number(store, Some(&opened)).map_err(begin)?);
                none.insert(opened)
            }
        };
        let (epoch, bounds) = (*next, *bounds);
        Ok(Ready { epoch, guest, drives, store, commit_thread, bounds, staging, planner, chain })
    }

    /// Takes the store's lock again, if no other writer has it. Another writer may have left epochs
    /// in between: no epoch builds on what was there before.
    fn lock_again(&mut self) -> Result<(), StoreError> {
        // This check comes first, so that another guest's store is not locked against its own
        // writer.
        self.store.check_line(&*self.guest)?;
        // A directory that was moved away and back still has the lock of this process.
        if self.store.check_lock().is_err() {
            self.store.lock()?;
        }
        (self.commit_thread, self.chain) = (None, None);
        self.lock_lost = false;
        tracing::warn!("the store's lock was lost and taken again");
        Ok(())
    }

    /// Closes the store's files if they were replaced.
    fn close_replaced(&mut self) -> Result<(), EpochFailure> {
        match self.commit_thread.as_ref().map(CommitThread::check) {
            Some(Err(EpochFailure::Store(e @ StoreError::Replaced { .. }))) => {
                tracing::warn!("beginning again with a full checkpoint: {e}");
                (self.commit_thread, self.chain) = (None, None);
                Ok(())
            }
            Some(checked) => checked,
            None => Ok(()),
        }
    }
}

/// Opens the store's files, and creates them if there are none.
fn open_files(store: &Arc<Store>, guest: &dyn Checkpointable) -> Result<CommitThread, StoreError> {
    store.check_lock()?;
    let committer = match Committer::open(store, guest)? {
        Some(open) => open,
        None => Committer::create(store, guest)?,
    };
    CommitThread::start(committer)
}

/// Returns the number after the last epoch in the store.
fn next_number(store: &Store, commit_thread: Option<&CommitThread>) -> Result<u64, StoreError> {
    let last = commit_thread.and_then(CommitThread::last).unwrap_or(0);
    match last {
        MAX_EPOCH.. => Err(StoreError::Full { dir: store.location().to_owned(), last }),
        _ => Ok(last + 1),
    }
}
