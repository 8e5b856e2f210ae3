//! Taking epochs of a running guest: the pause copies and saves, everything else is outside it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dirty_tracker::{Epoch, FrameRun, Subscription};
use serde::Serialize;
use vm_memory::GuestMemoryError;

use crate::chain::Chain;
use crate::instant::{self, Means};
use crate::shielding::Shielding;
use crate::staging::{Staging, StagingLimits, window};
use crate::store::{Bounds, Committer, EpochWriter, MAX_EPOCH, Published, Store, StoreError};
use crate::{Guest, GuestError, RunState};

/// Of so many changed frames on they are copied behind the guest's back. Measured with `tests/bench/pause.rs`: at 256 that
/// makes the pause shorter, and a busy guest's longest gap too; at 16 both ways are alike, and an epoch is durable later.
const BEHIND_FROM: u64 = 128;
/// Frames that the copy of a running guest's memory takes at a time: 1 MiB.
const LIVE_FRAMES: u64 = 256;
/// How often a full epoch goes over what changed under its copy before it pauses the guest.
const LIVE_PASSES: usize = 4;

/// The steps of an epoch, for logs and errors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Looking after the store's files, which are made if there are none.
    Begin,
    /// Beginning to follow writes; only before a full epoch.
    Subscribe,
    /// Copying populated memory of the running guest; only in a full epoch.
    CopyLive,
    /// Stopping the vCPUs. The guest stands still from here to the end of `Resume`.
    Pause,
    /// Learning what changed; once before the pause already.
    Drain,
    /// Keeping what changed as it is, to be copied while the guest runs.
    Protect,
    /// Copying what changed to the staging area.
    Copy,
    /// Saving the state besides memory.
    Save,
    /// Letting the guest run.
    Resume,
    /// Copying what is protected, while the guest runs.
    CopyBehind,
    /// Writing frames to the page file.
    Write,
    /// Making the frames durable, and then the log that says where they are.
    Publish,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begin => "beginning",
            Self::Subscribe => "beginning to follow writes",
            Self::CopyLive => "copying memory",
            Self::Pause => "pausing the guest",
            Self::Drain => "collecting what changed",
            Self::Protect => "protecting what changed",
            Self::Copy => "copying what changed",
            Self::CopyBehind => "copying what changed behind the guest",
            Self::Save => "saving the guest's state",
            Self::Resume => "resuming the guest",
            Self::Write => "writing",
            Self::Publish => "publishing",
        })
    }
}

/// What stood in the way of an epoch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The store.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// The guest.
    #[error("{0}")]
    Guest(#[from] GuestError),
    /// The guest's memory.
    #[error("{0}")]
    Memory(#[from] GuestMemoryError),
    /// For so long, all in all, the guest waited to write to what was not copied yet, and the store had no room for a copy.
    #[error("the store is too slow: the guest has waited {} s to write to what is not copied yet", .0.as_secs())]
    Stalled(Duration),
}

/// An epoch that was not stored. Nothing is lost: what changed in it is in the next one (I4).
#[derive(Debug, thiserror::Error)]
#[error(
    "epoch {epoch} is not stored: {phase} failed: {cause}; the guest is {guest}{}",
    next_has_it(*guest)
)]
pub struct CheckpointError {
    /// The number that it would have had.
    pub epoch: u64,
    /// What was being done.
    pub phase: Phase,
    /// The guest's state after the failure: as before, unless it could not be resumed.
    pub guest: RunState,
    /// Why it failed.
    pub cause: Cause,
}

fn next_has_it(guest: RunState) -> &'static str {
    // A guest that has ended has no next epoch.
    if guest == RunState::Stopped { "" } else { ", and what changed will be in the next epoch" }
}

