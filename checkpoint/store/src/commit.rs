//! Commits epochs in order, and drops old ones. One thread does this, and owns the log.
//!
//! ```text
//! page file synced -> epoch appended to log -> log synced -> durable: unneeded slots are freed
//! ```

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, PAGE_SIZE};
use driftline_guest::VmId;

use crate::address::MEMORY;
use crate::alloc::SlotRun;
use crate::backend::{RangeLock, StoreFile};
use crate::epoch_encoder::EpochEncoder;
use crate::epoch_writer::WrittenEpoch;
use crate::error::StoreError;
use crate::limits::SECTOR;
use crate::log::LogFile;
use crate::manifest::{Manifest, ManifestNotWritten};
use crate::names::{MANIFEST, log_name, pages_name};
use crate::page_file::PageFile;
use crate::records::{Commit, Files};
use crate::retention::Space;
use crate::sectors::LogPosition;
use crate::store::Store;

/// Default length that the log may reach before rotation, in bytes; see [`Bounds::log`]. The log is
/// rotated only if it is also more than `TIMES_NEEDED` times as long as a new one would be.
const LOG_BOUND: u64 = 16 << 20;
const TIMES_NEEDED: u64 = 3;
/// Time for which an epoch may be read before a warning that the store grows because of that.
const LONG_READ: Duration = Duration::from_secs(60);
/// Maximum number of epochs that are dropped at one commit.
const MAX_DROPPED: usize = 1024;

/// Limits of the number of retained epochs and of the log's length.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Number of epochs to retain; `None` for all.
    pub keep: Option<u64>,
    /// Length of the log before rotation, in bytes.
    pub log: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { keep: None, log: LOG_BOUND }
    }
}

/// An epoch that has become durable.
#[derive(Clone, Copy, Debug)]
pub struct CommittedEpoch {
    /// Number of frames of memory.
    pub frames: u64,
    /// Number of blocks of drives.
    pub blocks: u64,
    /// Space that the epoch takes in the page file and the log, in bytes.
    pub bytes: u64,
}

/// An epoch that is retained.
#[derive(Clone, Copy, Debug)]
pub(super) struct RetainedEpoch {
    pub(super) epoch: u64,
    /// Number of sectors of the log that the epoch takes.
    pub(super) sectors: u64,
}

/// An epoch that cannot be dropped because a reader has pinned it.
#[derive(Debug)]
pub(super) struct BlockedDrop {
    epoch: u64,
    since: Instant,
    warned: bool,
}

/// Work to be done before another epoch can be appended.
#[derive(Debug)]
pub(super) enum LogStatus {
    /// Nothing.
    Sound,
    /// The log must be replaced: what a failed epoch left in it could not be cut off.
    MustRotate,
    /// The manifest must be written again: a crash may leave either of two.
    ManifestInDoubt,
}

/// Owner of a store's log. It knows which slots are needed.
#[derive(Debug)]
pub struct Committer {
    pub(super) store: Arc<Store>,
    pub(super) vm_id: VmId,
    pub(super) files: Files,
    /// Generation of the log before this one, until that is removed.
    pub(super) before: Option<u64>,
    pub(super) pages: Arc<PageFile>,
    pub(super) log: Box<dyn StoreFile>,
    /// Position of the next epoch.
    pub(super) end: LogPosition,
    pub(super) log_status: LogStatus,
    pub(super) kept: VecDeque<RetainedEpoch>,
    /// Highest number that was ever used.
    pub(super) last: Option<u64>,
    pub(super) space: Space,
    /// Slots of failed epochs that may still be in the log.
    pub(super) uncertain_slots: Vec<SlotRun>,
    pub(super) bounds: Bounds,
    /// Length of the log below which rotation is not attempted again, in bytes.
    pub(super) rotate_from: u64,
    /// The epoch that a reader keeps from being dropped.
    pub(super) blocked_drop: Option<BlockedDrop>,
    /// Whether the last failure was in a sync, so that what was written since the sync before it
    /// counts as lost.
    pub(super) lost: bool,
}

impl Committer {
    /// Replaces the limits, from the next epoch on.
    pub fn set_bounds(&mut self, bounds: Bounds) {
        self.bounds = bounds;
    }

    /// Returns the page file, for the writers of epochs.
    pub fn pages(&self) -> &Arc<PageFile> {
        &self.pages
    }

    /// Returns the latest durable epoch.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// Returns whether the last epoch failed in a sync. What was written since the sync before it
    /// then counts as lost.
    pub fn has_lost(&self) -> bool {
        self.lost
    }

    /// Fails if the lock, the log, the page file or the manifest was replaced or removed.
    ///
    /// # Errors
    ///
    /// [`StoreError::LockLost`] or [`StoreError::Replaced`], or an error of the system.
    pub fn check(&self) -> Result<(), StoreError> {
        self.store.check_lock()?;
        self.store.check_file(&log_name(self.files.log), &*self.log)?;
        self.store.check_file(&pages_name(self.files.pages), self.pages.file())?;
        match self.store.manifest()? {
            Some(Manifest { vm_id, files }) if vm_id == self.vm_id && files == self.files => Ok(()),
            _ => Err(StoreError::Replaced { file: self.store.path(MANIFEST) }),
        }
    }

