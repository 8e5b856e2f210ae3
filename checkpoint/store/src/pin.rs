//! Pins: an epoch that is read while a writer is active is retained, with all later ones, for as
//! long as its reader needs it.
//!
//! A pin is a shared lock on the byte of the page file whose number is the epoch's. The writer
//! holds an exclusive lock on the byte of every epoch that it drops, until the drop is durable. A
//! pin that is taken after that does not find the epoch in the log. The writer also holds the byte
//! of the epoch that it appends, so no reader sees an epoch that is not durable.

use std::io::ErrorKind;
use std::thread;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, PAGE_SIZE};
use driftline_guest::{DriveHead, Section};

use crate::address::MEMORY;
use crate::backend::RangeLock;
use crate::damage::Damage;
use crate::epoch_info::EpochInfo;
use crate::epoch_reader::Record;
use crate::error::{StoreError, is_not_found};
use crate::frame_map::{FrameLocation, FrameMap};
use crate::log::LogFile;
use crate::manifest::Manifest;
use crate::names::pages_name;
use crate::page_file::PageReader;
use crate::read::{Sink, fetch};
use crate::retention::{apply, apply_last};
use crate::store::Store;

/// Upper bound on the time until an epoch is pinned: a writer may be making it durable, and chosen
/// epochs may be dropped before they are pinned.
const PIN_LIMIT: Duration = Duration::from_secs(30);
/// What a pin does to the page file, for errors.
const LOCKING: &str = "locking a checkpoint in";
/// Interval between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// A store's log and page file, and an epoch in them that is retained until this is dropped.
#[derive(Debug)]
pub struct Pinned {
    pub(crate) log: LogFile,
    pub(crate) pages: PageReader,
    /// Index of the epoch in the log.
    pub(crate) index: usize,
}

/// Description of an epoch's machine, from which the guest is built.
#[derive(Debug)]
pub struct Machine {
    /// Memory slots of the guest.
    pub layout: Layout,
    /// Configuration of the guest, as `GuestIdentity::config` returned it.
    pub config: Vec<u8>,
    /// Drives in their order; none if the epoch has no drives.
    pub drives: Vec<DriveHead>,
}

/// Frames that are not zeros, ascending, each with its location.
pub type FrameLocations = Vec<(Gfn, FrameLocation)>;

/// State of an epoch's machine, and how many epochs the map of its frames comes from.
#[derive(Debug)]
pub struct MachineState {
    /// Number of epochs whose records were read for the map.
    pub epochs: u64,
    /// State of the epoch's machine.
    pub sections: Vec<Section>,
}

impl Pinned {
    /// Returns the epoch's description of itself.
    pub fn info(&self) -> &EpochInfo {
        &self.log.epochs[self.index].info
    }

    /// Returns the number of bytes of the log that were read.
    pub fn log_bytes(&self) -> u64 {
        self.log.bytes()
    }

    /// Returns what is at the beginning of the epoch, and reads no more of it.
    ///
    /// # Errors
    ///
    /// Damage of the log, or an error of the system.
    pub fn read_machine(&mut self) -> Result<Machine, StoreError> {
        let reader = self.log.epoch(self.index)?;
        Ok(Machine { layout: reader.layout, config: reader.config, drives: reader.drives })
    }

    /// Returns the places of the frames of guest memory that are not zeros, ascending. Reads the
    /// epoch to its end, so it returns the epoch's state as well.
    ///
    /// # Errors
    ///
    /// Damage of the log, or an error of the system.
    pub fn read_locations(&mut self) -> Result<(FrameLocations, MachineState), StoreError> {
        if self.log.base_of(self.index) == self.index
            && let Some(read) = self.read_full()?
        {
            return Ok(read);
        }
        let mut map = FrameMap::default();
        let mapped = self.read_map(&mut map)?;
        Ok((map.to_vec(), mapped))
    }