/// One stored epoch. Serialized it is a line of `checkpoint --json`.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct EpochReport {
    /// Its number.
    pub epoch: u64,
    /// Frames in it.
    pub frames: u64,
    /// From the request to pause until the guest had been resumed, in microseconds.
    pub pause_us: u64,
    /// Those of the frames that were copied while the guest ran on, after the pause.
    pub behind_frames: u64,
    /// How often somebody waited to write to a frame that was kept as it was, before the pause or after it.
    pub waits: u64,
    /// For how long somebody did, in microseconds, as far as it was known: several at a time count once.
    pub waited_us: u64,
    /// From the end of the pause until the epoch was durable, in milliseconds.
    pub write_ms: f64,
    /// Bytes that it took: slots of its own in the page file, and its records in the log.
    pub written_bytes: u64,
    /// Whether it survives a crash of the host: always, of an epoch that is reported.
    pub durable: bool,
}

/// Takes epochs of one guest into one store.
///
/// The first is full, later ones build on the one before. Made again for a store that has epochs
/// already it begins with a full one, because nobody followed the guest's writes in between; so it
/// does if somebody took away the store's files, or its lock (the
/// epoch that notices that fails, the next takes the lock again unless another writer has it), and after a failed sync, because
/// nobody knows then what got to the disk.
///
/// ```
/// use checkpoint::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
/// use checkpoint::{Checkpointer, Clock, Store, restore};
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
    guest: Arc<dyn Guest>,
    store: Arc<Store>,
    /// None until the store has files, and when those are not its own any more.
    committer: Option<Committer>,
    bounds: Bounds,
    staging: Staging,
    /// None until a full epoch is durable.
    chain: Option<Chain>,
    next: u64,
    /// The store's lock was found to be another one than ours.
    lock_lost: bool,
    shield: Shielding,
    behind_from: u64,
    cost: CopyCost,
}

/// What pauses have cost in which frames were copied.
#[derive(Clone, Copy, Default)]
struct CopyCost {
    /// The shortest of them.
    least: Duration,
    /// Of each frame, beyond that, in the last one that had many.
    frame: Duration,
}

impl CopyCost {
    fn note(&mut self, pause: Duration, frames: u64) {
        if self.least.is_zero() || pause < self.least {
            self.least = pause;
        }
        if let Ok(many @ 64..) = u32::try_from(frames) {
            self.frame = (pause - self.least) / many;
        }
    }

    /// How many frames a pause of `most` has room for, if that is known and there is any.
    fn fit(&self, most: Duration) -> Option<u64> {
        let room = most.checked_sub(self.least)?.as_nanos();
        let frames = room.checked_div(self.frame.as_nanos())?;
        Some(u64::try_from(frames).unwrap_or(u64::MAX))
    }
}

impl fmt::Debug for Checkpointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (store, next) = (&self.store, self.next);
        f.debug_struct("Checkpointer").field("store", store).field("next", &next).finish()
    }
}

impl Checkpointer {
    /// For `guest`, into `store`, which must be writable and hold no other guest's epochs. Reserves
    /// the staging area; the guest notices nothing until the first [`take`](Self::take).
    pub fn new(guest: Arc<dyn Guest>, store: Store) -> Result<Self, StoreError> {
        Self::with_staging(guest, store, StagingLimits::default())
    }

    /// As [`new`](Self::new), with other bounds for the staging area.
    pub fn with_staging(
        guest: Arc<dyn Guest>,
        store: Store,
        mut limits: StagingLimits,
    ) -> Result<Self, StoreError> {
        if !store.is_writable() {
            return Err(StoreError::ReadOnly { dir: store.dir() });
        }
        let store = Arc::new(store);
        let committer = Committer::open(&store, &*guest)?;
        let next = next_number(&store, committer.as_ref())?;
        let all = guest.layout().frames() * dirty_tracker::PAGE_SIZE;
        limits.most_bytes = limits.most_bytes.min(all);
        let staging = Staging::new(limits);
        let (shield, behind_from) = (Shielding::default(), BEHIND_FROM);
        Ok(Self {
            guest,
            store,
            committer,
            bounds: Bounds::default(),
            staging,
            chain: None,
            next,
            lock_lost: false,
            shield,
            behind_from,
            cost: CopyCost::default(),
        })
    }

    /// From so many changed frames on an epoch is copied behind the running guest, where that can keep its frames as they
    /// are meanwhile ([`Guest::shield`]); with fewer, in the pause, which then costs less than to protect and copy
    /// them. `u64::MAX` has all copied in the pause.
    pub fn copy_behind_from(&mut self, frames: u64) {
        self.behind_from = frames;
    }