    /// Makes an epoch durable. The epoch exists, and is durable, exactly if this returns `Ok`.
    /// Otherwise its slots are free again as soon as it is known that the log does not have it.
    ///
    /// # Errors
    ///
    /// [`StoreError::ParentFailed`] if its parent is not the last durable epoch, or an error of the
    /// store's files.
    pub fn commit(&mut self, written: WrittenEpoch) -> Result<CommittedEpoch, StoreError> {
        self.lost = false;
        let front = written.front();
        if let Some(parent) = front.parent.filter(|parent| self.last != Some(*parent)) {
            return Err(StoreError::ParentFailed { parent });
        }
        self.finish_pending()?;
        self.pages.sync().inspect_err(|_| self.lost = true)?;
        // Checked after the sync, which takes long: the directory may have been replaced meanwhile.
        self.check()?;
        self.track()?;
        let first = self.kept.front().map_or(front.epoch, |k| k.epoch);
        let locked = first..front.epoch + 1;
        let dropped = self.begin_drop(front.epoch).inspect_err(|_| self.unlock(locked.clone()))?;
        let oldest = self.kept.get(dropped).map_or(front.epoch, |k| k.epoch);
        let appended = self.append(&written, oldest);
        let result = match appended {
            Ok((place, published)) => {
                self.note_durable(written, place, dropped);
                Ok(published)
            }
            Err(e) => {
                self.undo(written.take_slots());
                Err(e)
            }
        };
        self.unlock(locked);
        result
    }

    /// Unlocks these epochs, so that readers can pin those that are there.
    fn unlock(&self, epochs: Range<u64>) {
        // If this fails, closing the file releases the locks.
        let _ = self.pages.file().lock_range(epochs, RangeLock::Free);
    }

    fn lock(&self, epoch: u64) -> Result<bool, StoreError> {
        let locked = self.pages.file().lock_range(epoch..epoch + 1, RangeLock::Exclusive);
        let name = || pages_name(self.files.pages);
        locked.map_err(|e| self.store.io("locking an epoch in", &name(), e))
    }

    /// Locks `epoch`, so that no reader pins it before it is durable, and the epochs to be dropped
    /// with it. Returns the number of the latter, from the oldest on.
    fn begin_drop(&mut self, epoch: u64) -> Result<usize, StoreError> {
        if !self.lock(epoch)? {
            // The process that locked it finds that there is no such epoch yet.
            tracing::debug!(checkpoint = epoch, "another process has locked it already");
        }
        let Some(keep) = self.bounds.keep else { return Ok(0) };
        let keep = usize::try_from(keep).unwrap_or(usize::MAX).max(1);
        let many = (self.kept.len() + 1).saturating_sub(keep).min(MAX_DROPPED);
        for dropped in 0..many {
            let old = self.kept[dropped].epoch;
            if !self.lock(old)? {
                self.note_pinned(old);
                return Ok(dropped);
            }
        }
        self.blocked_drop = None;
        Ok(many)
    }

    /// Notes that `epoch` is being read: it and all later epochs are kept.
    fn note_pinned(&mut self, epoch: u64) {
        match &mut self.blocked_drop {
            Some(waits) if waits.epoch == epoch => {
                if !waits.warned && waits.since.elapsed() >= LONG_READ {
                    waits.warned = true;
                    tracing::warn!(
                        "checkpoint {epoch} of the store {} has been read for more than {} s; \
                         until its reader ends no checkpoint is dropped, and the store grows",
                        self.store.location().display(),
                        LONG_READ.as_secs()
                    );
                }
            }
            waits => *waits = Some(BlockedDrop { epoch, since: Instant::now(), warned: false }),
        }
    }

    /// Reads from the log when each slot becomes free, if that was not tracked before.
    fn track(&mut self) -> Result<(), StoreError> {
        if self.bounds.keep.is_none() || self.space.is_tracked() {
            return Ok(());
        }
        let mut log = self.read_log()?;
        self.space.track(&mut log)
    }

    /// Reads the log, without anything that a failed epoch may have left at its end.
    pub(super) fn read_log(&self) -> Result<LogFile, StoreError> {
        let mut log = LogFile::open(&self.store, self.files.log)?;
        let known = self.kept.back().map_or(0, |k| k.epoch);
        log.forget_after(known);
        let there =
            |k: &RetainedEpoch| log.epochs.binary_search_by_key(&k.epoch, |g| g.info.epoch).is_ok();
        if self.kept.iter().all(there) {
            return Ok(log);
        }
        let none = || self.store.no_epoch(self.kept.front().map(|k| k.epoch));
        Err(log.take_damage().unwrap_or_else(none))
    }

