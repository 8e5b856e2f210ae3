//! Making epochs durable, in order, and dropping old ones. One thread does so, and owns the log.
//!
//! ```text
//! page file synced -> the epoch appended to the log -> log synced -> durable: slots that nobody needs any more are free
//! ```

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use dirty_tracker::PAGE_SIZE;

use super::backend::{RangeLock, StoreFile};
use super::build::{Builder, begin_log};
use super::log::Place;
use super::manifest::{Manifest, NotWritten};
use super::pages::{PageReader, Pages, begin_pages};
use super::records::{Commit, Files, NO_SLOT};
use super::sectors::SECTOR;
use super::space::Space;
use super::writer::Written;
use super::{Store, StoreError, log_name, pages_name};
use crate::slots::{SlotRun, Slots};
use crate::{Guest, VmId};

/// The log may have so many bytes, and so many times those that a new one would have, before it is written anew.
const LOG_BOUND: u64 = 16 << 20;
const TIMES_NEEDED: u64 = 3;
/// Most epochs that are dropped with one.
const MOST_DROPPED: usize = 1024;

/// How many epochs are kept, and how long a log may get.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// All of them without.
    pub(crate) keep: Option<u64>,
    /// Bytes of a log.
    pub(crate) log: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { keep: None, log: LOG_BOUND }
    }
}

/// An epoch that is durable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Published {
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
}

/// An epoch that is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    pub(super) epoch: u64,
    /// Of the log.
    pub(super) sectors: u64,
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
pub(crate) struct Committer {
    pub(super) store: Arc<Store>,
    pub(super) vm_id: VmId,
    pub(super) files: Files,
    pages: Arc<Pages>,
    pub(super) log: Box<dyn StoreFile>,
    /// Where the next epoch goes.
    pub(super) end: Place,
    pub(super) standing: Standing,
    pub(super) kept: VecDeque<Kept>,
    /// The highest number that was ever used.
    last: Option<u64>,
    space: Space,
    /// Slots of failed epochs that may still be in the log.
    limbo: Vec<SlotRun>,
    bounds: Bounds,
    /// Not before the log has so many bytes it is tried again to write it anew.
    rotate_from: u64,
    /// The last failure was one of a sync: what was written since the one before counts as lost.
    pub(crate) lost: bool,
}

impl Committer {
    /// Opens the store's files for `guest`; `None` if there are none. What a crash left unfinished in the log is cut off.
    pub(crate) fn open(store: &Arc<Store>, guest: &dyn Guest) -> Result<Option<Self>, StoreError> {
        let Some((manifest, mut log)) = store.open_log()? else { return Ok(None) };
        if let Some(e) = log.take_damage() {
            return Err(e);
        }
        let vm_id = guest.vm_id();
        if manifest.vm_id != vm_id {
            if log.groups.is_empty() {
                return Ok(None);
            }
            let (dir, stored, asked) = (store.dir(), manifest.vm_id, vm_id);
            return Err(StoreError::OtherVm { dir, stored, asked });
        }
        let total = PageReader::open(store, manifest.files.pages, vm_id)?.slots()?;
        let (space, slots) = Space::of_log(guest.layout(), &mut log, total)?;
        let pages = Arc::new(Pages::open(store, manifest.files.pages, vm_id, slots)?);
        let name = log_name(manifest.files.log);
        let file = store.backend().open_for_writing(&name);
        let file = file.map_err(|e| store.io("opening", &name, e))?;
        let bytes = log.bytes();
        if file.len().map_err(|e| store.io("reading", &name, e))? > bytes {
            tracing::info!("{name}: cutting off an epoch that was never finished");
            file.cut(bytes).map_err(|e| store.io("cutting", &name, e))?;
        }
        // A process that was killed may have written the last epoch, and not have synced it.
        file.sync().map_err(|e| store.io("syncing", &name, e))?;
        let kept = log.kept().iter().map(|g| Kept { epoch: g.info.epoch, sectors: g.sectors });
        let kept: VecDeque<Kept> = kept.collect();
        Ok(Some(Self {
            store: store.clone(),
            vm_id,
            files: manifest.files,
            pages,
            log: file,
            end: log.end,
            standing: Standing::Sound,
            last: kept.back().map(|k| k.epoch),
            kept,
            space,
            limbo: Vec::new(),
            bounds: Bounds::default(),
            rotate_from: 0,
            lost: false,
        }))
    }