    /// Reads like [`read_locations`](Self::read_locations) an epoch that builds on none: its frames
    /// are in order already. Returns `None` if a frame is among the zeros, too, which then win.
    fn read_full(&mut self) -> Result<Option<(FrameLocations, MachineState)>, StoreError> {
        let mut reader = self.log.epoch(self.index)?;
        let (mut locations, mut sections): (FrameLocations, _) = (Vec::new(), Vec::new());
        while let Some(record) = reader.next()? {
            match record {
                Record::Frames(runs, crcs) => {
                    let runs = runs.iter().flat_map(|run| run.frames.frames().zip(run.slot..));
                    let here = runs.zip(crcs).filter(|((gfn, _), _)| MEMORY.contains(&gfn.0));
                    locations.extend(
                        here.map(|((gfn, slot), crc)| (gfn, FrameLocation { slot, crc: *crc })),
                    );
                }
                Record::Zeros(runs) => {
                    let has = |run: &FrameRun| {
                        let at = locations.partition_point(|(gfn, _)| *gfn < run.start);
                        locations.get(at).is_some_and(|(gfn, _)| *gfn < run.end())
                    };
                    if runs.iter().any(has) {
                        return Ok(None);
                    }
                }
                Record::Section(section) => sections.push(section),
            }
        }
        Ok(Some((locations, MachineState { epochs: 1, sections })))
    }

    /// Returns the places of the blocks of drives that are not zeros, ascending.
    ///
    /// # Errors
    ///
    /// Damage of the log, or an error of the system.
    pub fn read_blocks(&mut self) -> Result<FrameLocations, StoreError> {
        let mut map = FrameMap::default();
        self.read_map(&mut map)?;
        Ok(map.blocks().collect())
    }

    /// Reads `frames`, ascending by frame, and passes them to `sink`, as many adjacent ones in one
    /// call as there are. Sorts and reads them by slot, which suits disks, unless `sink` wants them
    /// in their own order. An error stops all threads.
    ///
    /// # Errors
    ///
    /// The error of `sink`; damage of a frame unless `sink` accepts it.
    pub fn fetch<S: Sink>(
        &self,
        frames: &mut [(Gfn, FrameLocation)],
        sink: &S,
    ) -> Result<(), S::Error> {
        fetch(&self.pages, self.info().epoch, frames, sink)
    }

    /// Replaces the epoch in the damage of a frame with the epoch that stored the frame: the oldest
    /// retained one that has it in the same slot. [`Store::verify`] names the same epoch.
    pub fn name_origin(&mut self, mut damaged: StoreError) -> StoreError {
        if let StoreError::Damaged { damage: Damage::Frame { gfn, epoch, .. }, offset, .. } =
            &mut damaged
        {
            // If the log cannot be read any more, the error keeps the requested epoch.
            if let Ok(Some(origin)) = self.origin(*gfn, *offset) {
                *epoch = origin;
            }
        }
        damaged
    }

    fn origin(&mut self, gfn: Gfn, offset: u64) -> Result<Option<u64>, StoreError> {
        let oldest = self.log.oldest().unwrap_or(0);
        let kept = self.log.epochs.partition_point(|g| g.info.epoch < oldest).min(self.index);
        let (mut map, mut origin) = (FrameMap::default(), None);
        for index in self.log.base_of(kept)..=self.index {
            apply(&mut self.log, index, &mut map)?;
            let here = map.get(gfn).is_some_and(|c| u64::from(c.slot) * PAGE_SIZE == offset);
            match here {
                true if index >= kept => {
                    origin = origin.or(Some(self.log.epochs[index].info.epoch))
                }
                true => {}
                false => origin = None,
            }
        }
        Ok(origin)
    }