    /// How many epochs are kept: with each one that is stored the oldest beyond so many, at least 1, are dropped, but for those
    /// that somebody reads at the time, and later ones. Without a number, as at first, all are kept.
    pub fn keep(&mut self, epochs: Option<u64>) {
        self.bounds.keep = epochs;
    }

    /// From so many bytes on, 16 MiB unless said, the log is written anew when it is three times as long as it would be then.
    pub fn log_bound(&mut self, bytes: u64) {
        self.bounds.log = bytes;
    }

    /// For tests: the number of the next epoch, if that is higher than it would be.
    #[cfg(feature = "testing")]
    pub fn number_from(&mut self, epoch: u64) {
        self.next = self.next.max(epoch);
    }

    /// The store that it writes to.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// With so many changed frames an epoch should be taken if its pause is not to exceed `max_pause`: three quarters of what
    /// has room. `None` before the first one.
    pub(crate) fn most_changed(&self, max_pause: Duration) -> Option<u64> {
        self.chain.as_ref()?;
        let copied = match self.shield.is_used() {
            // What is copied behind the guest's back is not in the pause.
            true => None,
            false => self.cost.fit(max_pause),
        };
        Some((copied.unwrap_or(u64::MAX).min(self.staging.frames()) / 4 * 3).max(1))
    }

    /// How many frames have changed since the last epoch; `None` if nobody knows.
    pub(crate) fn changed(&mut self) -> Option<u64> {
        let chain = self.chain.as_mut()?;
        self.guest.collect().ok()?;
        let changed = chain.subscription.drain();
        let frames = changed.frames();
        changed.give_back();
        Some(frames)
    }

    /// Takes one epoch and returns when it is durable.
    ///
    /// The guest stands still while its state is saved. What changed is copied, and written, behind the running guest: who
    /// writes to a frame that has not been copied waits for that. If it is little, or the guest offers no
    /// [shield](Guest::shield), it is copied in the pause and written behind. Then frames beyond the staging area's size
    /// are written in the pause, which is as slow as the disk's cache; the area has grown, within its limit, by
    /// the next epoch. A full epoch first copies populated memory while the guest runs, and, a few
    /// times, what changed meanwhile.
    pub fn take(&mut self) -> Result<EpochReport, CheckpointError> {
        let epoch = self.next;
        let span = tracing::info_span!("epoch", epoch);
        let _entered = span.enter();
        if self.lock_lost
            && let Err(e) = self.lock_again()
        {
            let (guest, cause) = (self.guest.run_state(), e.into());
            return Err(CheckpointError { epoch, phase: Phase::Begin, guest, cause });
        }
        let opened = self.open_again();
        // Not used again by this checkpointer, stored or not: a crash may bring back a failed one.
        let epoch = self.next;
        if epoch > MAX_EPOCH {
            let (guest, dir) = (self.guest.run_state(), self.store.dir());
            let cause = StoreError::Full { dir, last: epoch - 1 }.into();
            return Err(CheckpointError { epoch, phase: Phase::Begin, guest, cause });
        }
        self.next = epoch + 1;
        if let Err(cause) = opened {
            let (guest, cause) = (self.guest.run_state(), cause.into());
            self.forget_others(&cause);
            return Err(CheckpointError { epoch, phase: Phase::Begin, guest, cause });
        }
        let full = self.chain.is_none();
        let result = self.attempt(full);
        match &result {
            Ok(r) => tracing::info!(full, frames = r.frames, pause_us = r.pause_us, "stored"),
            Err((phase, cause)) => tracing::warn!(full, %phase, %cause, "not stored"),
        }
        result.map_err(|(phase, cause)| {
            self.shield.failed(phase, &cause);
            self.forget_others(&cause);
            // What was copied for a full one is in no epoch, and after a failed sync nobody knows what got to the disk: the next
            // one copies all of memory.
            if full || self.committer.as_ref().is_some_and(|c| c.lost) {
                self.chain = None;
            }
            CheckpointError { epoch, phase, guest: self.guest.run_state(), cause }
        })
    }

