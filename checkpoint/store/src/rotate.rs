//! Log rotation and compaction: replaces a long log with a new one, and a page file that has holes
//! with one that has none.
//!
//! A new log has all of memory for the oldest retained epoch, and the changes for each later one. A
//! manifest that names the new files replaces the old manifest. A crash leaves either manifest,
//! with the files that it names.

use std::collections::HashMap;
use std::collections::hash_map::Entry::Vacant;
use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use serde::Serialize;

use crate::backend::StoreFile;
use crate::committer::{Committer, LogStatus, RetainedEpoch};
use crate::epoch_encoder::{EpochEncoder, StoredFrame, begin_log};
use crate::epoch_reader::Record;
use crate::error::StoreError;
use crate::frame_map::{FrameLocation, FrameMap};
use crate::limits::NO_SLOT;
use crate::log::LogFile;
use crate::manifest::{Manifest, ManifestNotWritten};
use crate::names::{log_name, pages_name};
use crate::page_file::{PageReader, begin_pages};
use crate::pause_gate::PauseGate;
use crate::read::{Sink, fetch};
use crate::records::{Commit, Files, Front, StoredRun};
use crate::retention::apply;
use crate::sectors::LogPosition;
use crate::store::Store;

/// Number of entries, some dozen microseconds of work, after which the work yields to a paused
/// guest.
const ENTRIES_PER_YIELD: u64 = 1024;

/// Result of [`Store::compact`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct CompactReport {
    /// Number of epochs in the store, which a compaction does not change.
    #[serde(rename = "retained")]
    pub epochs: u64,
    /// Length of log and page file before the compaction, in bytes.
    pub before_bytes: u64,
    /// Length of log and page file after it, in bytes.
    pub after_bytes: u64,
}

/// A log that has been written, and is not the store's yet.
pub(super) struct NewLog {
    file: Box<dyn StoreFile>,
    end: LogPosition,
    pub(super) kept: Vec<RetainedEpoch>,
}

/// Returns the indices of the epochs that are retained.
fn kept_of(log: &LogFile) -> Vec<usize> {
    let count = log.epochs.len();
    (count - log.kept().len()..count).collect()
}

/// Returns whether epoch `index` directly follows `before`, the last one that was chosen.
fn is_next(index: usize, before: Option<usize>) -> bool {
    before.is_some_and(|before| before + 1 == index)
}

/// Returns where the frames of epoch `index` are.
fn map_of(log: &mut LogFile, index: usize) -> Result<FrameMap, StoreError> {
    let mut map = FrameMap::default();
    for index in log.base_of(index)..=index {
        apply(log, index, &mut map)?;
    }
    Ok(map)
}

impl Committer {
    /// Begins a new log for the next epochs.
    pub(super) fn rotate(&mut self) -> Result<(), StoreError> {
        let store: &Arc<Store> = &self.store;
        store.check_lock()?;
        let files = Files { log: store.next_files()?.log, ..self.files };
        let mut old = self.read_log()?;
        let kept = kept_of(&old);
        let made = copy_log(store, &mut old, &kept, files.log, &|slot| slot);
        let made = made.map_err(|cause| ManifestNotWritten { cause, in_doubt: false });
        let put = |new| match store.put_manifest(Manifest { vm_id: self.vm_id, files }) {
            Ok(()) => Ok((new, None)),
            Err(ManifestNotWritten { cause, in_doubt: true }) => Ok((new, Some(cause))),
            Err(e) => Err(e),
        };
        let (new, in_doubt) =
            made.and_then(put).map_err(|ManifestNotWritten { cause, .. }| {
                store.remove_unnamed(Some(files.log), None);
                cause
            })?;
        tracing::debug!(generation = files.log, "the log was rewritten");
        self.before = Some(std::mem::replace(&mut self.files, files).log);
        (self.log, self.end, self.kept) = (new.file, new.end, new.kept.into());
        if let Some(cause) = in_doubt {
            self.log_status = LogStatus::ManifestInDoubt;
            return Err(cause);
        }
        self.remove_log_before();
        Ok(())
    }

    /// Removes the log before this one, which is no longer the store's.
    pub(super) fn remove_log_before(&mut self) {
        if let Some(before) = self.before.take() {
            // The next process that opens the store removes what cannot be removed now.
            let _ = self.store.backend().remove(&log_name(before));
        }
    }
}