    /// Reads the places of all frames of the epoch, drives included, and its state.
    pub(crate) fn read_map(&mut self, map: &mut FrameMap) -> Result<MachineState, StoreError> {
        let base = self.log.base_of(self.index);
        for index in base..self.index {
            apply(&mut self.log, index, map)?;
        }
        let sections = apply_last(&mut self.log, self.index, map)?;
        Ok(MachineState { epochs: (self.index - base) as u64 + 1, sections })
    }
}

impl Store {
    /// Pins `epoch`, or the latest one if it is `None`.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoEpoch`] if the epoch is not there; the log's damage if the epoch may be in
    /// that.
    pub fn pin(&self, epoch: Option<u64>) -> Result<Pinned, StoreError> {
        self.pin_chosen(epoch, false, |log| match epoch {
            Some(epoch) => self.find(log, epoch),
            None => self.latest(log),
        })
    }

    /// Returns the configuration of the guest in the latest epoch, as
    /// [`GuestIdentity::config`](driftline_guest::GuestIdentity::config) returned it.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoEpoch`] if the store is empty; damage of the log, or an error of the system.
    pub fn config(&self) -> Result<Vec<u8>, StoreError> {
        Ok(self.pin(None)?.read_machine()?.config)
    }

    /// Pins the oldest retained epoch, and so all of them; `None` if there are none.
    pub(crate) fn pin_all(&self) -> Result<Option<Pinned>, StoreError> {
        match self.open_log()? {
            Some((_, log)) if !log.epochs.is_empty() => {}
            _ => return Ok(None),
        }
        let oldest = |log: &mut LogFile| log.oldest().ok_or_else(|| self.no_epoch(None));
        self.pin_chosen(None, true, oldest).map(Some)
    }

    /// Returns the latest epoch. Fails if the log is damaged, since the latest is then unknown.
    fn latest(&self, log: &mut LogFile) -> Result<u64, StoreError> {
        match (log.take_damage(), log.epochs.last()) {
            (Some(e), _) => Err(e),
            (None, Some(last)) => Ok(last.info.epoch),
            (None, None) => Err(self.no_epoch(None)),
        }
    }

    fn find(&self, log: &mut LogFile, epoch: u64) -> Result<u64, StoreError> {
        if log.kept().binary_search_by_key(&epoch, |g| g.info.epoch).is_ok() {
            return Ok(epoch);
        }
        // The epoch may be in the damaged part.
        let is_missing = log.epochs.last().is_none_or(|last| last.info.epoch < epoch);
        let damage = if is_missing { log.take_damage() } else { None };
        Err(damage.unwrap_or_else(|| self.no_epoch(Some(epoch))))
    }

    /// Pins the epoch that `choose` finds in the log, and calls it again if the epoch was dropped
    /// meanwhile. With `all`, the log of the result ends with an epoch that is known to be durable.
    fn pin_chosen(
        &self,
        asked: Option<u64>,
        all: bool,
        choose: impl Fn(&mut LogFile) -> Result<u64, StoreError>,
    ) -> Result<Pinned, StoreError> {
        self.pin_until(Instant::now() + PIN_LIMIT, asked, all, choose)
    }

    fn pin_until(
        &self,
        until: Instant,
        asked: Option<u64>,
        all: bool,
        choose: impl Fn(&mut LogFile) -> Result<u64, StoreError>,
    ) -> Result<Pinned, StoreError> {
        loop {
            let Some((manifest, log)) = self.open_log()? else {
                return Err(self.no_epoch(asked));
            };
            if let Some(pinned) = self.try_pin(manifest, log, all, &choose, until)? {
                return Ok(pinned);
            }
            self.check_pin_time(until, manifest)?;
        }
    }