    /// Takes the store's lock again, if no other writer has it. Who had it meanwhile may have left
    /// epochs there: nothing is built on what was there before.
    fn lock_again(&mut self) -> Result<(), StoreError> {
        // First, so that another guest's store is not kept from its own writer.
        if let Some((manifest, log)) = self.store.open_log()?
            && manifest.vm_id != self.guest.vm_id()
            && !log.groups.is_empty()
        {
            let (dir, stored, asked) = (self.store.dir(), manifest.vm_id, self.guest.vm_id());
            return Err(StoreError::OtherVm { dir, stored, asked });
        }
        // A directory that came back still has our lock, which would keep ourselves out.
        if self.store.check_lock().is_err() {
            self.store.lock()?;
        }
        (self.committer, self.chain) = (None, None);
        self.committer = Committer::open(&self.store, &*self.guest)?;
        self.next = self.next.max(next_number(&self.store, self.committer.as_ref())?);
        self.lock_lost = false;
        tracing::warn!("the store's lock was lost and is held again");
        Ok(())
    }

    /// After a failure that says that the store's files may be another writer's.
    fn forget_others(&mut self, cause: &Cause) {
        let lost = matches!(cause, Cause::Store(StoreError::LockLost { .. }));
        self.lock_lost |= lost;
        if lost || matches!(cause, Cause::Store(StoreError::Replaced { .. })) {
            (self.committer, self.chain) = (None, None);
        }
    }

    /// Opens the store's files if there are some and they are not open, or not the ones that are open.
    fn open_again(&mut self) -> Result<(), StoreError> {
        match self.committer.as_ref().map(Committer::check) {
            Some(Err(e @ StoreError::Replaced { .. })) => {
                tracing::warn!("beginning anew with a full epoch: {e}");
                (self.committer, self.chain) = (None, None);
            }
            Some(Err(e)) => return Err(e),
            Some(Ok(())) | None => {}
        }
        if self.committer.is_none() {
            self.store.check_lock()?;
            self.committer = Committer::open(&self.store, &*self.guest)?;
            self.next = self.next.max(next_number(&self.store, self.committer.as_ref())?);
        }
        Ok(())
    }

    fn attempt(&mut self, full: bool) -> Result<EpochReport, (Phase, Cause)> {
        let Self { guest, store, committer, bounds, staging, chain, next, .. } = self;
        let Self { shield, behind_from, cost, .. } = self;
        let (guest, epoch) = (&**guest, next.saturating_sub(1));
        let parent = chain.as_ref().and_then(|c| c.last);
        let committer = step(Phase::Begin, || open(store, committer, guest))?;
        committer.set_bounds(*bounds);
        let pages = committer.pages().clone();
        let mut file = step(Phase::Begin, || EpochWriter::new(pages, epoch, guest, parent))?;
        if full {
            let subscription = step(Phase::Subscribe, || guest.subscribe("checkpoint"))?;
            *chain = Some(Chain::new(subscription));
        }
        let Some(chain) = chain else {
            return Err((Phase::Subscribe, GuestError::NotTracked.into()));
        };
        let mut copied = Vec::new();
        if full {
            let subscription = &mut chain.subscription;
            copied = step(Phase::CopyLive, || copy_live(guest, staging, &mut file, subscription))?;
        }
        let shield = shield.ask(guest);
        let means = Means { guest, shield, behind_from: *behind_from, staging, file: &mut file };
        let taken = instant::take(means, &mut chain.subscription)?;
        let written = file.finish();
        let Published { frames: stored, bytes } =
            step(Phase::Publish, || committer.commit(written))?;
        copied.into_iter().chain(taken.changed).for_each(Epoch::commit);
        chain.last = Some(epoch);
        let write_ms = (taken.resumed.elapsed().as_micros() as f64) / 1000.0;
        if taken.staged > 0 {
            cost.note(taken.pause, taken.staged);
        }
        if taken.staged > staging.frames() {
            let (frames, staged) = (taken.staged, staging.frames());
            tracing::warn!(frames, staged, "wrote during the pause");
        }
        staging.grow_to(taken.staged);
        Ok(EpochReport {
            epoch,
            frames: stored,
            pause_us: taken.pause.as_micros() as u64,
            behind_frames: taken.behind,
            waits: taken.waits,
            waited_us: taken.waited.as_micros() as u64,
            write_ms,
            written_bytes: bytes,
            durable: true,
        })
    }
}

