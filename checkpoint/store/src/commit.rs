//! Commits epochs in order, and drops old ones. One thread does this, and owns the log.
//!
//! ```text
//! page file synced -> epoch appended to log -> log synced -> durable: unneeded slots are freed
//! ```

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, PAGE_SIZE};

use crate::address::MEMORY;
use crate::alloc::SlotRun;
use crate::backend::RangeLock;
use crate::committer::{BlockedDrop, Committer, LogStatus, RetainedEpoch, TIMES_NEEDED};
use crate::epoch_encoder::EpochEncoder;
use crate::epoch_writer::WrittenEpoch;
use crate::error::StoreError;
use crate::limits::SECTOR;
use crate::manifest::{Manifest, ManifestNotWritten};
use crate::names::{log_name, pages_name};
use crate::records::Commit;
use crate::sectors::LogPosition;

/// Time for which a reader may keep epochs from being dropped before a warning is logged. 1 min,
/// chosen: a usual restore has ended by then. The warning is logged once for each epoch that is
/// read.
const LONG_READ: Duration = Duration::from_secs(60);
/// Maximum number of epochs that are dropped at one commit, if the number to retain was lowered.
/// 1,024, chosen: each costs a lock, and the commit is durable after all of them. The next commits
/// drop the rest.
const MAX_DROPPED: usize = 1024;

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

impl Committer {
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
        locked.map_err(|e| self.store.io("locking a checkpoint in", &name(), e))
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