/// Writes the epochs `chosen` of `old`, ascending, to a new log, and syncs it. An epoch that does
/// not directly follow its predecessor in `old` is written with all of its frames, or with all that
/// have changed since that predecessor. `to` maps an old slot to its new one.
pub(super) fn copy_log(
    store: &Store,
    old: &mut LogFile,
    chosen: &[usize],
    generation: u64,
    to: &dyn Fn(u32) -> u32,
) -> Result<NewLog, StoreError> {
    let name = log_name(generation);
    let file = store.create_new(&name)?;
    let begun = begin_log(&*file, old.vm_id, generation);
    let mut end = begun.map_err(|e| store.io("writing", &name, e))?;
    let oldest = chosen.first().map_or(0, |first| old.epochs[*first].info.epoch);
    let encoder = EpochEncoder::new(&*file, end);
    let mut copier = LogCopier { store, old, to, oldest, name: &name, encoder };
    let (mut kept, mut before) = (Vec::new(), None);
    for &index in chosen {
        let (epoch, next) = copier.copy(index, before)?;
        kept.push(RetainedEpoch { epoch, sectors: next.sector - end.sector });
        (end, before) = (next, Some(index));
    }
    file.sync().map_err(|e| store.io("syncing", &name, e))?;
    Ok(NewLog { file, end, kept })
}

/// Copies epochs of one log to another.
struct LogCopier<'c> {
    store: &'c Store,
    old: &'c mut LogFile,
    to: &'c dyn Fn(u32) -> u32,
    /// Oldest epoch that is copied.
    oldest: u64,
    /// Name of the new log.
    name: &'c str,
    encoder: EpochEncoder<'c>,
}

/// The frames of an epoch that is copied without its predecessor.
struct EpochChanges {
    map: FrameMap,
    /// Frames that are already written with another epoch.
    written: FrameMap,
    /// Frames that the other epoch has and this one does not.
    zeros: Vec<FrameRun>,
}

impl LogCopier<'_> {
    /// Copies epoch `index`; `before` is the one that was copied last. Returns the number of the
    /// copied epoch, and the position after it in the new log.
    fn copy(
        &mut self,
        index: usize,
        before: Option<usize>,
    ) -> Result<(u64, LogPosition), StoreError> {
        // A full epoch has all of memory already.
        let alone = !is_next(index, before) && self.old.epochs[index].front.parent.is_some();
        // Both are of the same chain: slots that both have must not be brought twice.
        let joined = before.filter(|before| alone && self.old.base_of(index) <= *before);
        let parent = joined.map(|before| self.old.epochs[before].info.epoch);
        let changes = if alone { Some(self.changes(index, joined)?) } else { None };
        let rebased = alone && before.is_none();
        let (store, to, name, oldest) = (self.store, self.to, self.name, self.oldest);
        let Self { old, encoder, .. } = self;
        let writing = |e| store.io("writing", name, e);
        let mut epoch = old.epoch(index)?;
        let (layout, drives) = (epoch.layout.clone(), epoch.drives.clone());
        let mut front = Front { rebased, ..epoch.front };
        if alone && !rebased {
            front.parent = parent;
        }
        encoder.front(front, &layout, &epoch.config, &drives).map_err(writing)?;
        let moved = |e: StoredFrame| StoredFrame { slot: to(e.slot), ..e };
        let mut counts = (0, 0);
        if let Some(changes) = &changes {
            let entries = changes.stored(store.pause_gate()).map(moved).inspect(|_| counts.0 += 1);
            let zeros = changes.zeros.iter().copied();
            encoder.entries(&layout, entries, zeros).map_err(writing)?;
            counts.1 = changes.zeros.len() as u64;
        }
        while let Some(record) = epoch.next()? {
            match record {
                Record::Frames(runs, crcs) if !alone => {
                    let entries: Vec<StoredFrame> = entries_of(runs, crcs).map(moved).collect();
                    let no_zeros = std::iter::empty();
                    encoder.entries(&layout, entries.into_iter(), no_zeros).map_err(writing)?;
                }
                Record::Zeros(runs) if !alone => encoder.zero_runs(runs).map_err(writing)?,
                Record::Section(section) => encoder.section(&section).map_err(writing)?,
                Record::Frames(..) | Record::Zeros(_) => {}
            }
        }
        // The state was sound before. It must not be copied in part if the disk can read it only
        // sometimes.
        if let Some(e) = epoch.cursor.lost.take() {
            return Err(e);
        }
        let (commit, _) = epoch.read_end()?;
        let (frames, zero_frames) = match alone && !rebased {
            true => counts,
            false => (commit.frames, commit.zero_frames),
        };
        let bytes = match rebased {
            true => commit.bytes,
            false => frames * PAGE_SIZE + encoder.bytes_if_ended(),
        };
        let commit = Commit { oldest, bytes, frames, zero_frames, ..commit };
        let next = encoder.commit(commit).map_err(writing)?;
        Ok((commit.epoch, next))
    }

    /// Returns the frames of epoch `index` that differ from those of epoch `joined`, or all.
    fn changes(&mut self, index: usize, joined: Option<usize>) -> Result<EpochChanges, StoreError> {
        let map = map_of(self.old, index)?;
        let written = match joined {
            Some(joined) => map_of(self.old, joined)?,
            None => FrameMap::default(),
        };
        let dropped = written.all().map(|(gfn, _)| gfn).filter(|gfn| map.get(*gfn).is_none());
        let zeros = dropped.map(|start| FrameRun { start, count: 1 }).collect();
        Ok(EpochChanges { map, written, zeros })
    }
}

