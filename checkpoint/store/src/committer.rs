//! The state of the committer, which owns a store's log.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use driftline_guest::VmId;

use crate::alloc::SlotRun;
use crate::backend::StoreFile;
use crate::error::StoreError;
use crate::log::LogFile;
use crate::manifest::Manifest;
use crate::names::{MANIFEST, log_name, pages_name};
use crate::page_file::PageFile;
use crate::records::Files;
use crate::retention::Space;
use crate::sectors::LogPosition;
use crate::store::Store;

/// Default length that the log may reach before rotation, in bytes; see [`Bounds::log`]. The log is
/// rotated only if it is also more than [`TIMES_NEEDED`] times as long as a new one would be. 16
/// MiB, chosen: an opener reads the whole log.
const LOG_BOUND: u64 = 16 << 20;
/// See [`LOG_BOUND`]. 3, chosen: a rotation writes a whole new log, so the log must have grown to a
/// multiple of that; a larger number makes openers read longer logs.
pub(crate) const TIMES_NEEDED: u64 = 3;

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
    pub(super) epoch: u64,
    pub(super) since: Instant,
    pub(super) warned: bool,
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
}
