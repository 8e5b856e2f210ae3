//! Taking epochs of a running guest: the pause copies and saves, everything else is outside it.
//!
//! ```text
//! launch   take one, write its frames to the page file, hand it to the thread that commits
//! land     hear that the one that was handed over first is durable, or has failed
//! ```
//!
//! Several may be in the air. If one fails, so do all behind it that build on it: their frames go
//! back to the tracker (I4), and nothing is built on any of them once none is in the air any more.

mod early;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::DirtySet;
use driftline_guest::{DriveHead, Guest, GuestError};
use driftline_store::{Bounds, Committer, EpochWriter, MAX_EPOCH, Store, StoreError};

use crate::chain::Chain;
use crate::commit_thread::{Answer, Crew};
use crate::copy_policy::{Shielding, Ways};
use crate::cost::{AheadCost, CopyCost};
use crate::disk_copy::{self, Patience, drives_of};
use crate::live_copy::{catch_up, copy_live};
use crate::report::{Cause, CheckpointError, EpochReport, Phase, step};
use crate::snapshot::{self, Means, Taken};
use crate::staging::{Staging, StagingLimits};

/// Takes epochs of one guest into one store.
///
/// The first is full, later ones build on the one before. Made again for a store that has epochs
/// already it begins with a full one, because nobody followed the guest's writes in between; so it
/// does if somebody took away the store's files, or its lock (the
/// epoch that notices that fails, the next takes the lock again unless another writer has it), and
/// after a failed sync, because nobody knows then what got to the disk.
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
    guest: Arc<dyn Guest>,
    /// Those that epochs have.
    drives: Vec<DriveHead>,
    store: Arc<Store>,
    /// None until the store has files, and when those are not its own any more.
    crew: Option<Crew>,
    /// Those that were launched and have not landed, in order.
    flights: VecDeque<Flight>,
    trouble: Trouble,
    bounds: Bounds,
    staging: Staging,
    /// None until a full epoch is durable.
    chain: Option<Chain>,
    next: u64,
    /// The store's lock was found to be another one than ours.
    lock_lost: bool,
    shield: Shielding,
    patience: Patience,
    ways: Ways,
    cost: CopyCost,
    ahead: AheadCost,
}

/// An epoch that was launched.
struct Flight {
    epoch: u64,
    state: FlightState,
}

enum FlightState {
    /// The store has not said yet what became of it.
    Air(Box<Aloft>),
    /// It did not get that far.
    Failed(Phase, Cause),
}

/// An epoch that was handed over.
struct Aloft {
    full: bool,
    /// To be committed when it is durable, and given back if it never is.
    changed: Vec<DirtySet>,
    taken: Taken,
}