impl EpochChanges {
    /// Returns the stored frames that are not written yet. Yields to a paused guest meanwhile.
    fn stored<'c>(&'c self, gate: &'c PauseGate) -> impl Iterator<Item = StoredFrame> + 'c {
        let new =
            self.map.all().filter(move |(gfn, location)| self.written.get(*gfn) != Some(*location));
        (0_u64..).zip(new).map(move |(n, (gfn, FrameLocation { slot, crc }))| {
            if n.is_multiple_of(ENTRIES_PER_YIELD) {
                gate.wait_until_open();
            }
            StoredFrame { frame: gfn.0, slot, crc }
        })
    }
}

fn entries_of(runs: &[StoredRun], crcs: &[u32]) -> impl Iterator<Item = StoredFrame> {
    let places = runs.iter().flat_map(|run| run.frames.frames().zip(run.slot..));
    places.zip(crcs).map(|((gfn, slot), crc)| StoredFrame { frame: gfn.0, slot, crc: *crc })
}

impl Store {
    /// Writes all epochs to a new page file without holes and to a new log, which then replace the
    /// old files. The store must be open for writing, and no other process may write to it. Needs
    /// room for both sets of files; a crash leaves one or the other. Readers that are at work
    /// continue with the old files.
    ///
    /// # Errors
    ///
    /// [`StoreError::ReadOnly`] if the store is open for reading; [`StoreError::NoEpoch`] if it is
    /// empty; damage, or the system's errors.
    pub fn compact(&self) -> Result<CompactReport, StoreError> {
        if !self.is_writable() {
            return Err(StoreError::ReadOnly { dir: self.dir() });
        }
        let Some((pages, manifest, mut old)) = self.open_locked()? else {
            return Err(self.no_epoch(None));
        };
        old.check_sound(self)?;
        let Manifest { vm_id, files } = manifest;
        let new = self.next_files()?;
        let before_bytes = self.bytes_of(files)?;
        self.with_repair_hint(pages.check_header(files.pages, vm_id))?;
        let chosen = kept_of(&old);
        let made = self.copy_pages(&mut old, &chosen, &pages, new.pages).and_then(|slots| {
            let to = |slot: u32| slots.get(&slot).copied().unwrap_or(NO_SLOT);
            let made = copy_log(self, &mut old, &chosen, new.log, &to)?;
            Ok((made.kept, self.bytes_of(new)?))
        });
        let made = made.map_err(|cause| ManifestNotWritten { cause, in_doubt: false });
        let put =
            made.and_then(|made| self.put_manifest(Manifest { vm_id, files: new }).map(|()| made));
        let (kept, after_bytes) = put.map_err(|e| {
            if !e.in_doubt {
                self.remove_unnamed(Some(new.log), Some(new.pages));
            }
            e.cause
        })?;
        for name in [log_name(files.log), pages_name(files.pages)] {
            if let Err(e) = self.backend().remove(&name) {
                let path = self.path(&name);
                tracing::warn!(
                    "{} is not needed any more, and cannot be removed: {e}",
                    path.display()
                );
            }
        }
        Ok(CompactReport { epochs: kept.len() as u64, before_bytes, after_bytes })
    }

    /// Removes a log and a page file that the caller has created, and that did not become the
    /// store's. The next process that opens the store removes what cannot be removed now.
    pub(super) fn remove_unnamed(&self, log: Option<u64>, pages: Option<u64>) {
        // A failed rename may still have taken effect.
        let Ok(manifest) = self.manifest() else { return };
        let named = manifest.map(|manifest| manifest.files);
        if let Some(log) = log.filter(|log| named.is_none_or(|named| named.log != *log)) {
            let _ = self.backend().remove(&log_name(log));
        }
        if let Some(pages) = pages.filter(|n| named.is_none_or(|named| named.pages != *n)) {
            let _ = self.backend().remove(&pages_name(pages));
        }
    }