    /// Makes the store's files for `guest`, or others in their place if those have no epoch.
    pub(crate) fn create(store: &Arc<Store>, guest: &dyn Guest) -> Result<Self, StoreError> {
        let vm_id = guest.vm_id();
        let before = store.manifest()?.map_or(Files { log: 0, pages: 0 }, |m| m.files);
        let files = Files { log: before.log + 1, pages: before.pages + 1 };
        store.check_lock()?;
        let backend = store.backend();
        let made = |name: &str| backend.create(name).map_err(|e| store.io("creating", name, e));
        let write =
            |name: &str, result: io::Result<()>| result.map_err(|e| store.io("writing", name, e));
        let sync = |name: &str, file: &dyn StoreFile| {
            file.sync().map_err(|e| store.io("syncing", name, e))
        };
        let name = pages_name(files.pages);
        let pages = made(&name)?;
        write(&name, begin_pages(&*pages, vm_id, files.pages))?;
        sync(&name, &*pages)?;
        let name = log_name(files.log);
        let log = made(&name)?;
        let end = begin_log(&*log, vm_id, files.log).map_err(|e| store.io("writing", &name, e))?;
        sync(&name, &*log)?;
        store.put_manifest(Manifest { vm_id, files }).map_err(|e| e.cause)?;
        for name in [log_name(before.log), pages_name(before.pages)] {
            // What cannot be removed now is when the store is next opened.
            let _ = backend.remove(&name);
        }
        let mut slots = Slots::new(1);
        slots.allocate(1, 1);
        Ok(Self {
            store: store.clone(),
            vm_id,
            files,
            pages: Arc::new(Pages::open(store, files.pages, vm_id, slots)?),
            log,
            end,
            standing: Standing::Sound,
            last: None,
            kept: VecDeque::new(),
            space: Space::new(guest.layout()),
            limbo: Vec::new(),
            bounds: Bounds::default(),
            rotate_from: 0,
            lost: false,
        })
    }

    pub(crate) fn set_bounds(&mut self, bounds: Bounds) {
        self.bounds = bounds;
    }

    /// The page file, for who writes epochs.
    pub(crate) fn pages(&self) -> &Arc<Pages> {
        &self.pages
    }

    /// The latest epoch that is durable.
    pub(crate) fn last(&self) -> Option<u64> {
        self.last
    }