    /// Pins the epoch that `choose` finds in `log`. Returns `None` if the files are no longer the
    /// store's, or the epoch was dropped at the last moment.
    fn try_pin(
        &self,
        mut manifest: Manifest,
        mut log: LogFile,
        all: bool,
        choose: &impl Fn(&mut LogFile) -> Result<u64, StoreError>,
        until: Instant,
    ) -> Result<Option<Pinned>, StoreError> {
        let pages = match PageReader::open(self, manifest.files.pages, manifest.vm_id) {
            // A compaction has just replaced it.
            Err(e) if is_not_found(&e) && self.manifest()? != Some(manifest) => return Ok(None),
            other => other?,
        };
        let name = pages_name(manifest.files.pages);
        let lock = |epoch: u64, lock: RangeLock| {
            let locked = pages.file().lock_range(epoch..epoch + 1, lock);
            locked.map_err(|e| self.io(LOCKING, &name, e))
        };
        let (epoch, durable) = loop {
            let epoch = choose(&mut log)?;
            let durable = if all { last_durable(&log, lock)? } else { u64::MAX };
            let locked = lock(epoch, RangeLock::Shared)?;
            if !self.refresh(&mut manifest, &mut log)? {
                return Ok(None);
            }
            let is_kept = || log.kept().binary_search_by_key(&epoch, |g| g.info.epoch).is_ok();
            if locked && is_kept() {
                break (epoch, durable);
            }
            self.check_pin_time(until, manifest)?;
            if locked {
                lock(epoch, RangeLock::Free)?;
            } else {
                // The writer is making it durable, or dropping it.
                thread::sleep(RETRY_INTERVAL);
            }
        };
        log.forget_after(durable.max(epoch));
        let index = log.epochs.binary_search_by_key(&epoch, |g| g.info.epoch);
        Ok(index.ok().map(|index| Pinned { log, pages, index }))
    }

    /// Fails after `until`.
    fn check_pin_time(&self, until: Instant, manifest: Manifest) -> Result<(), StoreError> {
        if Instant::now() < until {
            return Ok(());
        }
        let name = pages_name(manifest.files.pages);
        Err(self.io(LOCKING, &name, ErrorKind::TimedOut.into()))
    }