    fn bytes_of(&self, files: Files) -> Result<u64, StoreError> {
        let len = |name: String| {
            let file = self.backend().open(&name);
            file.and_then(|file| file.len()).map_err(|e| self.not_read("reading", &name, e))
        };
        Ok(len(log_name(files.log))? + len(pages_name(files.pages))?)
    }

    /// Copies every frame of the epochs `chosen` to a new page file, and checks it. Returns the new
    /// slot of each slot.
    pub(super) fn copy_pages(
        &self,
        log: &mut LogFile,
        chosen: &[usize],
        pages: &PageReader,
        to: u64,
    ) -> Result<HashMap<u32, u32>, StoreError> {
        let name = pages_name(to);
        let file = self.create_new(&name)?;
        begin_pages(&*file, log.vm_id, to).map_err(|e| self.io("writing", &name, e))?;
        // Sized by the log's entries, whatever length the page file claims.
        let mut slots = HashMap::new();
        let mut next = 1;
        let mut before = None;
        for &index in chosen {
            let epoch = log.epochs[index].info.epoch;
            let mut entries: Vec<(Gfn, FrameLocation)> = Vec::new();
            if is_next(index, before) {
                let mut reader = log.epoch(index)?;
                while let Some(record) = reader.next()? {
                    if let Record::Frames(runs, crcs) = record {
                        let location = |e: StoredFrame| {
                            (Gfn(e.frame), FrameLocation { slot: e.slot, crc: e.crc })
                        };
                        entries.extend(entries_of(runs, crcs).map(location));
                    }
                }
            } else {
                entries.extend(map_of(log, index)?.all());
            }
            before = Some(index);
            // If the epoch is copied without its predecessor, some of its frames may have been
            // copied for an earlier one.
            entries.retain(|(_, location)| {
                let Vacant(slot) = slots.entry(location.slot) else { return false };
                slot.insert(next);
                next += 1;
                true
            });
            let sink = PageCopySink {
                store: self,
                file: &*file,
                name: &name,
                slots: &slots,
                entries: &entries,
            };
            let mut sorted = entries.clone();
            fetch(pages, epoch, &mut sorted, &sink)?;
        }
        file.sync().map_err(|e| self.io("syncing", &name, e))?;
        Ok(slots)
    }
}

/// Writes frames to their new slots in a new page file.
struct PageCopySink<'m> {
    store: &'m Store,
    file: &'m dyn StoreFile,
    name: &'m str,
    slots: &'m HashMap<u32, u32>,
    /// Frames of the epoch that is being copied, ascending.
    entries: &'m [(Gfn, FrameLocation)],
}

impl Sink for PageCopySink<'_> {
    type Error = StoreError;

    fn frames(&self, run: FrameRun, contents: &[u8]) -> Result<(), StoreError> {
        for (gfn, page) in run.frames().zip(contents.chunks_exact(PAGE_SIZE as usize)) {
            let Ok(at) = self.entries.binary_search_by_key(&gfn, |(gfn, _)| *gfn) else { continue };
            let Some(slot) = self.slots.get(&self.entries[at].1.slot) else { continue };
            let written = self.file.write_all_at(page, u64::from(*slot) * PAGE_SIZE);
            written.map_err(|e| self.store.io("writing", self.name, e))?;
        }
        Ok(())
    }
}

#[allow(clippy::unwrap_used)]
#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::testing::{DiskOp, MemoryDisk};
    use driftline_guest::VmId;
    use driftline_guest::testing::{MemoryConfig, MemoryGuest};

    #[test]
    fn failed_rotation_removes_its_own_log_alone() {
        let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
        for (op, after) in [(DiskOp::Create, 0), (DiskOp::Create, 1), (DiskOp::Rename, 0)] {
            for without_manifest in [false, true] {
                let disk = MemoryDisk::default();
                let store = Arc::new(Store::with_backend(Box::new(disk.clone()), true).unwrap());
                let mut committer = Committer::create(&store, &*guest).unwrap();
                if without_manifest {
                    disk.remove("manifest").unwrap();
                }
                disk.fail(op, libc::ENOSPC, after);
                committer.rotate().unwrap_err();
                let mut names = disk.names();
                names.retain(|name| !name.starts_with("manifest"));
                assert_eq!(names, ["log-1", "pages-1"], "{op:?} {after} {without_manifest}");
                disk.heal();
                committer.rotate().unwrap();
                assert!(disk.contents("log-1").is_err(), "it is not needed any more");
            }
        }
    }
}