    /// Refuses to write to what is not the store any more.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        self.store.check_lock()?;
        self.store.check_file(&log_name(self.files.log), &*self.log)?;
        self.store.check_file(&pages_name(self.files.pages), self.pages.file())?;
        match self.store.manifest()? {
            Some(Manifest { vm_id, files }) if vm_id == self.vm_id && files == self.files => Ok(()),
            _ => Err(StoreError::Replaced { file: self.store.path(super::MANIFEST) }),
        }
    }

    /// Makes an epoch durable: it exists, and is durable, exactly if this returns `Ok`. Else its slots are free again, as soon
    /// as it is known that the log does not have it.
    pub(crate) fn commit(&mut self, written: Written) -> Result<Published, StoreError> {
        self.lost = false;
        let front = written.front();
        if let Some(parent) = front.parent.filter(|parent| self.last != Some(*parent)) {
            return Err(StoreError::ParentFailed { parent });
        }
        self.settle()?;
        self.pages.sync().inspect_err(|_| self.lost = true)?;
        // After what took long: somebody may have exchanged the directory meanwhile.
        self.check()?;
        let first = self.kept.front().map_or(front.epoch, |k| k.epoch);
        let dropped = self.begin_drop().inspect_err(|_| self.end_drop(first..front.epoch))?;
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
        if dropped > 0 {
            self.end_drop(first..oldest);
        }
        result
    }

    /// Lets others read these epochs again, if they are still there.
    fn end_drop(&self, epochs: Range<u64>) {
        // Should that fail, the locks go with the file.
        let _ = self.pages.file().lock_range(epochs, RangeLock::Free);
    }

    /// Has those epochs alone that are to be dropped with the next; how many, from the oldest on.
    fn begin_drop(&self) -> Result<usize, StoreError> {
        let Some(keep) = self.bounds.keep else { return Ok(0) };
        let keep = usize::try_from(keep).unwrap_or(usize::MAX).max(1);
        let many = (self.kept.len() + 1).saturating_sub(keep).min(MOST_DROPPED);
        for (dropped, kept) in self.kept.iter().take(many).enumerate() {
            let locked = self.pages.file().lock_range(kept.epoch..kept.epoch + 1, RangeLock::Alone);
            let name = || pages_name(self.files.pages);
            if !locked.map_err(|e| self.store.io("locking an epoch in", &name(), e))? {
                tracing::debug!(epoch = kept.epoch, "somebody reads it: kept");
                return Ok(dropped);
            }
        }
        Ok(many)
    }

    /// Appends an epoch to the log and syncs that.
    fn append(&mut self, written: &Written, oldest: u64) -> Result<(Place, Published), StoreError> {
        let (front, entries) = (written.front(), written.entries());
        let zero_frames = entries.iter().filter(|e| e.slot == NO_SLOT).count() as u64;
        let frames = entries.len() as u64 - zero_frames;
        let mut builder = Builder::new(&*self.log, self.end);
        let mut write = || -> io::Result<(Place, u64)> {
            builder.front(front, written.layout(), written.config())?;
            builder.entries(written.layout(), entries.iter().copied())?;
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
        Ok((place, Published { frames: frames + zero_frames, bytes }))
    }

    fn is_durable(&mut self, written: Written, place: Place, dropped: usize) {
        let front = written.front();
        self.kept.drain(..dropped);
        self.kept.push_back(Kept { epoch: front.epoch, sectors: place.sector - self.end.sector });
        self.space.append(front.epoch, front.parent.is_none(), written.entries());
        written.keep_slots();
        (self.end, self.last) = (place, Some(front.epoch));
        if let Some(oldest) = self.kept.front() {
            self.pages.give_back(&self.space.drop_before(oldest.epoch));
        }
    }

    /// Cuts off what a failed epoch left in the log; its slots are free once that is durable.
    fn undo(&mut self, slots: Vec<SlotRun>) {
        let bytes = self.end.sector * SECTOR as u64;
        match self.log.cut(bytes).and_then(|()| self.log.sync()) {
            Ok(()) => self.pages.give_back(&slots),
            Err(e) => {
                tracing::error!(
                    "{}: what a failed epoch left cannot be cut off: {e}",
                    log_name(self.files.log)
                );
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
                self.remove_other_logs();
            }
        }
        self.standing = Standing::Sound;
        // The log that may have had them is not the store's any more.
        self.pages.give_back(&std::mem::take(&mut self.limbo));
        Ok(())
    }

    /// Begins another log if that is worth it. For when nobody waits.
    pub(crate) fn rotate_if_long(&mut self) {
        if !matches!(self.standing, Standing::Sound) {
            return;
        }
        let bytes = self.end.sector * SECTOR as u64;
        if bytes <= self.bounds.log.max(self.rotate_from) {
            return;
        }
        let epochs: u64 = self.kept.iter().map(|k| k.sectors).sum();
        // A run for each frame would be the worst.
        let needed = epochs * SECTOR as u64 + self.space.stored() * 20;
        if bytes / TIMES_NEEDED <= needed {
            self.rotate_from = bytes + bytes / 8;
            return;
        }
        if let Err(e) = self.rotate() {
            tracing::warn!("the log could not be written anew, and gets longer: {e}");
            self.rotate_from = bytes + bytes / 4;
        } else {
            self.rotate_from = 0;
        }
    }
}