    /// Appends an epoch to the log and syncs the log.
    fn append(
        &mut self,
        written: &WrittenEpoch,
        oldest: u64,
    ) -> Result<(LogPosition, CommittedEpoch), StoreError> {
        let (front, entries) = (written.front(), written.entries());
        let count =
            |runs: &mut dyn Iterator<Item = FrameRun>| runs.map(|run| run.count).sum::<u64>();
        let zero_frames = count(&mut entries.zero_runs());
        let all = count(&mut entries.runs().map(|(run, _)| run));
        let frames = all - zero_frames;
        let mut builder = EpochEncoder::new(&*self.log, self.end);
        let mut write = || -> io::Result<(LogPosition, u64)> {
            builder.front(front, written.layout(), written.config(), written.drives())?;
            builder.entries(written.layout(), entries.stored(), entries.zero_runs())?;
            written.sections().iter().try_for_each(|section| builder.section(section))?;
            let bytes = frames * PAGE_SIZE + builder.bytes_if_ended();
            let epoch = front.epoch;
            let commit =
                Commit { epoch, oldest, frames, zero_frames, bytes, records: 0, digest: 0 };
            Ok((builder.commit(commit)?, bytes))
        };
        let name = log_name(self.files.log);
        let (place, bytes) = write().map_err(|e| self.store.io("writing", &name, e))?;
        self.log.sync().map_err(|e| {
            self.lost = true;
            self.store.io("syncing", &name, e)
        })?;
        let memory = |run: &FrameRun| MEMORY.contains(&run.start.0);
        let in_memory = count(&mut entries.runs().map(|(run, _)| run).filter(memory));
        let blocks = all - in_memory;
        Ok((place, CommittedEpoch { frames: in_memory, blocks, bytes }))
    }

    fn note_durable(&mut self, written: WrittenEpoch, place: LogPosition, dropped: usize) {
        let front = written.front();
        self.kept.drain(..dropped);
        self.kept.push_back(RetainedEpoch {
            epoch: front.epoch,
            sectors: place.sector - self.end.sector,
        });
        let tracked = self.bounds.keep.is_some();
        self.space.append(front.epoch, front.parent.is_none(), written.entries(), tracked);
        written.keep_slots();
        (self.end, self.last) = (place, Some(front.epoch));
        if let Some(oldest) = self.kept.front() {
            self.pages.give_back(&self.space.drop_before(oldest.epoch));
        }
    }

    /// Cuts off what a failed epoch left in the log. Its slots are free once that is durable.
    fn undo(&mut self, slots: Vec<SlotRun>) {
        let bytes = self.end.offset();
        // Nothing is cut off that another process may have appended.
        let cut = self.check().and_then(|()| {
            let cut = self.log.truncate(bytes).and_then(|()| self.log.sync());
            cut.map_err(|e| self.store.io("truncating", &log_name(self.files.log), e))
        });
        match cut {
            Ok(()) => self.pages.give_back(&slots),
            Err(e) => {
                tracing::error!(
                    "the remains of a failed checkpoint cannot be cut from the log: {e}"
                );
                self.log_status = LogStatus::MustRotate;
                self.uncertain_slots.extend(slots);
            }
        }
    }

    /// Finishes what must be done before another epoch can be appended.
    fn finish_pending(&mut self) -> Result<(), StoreError> {
        match self.log_status {
            LogStatus::Sound => return Ok(()),
            LogStatus::MustRotate => self.rotate()?,
            LogStatus::ManifestInDoubt => {
                let manifest = Manifest { vm_id: self.vm_id, files: self.files };
                self.store.put_manifest(manifest).map_err(|e: ManifestNotWritten| e.cause)?;
                self.remove_log_before();
            }
        }
        self.log_status = LogStatus::Sound;
        // The log that may have had these slots is no longer the store's.
        self.pages.give_back(&std::mem::take(&mut self.uncertain_slots));
        Ok(())
    }

    /// Returns whether the log is long enough for a rotation to pay off.
    pub fn needs_rotation(&mut self) -> bool {
        if !matches!(self.log_status, LogStatus::Sound) {
            return false;
        }
        let bytes = self.end.offset();
        if bytes <= self.bounds.log.max(self.rotate_from) {
            return false;
        }
        let epochs: u64 = self.kept.iter().map(|k| k.sectors).sum();
        // The worst case: a run for each frame.
        let needed = epochs * SECTOR as u64 + self.space.stored() * 20;
        if bytes / TIMES_NEEDED <= needed {
            self.rotate_from = bytes + bytes / 8;
            return false;
        }
        true
    }

    /// Rotates the log. To be called when no caller waits for the committer.
    pub fn rotate_log(&mut self) {
        let bytes = self.end.offset();
        if let Err(e) = self.rotate() {
            tracing::warn!("the log could not be rewritten, so it grows: {e}");
            self.rotate_from = bytes + bytes / 4;
        } else {
            self.rotate_from = 0;
        }
    }
}