    /// Reads what is there now. Returns `false` if the page file is no longer the store's.
    fn refresh(&self, manifest: &mut Manifest, log: &mut LogFile) -> Result<bool, StoreError> {
        if self.manifest()? == Some(*manifest) {
            log.read_appended()?;
            return Ok(true);
        }
        let pages = manifest.files.pages;
        match self.open_log()? {
            Some(now) if now.0.files.pages == pages => (*manifest, *log) = now,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Returns the last durable epoch: the last of the log, or the one before if the writer has the
/// last one locked.
fn last_durable(
    log: &LogFile,
    lock: impl Fn(u64, RangeLock) -> Result<bool, StoreError>,
) -> Result<u64, StoreError> {
    let mut epochs = log.epochs.iter().rev().map(|g| g.info.epoch);
    match epochs.next() {
        Some(last) if lock(last, RangeLock::Shared)? => Ok(last),
        _ => Ok(epochs.next().unwrap_or(0)),
    }
}

#[allow(clippy::unwrap_used)]
#[cfg(all(test, feature = "testing"))]
mod tests {
    use std::cell::Cell;

    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::epoch_taker::EpochTaker;
    use crate::manifest::ManifestNotWritten;
    use crate::page_file::begin_pages;
    use crate::records::Files;
    use crate::testing::{MemoryDisk, correct_log};
    use driftline_guest::testing::{MemoryConfig, MemoryGuest, TestDisk};
    use driftline_guest::{GuestContents, VmId};

    fn put_together(pinned: &mut Pinned) -> FrameLocations {
        let mut map = FrameMap::default();
        pinned.read_map(&mut map).unwrap();
        map.to_vec()
    }

    #[test]
    fn full_epoch_reads_the_same_both_ways() {
        let drive = TestDisk::new("d", 8 * 4096).unwrap();
        let config = MemoryConfig { writers: 1, working_set: 1, ..MemoryConfig::still() };
        let guest = MemoryGuest::with_disks(VmId::random(), config, vec![drive.clone()]).unwrap();
        let disk = MemoryDisk::default();
        let store = || Store::with_backend(Box::new(disk.clone()), true).unwrap();
        for _ in 0..2 {
            // Each round is a process of its own, whose first epoch is a full one.
            let mut taker = EpochTaker::new(guest.clone(), store());
            for (gfn, byte) in [(1, 7), (2, 0), (5, 9), (1, 0)] {
                guest.ram().write_slice(&[byte; 4096], GuestAddress(gfn * 4096)).unwrap();
                drive.write(gfn * 4096, &[byte; 4096]).unwrap();
                taker.take();
            }
        }
        let mut full = 0;
        for epoch in 1..=8 {
            let mut pinned = store().pin(Some(epoch)).unwrap();
            let (locations, mapped) = pinned.read_locations().unwrap();
            assert_eq!(locations, put_together(&mut pinned), "epoch {epoch}");
            assert!(!mapped.sections.is_empty());
            full += u64::from(mapped.epochs == 1);
        }
        assert_eq!(full, 2);
    }

    #[test]
    fn pin_in_a_changing_store_ends() {
        let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
        let disk = MemoryDisk::default();
        let store = || Store::with_backend(Box::new(disk.clone()), true).unwrap();
        EpochTaker::new(guest, store()).take();
        let store = store();
        let manifest = store.manifest().unwrap().unwrap();
        let pages = store.create_new(&pages_name(2)).unwrap();
        begin_pages(&*pages, manifest.vm_id, 2).unwrap();
        // Replaces the page file before each lock.
        let next = Cell::new(2);
        let choose = |_: &mut LogFile| -> Result<u64, StoreError> {
            let files = Files { pages: next.replace(3 - next.get()), ..manifest.files };
            let put = store.put_manifest(Manifest { files, ..manifest });
            put.map_err(|ManifestNotWritten { cause, .. }| cause)?;
            Ok(1)
        };
        match store.pin_until(Instant::now(), None, false, choose) {
            Err(StoreError::Io { cause, .. }) => assert_eq!(cause.kind(), ErrorKind::TimedOut),
            other => panic!("{other:?}"),
        }
        assert_eq!(next.get(), 1, "one attempt");
    }

    #[test]
    fn zeros_win_over_stored_frames() {
        let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
        let disk = MemoryDisk::default();
        let store = || Store::with_backend(Box::new(disk.clone()), true).unwrap();
        let mut taker = EpochTaker::new(guest.clone(), store());
        for (one, two) in [(7, 5), (8, 0)] {
            for (gfn, byte) in [(1, one), (2, two)] {
                guest.ram().write_slice(&[byte; 4096], GuestAddress(gfn * 4096)).unwrap();
            }
            taker.take();
        }
        drop(taker);
        let found = || {
            let mut pinned = store().pin(None).unwrap();
            let (locations, mapped) = pinned.read_locations().unwrap();
            assert_eq!(locations, put_together(&mut pinned));
            (locations.iter().map(|(gfn, _)| gfn.0).collect::<Vec<_>>(), mapped.epochs)
        };
        assert_eq!(found(), (vec![1], 2));
        let mut log = disk.contents("log-1").unwrap();
        let last = |log: &[u8], tag: u8| {
            let head = [tag, 0x80, 1, 0, 0, 0, 0, 0];
            log.windows(8).rposition(|w| w == head).expect("such a record")
        };
        // Removes the parent of the second epoch.
        let front = last(&log, 0x11) + 24;
        log[front + 8..front + 16].fill(0);
        correct_log(&mut log);
        disk.put("log-1", log.clone());
        assert_eq!(found(), (vec![1], 1));
        // Its table of zeros names frame 1 instead of 2.
        let run = last(&log, 0x14) + 24 + 8;
        assert_eq!(log[run], 2);
        log[run] = 1;
        correct_log(&mut log);
        disk.put("log-1", log);
        assert_eq!(found(), (vec![], 1));
    }
}