/// The store's files, which are made if there are none.
fn open<'c>(
    store: &Arc<Store>,
    committer: &'c mut Option<Committer>,
    guest: &dyn Guest,
) -> Result<&'c mut Committer, StoreError> {
    store.check_lock()?;
    let opened = match committer.take() {
        Some(open) => open,
        None => Committer::create(store, guest)?,
    };
    Ok(committer.insert(opened))
}

/// The number after the last in the store.
fn next_number(store: &Store, committer: Option<&Committer>) -> Result<u64, StoreError> {
    let last = committer.and_then(Committer::last).unwrap_or(0);
    match last {
        MAX_EPOCH.. => Err(StoreError::Full { dir: store.dir(), last }),
        _ => Ok(last + 1),
    }
}

/// Does one step, with an event where it begins and one where it ends.
pub(crate) fn step<T, E: Into<Cause>>(
    phase: Phase,
    act: impl FnOnce() -> Result<T, E>,
) -> Result<T, (Phase, Cause)> {
    tracing::debug!(?phase, "begin");
    let since = Instant::now();
    let result = act().map_err(|e| (phase, e.into()));
    tracing::debug!(?phase, ok = result.is_ok(), us = since.elapsed().as_micros() as u64, "end");
    result
}

/// Copies all populated memory into the file while the guest runs, then what was written meanwhile,
/// for as long as that gets less. What is left then is appended after the pause, so that it wins.
/// Returns the epochs that went into the file: nothing in them is safe until the file is.
fn copy_live(
    guest: &dyn Guest,
    staging: &mut Staging,
    file: &mut EpochWriter,
    subscription: &mut Subscription,
) -> Result<Vec<Epoch>, Cause> {
    let populated = guest.populated()?;
    copy_running(guest, staging, file, &populated, true)?;
    let mut before = populated.iter().map(|run| run.count).sum::<u64>();
    tracing::debug!(frames = before, "copied while the guest ran");
    let mut passes = Vec::new();
    while passes.len() < LIVE_PASSES {
        guest.collect()?;
        let changed = subscription.drain();
        let frames = changed.frames();
        let runs: Vec<FrameRun> = changed.runs().collect();
        copy_running(guest, staging, file, &runs, false)?;
        tracing::debug!(frames, "copied again while the guest ran");
        passes.push(changed);
        if frames <= LIVE_FRAMES || frames > before / 4 * 3 {
            break;
        }
        before = frames;
    }
    Ok(passes)
}

/// Copies frames of a running guest into the file, a little at a time.
fn copy_running(
    guest: &dyn Guest,
    staging: &mut Staging,
    file: &mut EpochWriter,
    runs: &[FrameRun],
    forget_zeros: bool,
) -> Result<(), Cause> {
    let at_once = LIVE_FRAMES.min(staging.frames());
    for batch in batches(runs, at_once) {
        let contents = staging.copy(guest.ram(), batch.iter().copied())?;
        file.frames(batch.iter().copied(), contents, forget_zeros)?;
    }
    Ok(())
}

/// Cuts runs into groups of at most `frames` frames each.
fn batches(runs: &[FrameRun], frames: u64) -> Vec<Vec<FrameRun>> {
    let mut groups: Vec<Vec<FrameRun>> = Vec::new();
    let mut room = 0;
    for &run in runs {
        let head = room.min(run.count);
        let first = window(std::iter::once(run), 0, head);
        let rest = window(std::iter::once(run), head, u64::MAX).flat_map(|r| r.chunks(frames));
        for piece in first.chain(rest) {
            match groups.last_mut() {
                Some(group) if room > 0 => group.push(piece),
                _ => {
                    groups.push(vec![piece]);
                    room = frames;
                }
            }
            room -= piece.count;
        }
    }
    groups
}