/// What failures have shown, to be dealt with when nothing is in the air.
#[derive(Default)]
struct Trouble {
    /// Something failed that others may have been built on.
    any: bool,
    /// The next epoch must be a full one.
    chain: bool,
    /// The store's files may be others, or another writer's.
    files: bool,
    /// Its lock is not ours.
    lock: bool,
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
            return Err(StoreError::ReadOnly { dir: store.location().to_owned() });
        }
        let store = Arc::new(store);
        let drives = drives_of(&*guest);
        let crew = Committer::open(&store, &*guest)?.map(Crew::start).transpose()?;
        let next = next_number(&store, crew.as_ref())?;
        let all = guest.layout().frames() * driftline_dirty_tracker::PAGE_SIZE;
        limits.most_bytes = limits.most_bytes.min(all);
        let staging = Staging::new(limits);
        let shield = Shielding::default();
        Ok(Self {
            guest,
            drives,
            store,
            crew,
            flights: VecDeque::new(),
            trouble: Trouble::default(),
            bounds: Bounds::default(),
            staging,
            chain: None,
            next,
            lock_lost: false,
            shield,
            patience: Patience::default(),
            ways: Ways::default(),
            cost: CopyCost::default(),
            ahead: AheadCost::default(),
        })
    }

    /// From so many changed frames on an epoch is copied behind the running guest, where that can
    /// keep its frames as they are meanwhile ([`Guest::shield`]); with fewer, before the pause or
    /// in it, which then costs less than to protect and copy them. `u64::MAX` has none copied
    /// behind. If this is not called, that begins with 1,280 frames, and with 5,120 where by the
    /// epoch before little would be left for the pause.
    pub fn copy_behind_from(&mut self, frames: u64) {
        self.ways = Ways::new(frames);
    }

    /// Leaves the guest's drives to somebody else, who has to keep each as it is in the pause of an
    /// epoch. At first epochs have all those that the guest can write to. Not after the first
    /// epoch.
    pub fn leave_drives(&mut self) {
        self.drives.clear();
    }

    /// How many epochs are kept: with each one that is stored the oldest beyond so many, at least
    /// 1, are dropped, but for those that somebody reads at the time, and later ones. Without a
    /// number, as at first, all are kept.
    pub fn keep(&mut self, epochs: Option<u64>) {
        self.bounds.keep = epochs;
    }

    /// From so many bytes on, 16 MiB unless said, the log is written anew when it is three times as
    /// long as it would be then.
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

    /// Takes one epoch and returns when it is durable.
    ///
    /// The guest stands still while its state is saved. What changed is copied, and written, behind
    /// the running guest: who writes to a frame that has not been copied waits for that. If it is
    /// little, or the guest offers no [shield](Guest::shield), it is copied before the pause or in
    /// it and written behind. Then frames beyond the staging area's size are written in the pause,
    /// which is as slow as the disk's cache; the area has grown, within its limit, by the next
    /// epoch. A full epoch first copies populated memory while the guest runs, and, a few times,
    /// what changed meanwhile.
    pub fn take(&mut self) -> Result<EpochReport, CheckpointError> {
        self.launch();
        let mut landed = self.land(None);
        while !self.flights.is_empty() {
            landed = self.land(None);
        }
        // One was launched, and so one lands.
        landed.unwrap_or_else(|| {
            let dir = self.store.location().to_owned();
            let cause = StoreError::NoEpoch { dir, epoch: Some(self.next) }.into();
            Err(self.failed(self.next, Phase::Publish, cause))
        })
    }

    /// How many epochs were launched and have not landed.
    pub(crate) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Whether one has failed, and some that may have been built on it have not landed: what is
    /// launched now would fail, too.
    pub(crate) fn must_land(&self) -> bool {
        self.trouble.any && self.in_the_air()
    }

    fn in_the_air(&self) -> bool {
        self.flights.iter().any(|flight| matches!(flight.state, FlightState::Air(_)))
    }

    /// Takes one epoch and hands it over; what becomes of it is heard when it has
    /// [landed](Self::land).
    pub(crate) fn launch(&mut self) {
        let span = tracing::info_span!("epoch", epoch = self.next);
        let _entered = span.enter();
        let ready = self.make_ready();
        let epoch = self.next;
        // Not used again by this checkpointer, stored or not: a crash may bring back a failed one.
        self.next = epoch.saturating_add(1).min(MAX_EPOCH + 1);
        let full = self.chain.is_none();
        let launched = ready.and_then(|()| self.attempt(epoch, full));
        let state = match launched {
            Ok(aloft) => FlightState::Air(Box::new(aloft)),
            Err((phase, cause)) => {
                tracing::warn!(full, %phase, %cause, "not stored");
                self.shield.failed(phase, &cause);
                self.patience.failed(phase, &cause);
                // What was copied for a full one is in no epoch; the next one copies again.
                self.note_failure(&cause, full);
                FlightState::Failed(phase, cause)
            }
        };
        self.flights.push_back(Flight { epoch, state });
        self.deal_with_trouble(None);
    }

    /// What became of the epoch that was launched first of those that have not landed, as soon as
    /// that is known, but at most after `limit`; `None` if it is not known by then, or there is
    /// none.
    pub(crate) fn land(
        &mut self,
        limit: Option<Duration>,
    ) -> Option<Result<EpochReport, CheckpointError>> {
        let flight = self.flights.pop_front()?;
        let epoch = flight.epoch;
        match flight.state {
            FlightState::Failed(phase, cause) => Some(Err(self.failed(epoch, phase, cause))),
            FlightState::Air(aloft) => {
                // While something is in the air there is somebody who answers for it.
                let Some(answer) = self.crew.as_ref()?.answer(limit) else {
                    let state = FlightState::Air(aloft);
                    self.flights.push_front(Flight { epoch, state });
                    return None;
                };
                Some(self.landed(epoch, *aloft, answer))
            }
        }
    }

    fn landed(
        &mut self,
        epoch: u64,
        aloft: Aloft,
        answer: Answer,
    ) -> Result<EpochReport, CheckpointError> {
        let Aloft { full, changed, taken } = aloft;
        let outcome = match answer.result {
            Ok(published) => {
                changed.into_iter().for_each(DirtySet::commit);
                let (frames, pause_us) = (published.frames, taken.pause.as_micros() as u64);
                tracing::info!(epoch, full, frames, pause_us, "stored");
                let write = answer.at.saturating_duration_since(taken.resumed);
                Ok(EpochReport {
                    epoch,
                    frames,
                    disk_blocks: published.blocks,
                    pause_us,
                    behind_frames: taken.behind,
                    waits: taken.waits,
                    waited_us: taken.waited.as_micros() as u64,
                    write_ms: write.as_micros() as f64 / 1000.0,
                    written_bytes: published.bytes,
                    durable: true,
                })
            }
            Err(cause) => {
                drop(changed);
                let cause = cause.into();
                tracing::warn!(epoch, full, %cause, "not stored");
                // After a failed sync nobody knows what got to the disk: the next one copies all of
                // memory.
                self.note_failure(&cause, full || answer.lost);
                self.trouble.files |= answer.gone;
                Err(self.failed(epoch, Phase::Publish, cause))
            }
        };
        self.deal_with_trouble(answer.last);
        outcome
    }

    fn failed(&self, epoch: u64, phase: Phase, cause: Cause) -> CheckpointError {
        CheckpointError { epoch, phase, guest: self.guest.run_state(), cause }
    }

    fn note_failure(&mut self, cause: &Cause, chain: bool) {
        let lock = matches!(cause, Cause::Store(StoreError::LockLost { .. }));
        let replaced = matches!(cause, Cause::Store(StoreError::Replaced { .. }));
        let Trouble { any, chain: had, files, lock: lost } = &mut self.trouble;
        *any = true;
        *had |= chain;
        *files |= lock || replaced;
        *lost |= lock;
    }

    /// Once nothing is in the air that could still be built on: `durable` is the latest epoch that
    /// is, if one has just landed.
    fn deal_with_trouble(&mut self, durable: Option<u64>) {
        if !self.trouble.any || self.in_the_air() {
            return;
        }
        let Trouble { chain, files, lock, .. } = std::mem::take(&mut self.trouble);
        if files {
            self.crew = None;
        }
        self.lock_lost |= lock;
        match &mut self.chain {
            _ if chain || files => self.chain = None,
            Some(chain) if durable.is_some() => chain.last = durable,
            _ => {}
        }
    }

    /// Sees to it that the store's files are open and its own, before an epoch is begun, and that
    /// there is a number for that.
    fn make_ready(&mut self) -> Result<(), (Phase, Cause)> {
        let begin = |e: StoreError| (Phase::Begin, e.into());
        if self.next > MAX_EPOCH {
            let (dir, last) = (self.store.location().to_owned(), self.next - 1);
            return Err(begin(StoreError::Full { dir, last }));
        }
        if self.in_the_air() {
            // The thread that commits looks before each.
            return Ok(());
        }
        if self.lock_lost {
            self.lock_again().map_err(begin)?;
        }
        self.open_again().map_err(begin)
    }

    /// Takes the store's lock again, if no other writer has it. Who had it meanwhile may have left
    /// epochs there: nothing is built on what was there before.
    fn lock_again(&mut self) -> Result<(), StoreError> {
        // First, so that another guest's store is not kept from its own writer.
        self.store.check_line(&*self.guest)?;
        // A directory that came back still has our lock, which would keep ourselves out.
        if self.store.check_lock().is_err() {
            self.store.lock()?;
        }
        (self.crew, self.chain) = (None, None);
        self.lock_lost = false;
        tracing::warn!("the store's lock was lost and taken again");
        Ok(())
    }

    /// Opens the store's files, which are made if there are none, if they are not open, or not the
    /// ones that are open.
    fn open_again(&mut self) -> Result<(), StoreError> {
        match self.crew.as_ref().map(Crew::check) {
            Some(Err(e @ StoreError::Replaced { .. })) => {
                tracing::warn!("beginning again with a full checkpoint: {e}");
                (self.crew, self.chain) = (None, None);
            }
            Some(Err(e)) => return Err(e),
            Some(Ok(())) => return Ok(()),
            None => {}
        }
        self.store.check_lock()?;
        let committer = match Committer::open(&self.store, &*self.guest)? {
            Some(open) => open,
            None => Committer::create(&self.store, &*self.guest)?,
        };
        self.crew = Some(Crew::start(committer)?);
        self.next = self.next.max(next_number(&self.store, self.crew.as_ref())?);
        Ok(())
    }

    /// Takes an epoch up to where it is handed over.
    fn attempt(&mut self, epoch: u64, full: bool) -> Result<Aloft, (Phase, Cause)> {
        let Self { guest, drives, store, crew, bounds, staging, chain, .. } = self;
        let Self { shield, patience, ways, cost, ahead: ahead_cost, .. } = self;
        let guest = &**guest;
        let parent = chain.as_ref().and_then(|c| c.last);
        let crew = crew.as_ref().ok_or_else(|| {
            // It is open, or that it cannot be was said.
            let dir = store.location().to_owned();
            (Phase::Begin, StoreError::LockLost { dir }.into())
        })?;
        let pages = crew.pages().clone();
        let mut file = step(Phase::Begin, || {
            store.check_lock()?;
            EpochWriter::new(pages, epoch, guest, parent, drives.clone())
        })?;
        if full {
            let subscription = step(Phase::Subscribe, || guest.subscribe("checkpoint"))?;
            let drives = step(Phase::Subscribe, || disk_copy::follow(guest, drives))?;
            *chain = Some(Chain::new(subscription, drives));
        }
        let Some(chain) = chain else {
            return Err((Phase::Subscribe, GuestError::NotTracked.into()));
        };
        let Chain { subscription, drives, .. } = &mut *chain;
        let mut changed = Vec::new();
        if full {
            changed = step(Phase::CopyLive, || {
                disk_copy::copy_live(drives, staging, &mut file)?;
                copy_live(guest, staging, &mut file, subscription)
            })?;
        }
        let begun = Instant::now();
        let ahead = || disk_copy::copy_ahead(drives, staging, &mut file);
        let mut ahead = step(Phase::CopyDrives, ahead)?;
        ahead_cost.note(begun.elapsed(), ahead.due);
        if full && !ahead.passes.is_empty() {
            // Memory has changed meanwhile.
            let again = || catch_up(guest, staging, &mut file, subscription, u64::MAX);
            changed.append(&mut step(Phase::CopyLive, again)?);
        }
        changed.append(&mut ahead.passes);
        let (shield, patient) = (shield.ask(guest), patience.ask());
        let file_of = &mut file;
        let calm = store.calm();
        let means = Means { guest, calm, drives, patient, shield, ways, staging, file: file_of };
        let mut taken = snapshot::take(means, subscription)?;
        changed.append(&mut taken.changed);
        crew.commit(file.finish(), *bounds);
        (chain.last, chain.since) = (Some(epoch), taken.resumed);
        if taken.staged > 0 {
            cost.note(taken.pause, taken.in_pause, taken.staged);
        }
        if taken.staged > staging.frames() {
            let (frames, staged) = (taken.staged, staging.frames());
            tracing::warn!(frames, staged, "wrote during the pause");
        }
        staging.grow_to(taken.staged);
        Ok(Aloft { full, changed, taken })
    }
}

/// The number after the last in the store.
fn next_number(store: &Store, crew: Option<&Crew>) -> Result<u64, StoreError> {
    let last = crew.and_then(Crew::last).unwrap_or(0);
    match last {
        MAX_EPOCH.. => Err(StoreError::Full { dir: store.location().to_owned(), last }),
        _ => Ok(last + 1),
    }
}
