//! Making epochs durable, in order, and dropping old ones. One thread does so, and owns the log.
//!
//! ```text
//! page file synced -> the epoch appended to the log -> log synced -> durable: slots that nobody needs any more are free
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
use crate::epoch_encoder::Builder;
use crate::epoch_writer::Written;
use crate::error::StoreError;
use crate::limits::SECTOR;
use crate::log::LogFile;
use crate::manifest::{Manifest, NotWritten};
use crate::names::{MANIFEST, log_name, pages_name};
use crate::page_file::Pages;
use crate::records::{Commit, Files};
use crate::retention::Space;
use crate::sectors::Place;
use crate::store::Store;

/// The log may have so many bytes, and so many times those that a new one would have, before it is
/// written anew.
const LOG_BOUND: u64 = 16 << 20;
const TIMES_NEEDED: u64 = 3;
/// For so long somebody may read an epoch before it is said that the store grows because of that.
const LONG_READ: Duration = Duration::from_secs(60);
/// Most epochs that are dropped with one.
const MOST_DROPPED: usize = 1024;

/// How many epochs are kept, and how long a log may get.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Epochs that are kept; all of them without.
    pub keep: Option<u64>,
    /// Bytes of a log.
    pub log: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { keep: None, log: LOG_BOUND }
    }
}

/// An epoch that is durable.
#[derive(Clone, Copy, Debug)]
pub struct Published {
    /// Frames of memory.
    pub frames: u64,
    /// Blocks of drives.
    pub blocks: u64,
    /// Bytes that it took, in the page file and in the log.
    pub bytes: u64,
}

/// An epoch that is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    pub(super) epoch: u64,
    /// Of the log.
    pub(super) sectors: u64,
}

/// An epoch that cannot be dropped because somebody reads it.
#[derive(Debug)]
pub(super) struct Waits {
    epoch: u64,
    since: Instant,
    said: bool,
}

/// What must be done before another epoch can be appended.
#[derive(Debug)]
pub(super) enum Standing {
    /// Nothing.
    Sound,
    /// What a failed epoch left in the log could not be cut off: it needs another log.
    Stuck,
    /// A crash may leave either of two manifests.
    Unsettled,
}

/// Owns a store's log, and knows which slots are needed.
#[derive(Debug)]
pub struct Committer {
    pub(super) store: Arc<Store>,
    pub(super) vm_id: VmId,
    pub(super) files: Files,
    /// The generation of the log before this one, until that is removed.
    pub(super) before: Option<u64>,
    pub(super) pages: Arc<Pages>,
    pub(super) log: Box<dyn StoreFile>,
    /// Where the next epoch goes.
    pub(super) end: Place,
    pub(super) standing: Standing,
    pub(super) kept: VecDeque<Kept>,
    /// The highest number that was ever used.
    pub(super) last: Option<u64>,
    pub(super) space: Space,
    /// Slots of failed epochs that may still be in the log.
    pub(super) limbo: Vec<SlotRun>,
    pub(super) bounds: Bounds,
    /// Not before the log has so many bytes it is tried again to write it anew.
    pub(super) rotate_from: u64,
    /// Somebody reads an epoch that would have been dropped.
    pub(super) waits_for: Option<Waits>,
    /// The last failure was one of a sync: what was written since the one before counts as lost.
    pub(super) lost: bool,
}

impl Committer {
    /// Replaces the bounds, from the next epoch on.
    pub fn set_bounds(&mut self, bounds: Bounds) {
        self.bounds = bounds;
    }

    /// The page file, for who writes epochs.
    pub fn pages(&self) -> &Arc<Pages> {
        &self.pages
    }

    /// The latest epoch that is durable.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// Whether the last epoch failed in a sync: what was written since the one before counts as
    /// lost.
    pub fn has_lost(&self) -> bool {
        self.lost
    }

    /// Refuses to write to what is not the store any more.
    pub fn check(&self) -> Result<(), StoreError> {
        self.store.check_lock()?;
        self.store.check_file(&log_name(self.files.log), &*self.log)?;
        self.store.check_file(&pages_name(self.files.pages), self.pages.file())?;
        match self.store.manifest()? {
            Some(Manifest { vm_id, files }) if vm_id == self.vm_id && files == self.files => Ok(()),
            _ => Err(StoreError::Replaced { file: self.store.path(MANIFEST) }),
        }
    }

    /// Makes an epoch durable: it exists, and is durable, exactly if this returns `Ok`. Else its
    /// slots are free again, as soon as it is known that the log does not have it.
    pub fn commit(&mut self, written: Written) -> Result<Published, StoreError> {
        self.lost = false;
        let front = written.front();
        if let Some(parent) = front.parent.filter(|parent| self.last != Some(*parent)) {
            return Err(StoreError::ParentFailed { parent });
        }
        self.settle()?;
        self.pages.sync().inspect_err(|_| self.lost = true)?;
        // After what took long: somebody may have exchanged the directory meanwhile.
        self.check()?;
        self.track()?;
        let first = self.kept.front().map_or(front.epoch, |k| k.epoch);
        let locked = first..front.epoch + 1;
        let dropped = self.begin_drop(front.epoch).inspect_err(|_| self.unlock(locked.clone()))?;
        let oldest = self.kept.get(dropped).map_or(front.epoch, |k| k.epoch);
        let appended = self.append(&written, oldest);
        let result = match appended {
            Ok((place, published)) => {
                self.is_durable(written, place, dropped);
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

    /// Lets others read these epochs, if they are there.
    fn unlock(&self, epochs: Range<u64>) {
        // Should that fail, the locks go with the file.
        let _ = self.pages.file().lock_range(epochs, RangeLock::Free);
    }

    fn lock(&self, epoch: u64) -> Result<bool, StoreError> {
        let locked = self.pages.file().lock_range(epoch..epoch + 1, RangeLock::Alone);
        let name = || pages_name(self.files.pages);
        locked.map_err(|e| self.store.io("locking an epoch in", &name(), e))
    }

    /// Has `epoch` alone, so that nobody reads it before it is durable, and those that are to be
    /// dropped with it; how many, from the oldest on.
    fn begin_drop(&mut self, epoch: u64) -> Result<usize, StoreError> {
        if !self.lock(epoch)? {
            // Whoever it is finds that there is none yet.
            tracing::debug!(epoch, "somebody has locked it already");
        }
        let Some(keep) = self.bounds.keep else { return Ok(0) };
        let keep = usize::try_from(keep).unwrap_or(usize::MAX).max(1);
        let many = (self.kept.len() + 1).saturating_sub(keep).min(MOST_DROPPED);
        for dropped in 0..many {
            let old = self.kept[dropped].epoch;
            if !self.lock(old)? {
                self.is_read(old);
                return Ok(dropped);
            }
        }
        self.waits_for = None;
        Ok(many)
    }

    /// Somebody reads `epoch`: it, and all after it, are kept.
    fn is_read(&mut self, epoch: u64) {
        match &mut self.waits_for {
            Some(waits) if waits.epoch == epoch => {
                if !waits.said && waits.since.elapsed() >= LONG_READ {
                    waits.said = true;
                    tracing::warn!(
                        "checkpoint {epoch} of the store {} has been read for more than {} s; until its reader \
                         ends no checkpoint is dropped, and the store grows",
                        self.store.location().display(),
                        LONG_READ.as_secs()
                    );
                }
            }
            waits => *waits = Some(Waits { epoch, since: Instant::now(), said: false }),
        }
    }

    /// Learns from the log which slots become free when, if nobody was to know before.
    fn track(&mut self) -> Result<(), StoreError> {
        if self.bounds.keep.is_none() || self.space.is_tracked() {
            return Ok(());
        }
        let mut log = self.read_log()?;
        self.space.track(&mut log)
    }

    /// The log, without what a failed epoch may have left at its end.
    pub(super) fn read_log(&self) -> Result<LogFile, StoreError> {
        let mut log = LogFile::open(&self.store, self.files.log)?;
        let known = self.kept.back().map_or(0, |k| k.epoch);
        log.forget_after(known);
        let there = |k: &Kept| log.groups.binary_search_by_key(&k.epoch, |g| g.info.epoch).is_ok();
        if self.kept.iter().all(there) {
            return Ok(log);
        }
        let none = || self.store.no_epoch(self.kept.front().map(|k| k.epoch));
        Err(log.take_damage().unwrap_or_else(none))
    }

    /// Appends an epoch to the log and syncs that.
    fn append(&mut self, written: &Written, oldest: u64) -> Result<(Place, Published), StoreError> {
        let (front, entries) = (written.front(), written.entries());
        let count =
            |runs: &mut dyn Iterator<Item = FrameRun>| runs.map(|run| run.count).sum::<u64>();
        let zero_frames = count(&mut entries.zero_runs());
        let all = count(&mut entries.runs().map(|(run, _)| run));
        let frames = all - zero_frames;
        let mut builder = Builder::new(&*self.log, self.end);
        let mut write = || -> io::Result<(Place, u64)> {
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
        Ok((place, Published { frames: in_memory, blocks, bytes }))
    }

    fn is_durable(&mut self, written: Written, place: Place, dropped: usize) {
        let front = written.front();
        self.kept.drain(..dropped);
        self.kept.push_back(Kept { epoch: front.epoch, sectors: place.sector - self.end.sector });
        let tracked = self.bounds.keep.is_some();
        self.space.append(front.epoch, front.parent.is_none(), written.entries(), tracked);
        written.keep_slots();
        (self.end, self.last) = (place, Some(front.epoch));
        if let Some(oldest) = self.kept.front() {
            self.pages.give_back(&self.space.drop_before(oldest.epoch));
        }
    }

    /// Cuts off what a failed epoch left in the log; its slots are free once that is durable.
    fn undo(&mut self, slots: Vec<SlotRun>) {
        let bytes = self.end.sector * SECTOR as u64;
        // Nothing is cut off what another process may have appended.
        let cut = self.check().and_then(|()| {
            let cut = self.log.cut(bytes).and_then(|()| self.log.sync());
            cut.map_err(|e| self.store.io("cutting", &log_name(self.files.log), e))
        });
        match cut {
            Ok(()) => self.pages.give_back(&slots),
            Err(e) => {
                tracing::error!("what a failed checkpoint left cannot be removed: {e}");
                self.standing = Standing::Stuck;
                self.limbo.extend(slots);
            }
        }
    }

    /// Does what is left to do before another epoch can be appended.
    fn settle(&mut self) -> Result<(), StoreError> {
        match self.standing {
            Standing::Sound => return Ok(()),
            Standing::Stuck => self.rotate()?,
            Standing::Unsettled => {
                let manifest = Manifest { vm_id: self.vm_id, files: self.files };
                self.store.put_manifest(manifest).map_err(|e: NotWritten| e.cause)?;
                self.remove_log_before();
            }
        }
        self.standing = Standing::Sound;
        // The log that may have had them is not the store's any more.
        self.pages.give_back(&std::mem::take(&mut self.limbo));
        Ok(())
    }

    /// Whether it is worth it to begin another log.
    pub fn is_long(&mut self) -> bool {
        if !matches!(self.standing, Standing::Sound) {
            return false;
        }
        let bytes = self.end.sector * SECTOR as u64;
        if bytes <= self.bounds.log.max(self.rotate_from) {
            return false;
        }
        let epochs: u64 = self.kept.iter().map(|k| k.sectors).sum();
        // A run for each frame would be the worst.
        let needed = epochs * SECTOR as u64 + self.space.stored() * 20;
        if bytes / TIMES_NEEDED <= needed {
            self.rotate_from = bytes + bytes / 8;
            return false;
        }
        true
    }

    /// Begins another log. For when nobody waits.
    pub fn shorten(&mut self) {
        let bytes = self.end.sector * SECTOR as u64;
        if let Err(e) = self.rotate() {
            tracing::warn!("the log could not be written anew, and gets longer: {e}");
            self.rotate_from = bytes + bytes / 4;
        } else {
            self.rotate_from = 0;
        }
    }
}
