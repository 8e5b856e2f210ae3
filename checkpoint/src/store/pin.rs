//! Reading an epoch beside a writer: it is pinned, so that it, and all after it, are kept for as long as it is read.
//!
//! A pin is a shared lock on the byte of the page file whose number is the epoch's. Who is about to drop epochs has the bytes of
//! all of them alone until that is durable; a pin that comes after that finds them gone from the log. So does he have the epoch
//! that he is about to append: nobody reads one that is not durable.

use std::io::ErrorKind;
use std::thread;
use std::time::{Duration, Instant};

use dirty_tracker::{Gfn, Layout};

use super::log::{LogFile, is_not_found};
use super::manifest::Manifest;
use super::object::MEMORY;
use super::pages::PageReader;
use super::space::{apply, apply_last};
use super::{Cell, FrameMap, RangeLock, Record, Store, StoreError, pages_name};
use crate::{DriveHead, Section};

/// How long a writer may take to make an epoch durable, and how long epochs may go as fast as they are chosen.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(1);

/// A store's log and page file, and an epoch in them that stays until this is dropped.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub(crate) log: LogFile,
    pub(crate) pages: PageReader,
    /// Where among the log's groups the epoch is.
    pub(crate) index: usize,
}

/// What an epoch's machine is built from.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) layout: Layout,
    pub(crate) config: Vec<u8>,
    /// In their order; none if the epoch does not have them.
    pub(crate) drives: Vec<DriveHead>,
}

/// What is learned of an epoch on the way to where its frames are.
#[derive(Debug)]
pub(crate) struct Mapped {
    /// From how many epochs' records it is known where they are.
    pub(crate) epochs: u64,
    /// The state of its machine.
    pub(crate) sections: Vec<Section>,
}

impl Pinned {
    /// What stands at the beginning of the epoch: reads no more of it.
    pub(crate) fn read_machine(&mut self) -> Result<Machine, StoreError> {
        let group = self.log.group(self.index)?;
        Ok(Machine { layout: group.layout, config: group.config, drives: group.drives })
    }

    /// Where the frames of guest memory are that are not zeros, ascending, and, since the epoch is read to its end for that, its state.
    pub(crate) fn read_cells(&mut self) -> Result<(Vec<(Gfn, Cell)>, Mapped), StoreError> {
        if self.log.base_of(self.index) == self.index {
            // It has each frame once, in their order: nothing is put together.
            let mut group = self.log.group(self.index)?;
            let (mut cells, mut sections) = (Vec::new(), Vec::new());
            while let Some(record) = group.next()? {
                match record {
                    Record::Frames(runs, crcs) => {
                        let runs = runs.iter().flat_map(|run| run.frames.frames().zip(run.slot..));
                        let here = runs.zip(crcs).filter(|((gfn, _), _)| MEMORY.contains(&gfn.0));
                        cells
                            .extend(here.map(|((gfn, slot), crc)| (gfn, Cell { slot, crc: *crc })));
                    }
                    Record::Zeros(_) => {}
                    Record::Section(section) => sections.push(section),
                }
            }
            return Ok((cells, Mapped { epochs: 1, sections }));
        }
        let mut map = FrameMap::default();
        let mapped = self.read_map(&mut map)?;
        Ok((map.to_vec(), mapped))
    }

    /// Where all frames of the epoch are, drives' included, and its state, as above.
    pub(crate) fn read_map(&mut self, map: &mut FrameMap) -> Result<Mapped, StoreError> {
        let base = self.log.base_of(self.index);
        for index in base..self.index {
            apply(&mut self.log, index, map)?;
        }
        let sections = apply_last(&mut self.log, self.index, map)?;
        Ok(Mapped { epochs: (self.index - base) as u64 + 1, sections })
    }
}

impl Store {
    /// Pins `epoch`, or the latest.
    pub(crate) fn pin(&self, epoch: Option<u64>) -> Result<Pinned, StoreError> {
        self.pin_chosen(epoch, false, |log| match epoch {
            Some(epoch) => self.find(log, epoch),
            None => self.latest(log),
        })
    }

    /// Pins the oldest epoch that is kept, and so all of them; `None` if there are none.
    pub(crate) fn pin_all(&self) -> Result<Option<Pinned>, StoreError> {
        match self.open_log()? {
            Some((_, log)) if !log.groups.is_empty() => {}
            _ => return Ok(None),
        }
        let oldest = |log: &mut LogFile| log.oldest().ok_or_else(|| self.no_epoch(None));
        self.pin_chosen(None, true, oldest).map(Some)
    }

    /// The latest epoch; if the log is damaged nobody knows which that is.
    fn latest(&self, log: &mut LogFile) -> Result<u64, StoreError> {
        match (log.take_damage(), log.groups.last()) {
            (Some(e), _) => Err(e),
            (None, Some(last)) => Ok(last.info.epoch),
            (None, None) => Err(self.no_epoch(None)),
        }
    }

    fn find(&self, log: &mut LogFile, epoch: u64) -> Result<u64, StoreError> {
        if log.kept().binary_search_by_key(&epoch, |g| g.info.epoch).is_ok() {
            return Ok(epoch);
        }
        // It may be in what is damaged.
        let behind = log.groups.last().is_none_or(|last| last.info.epoch < epoch);
        let damage = if behind { log.take_damage() } else { None };
        Err(damage.unwrap_or_else(|| self.no_epoch(Some(epoch))))
    }

    /// Pins the epoch that `choose` finds in the log, and chooses again as long as it is gone by then. With `all` nothing of the log
    /// is seen of which it is not known that it is durable.
    fn pin_chosen(
        &self,
        asked: Option<u64>,
        all: bool,
        choose: impl Fn(&mut LogFile) -> Result<u64, StoreError>,
    ) -> Result<Pinned, StoreError> {
        let until = Instant::now() + PATIENCE;
        loop {
            let Some((mut manifest, mut log)) = self.open_log()? else {
                return Err(self.no_epoch(asked));
            };
            let name = pages_name(manifest.files.pages);
            let pages = match PageReader::open(self, manifest.files.pages, manifest.vm_id) {
                // It was compacted in this moment.
                Err(e) if is_not_found(&e) && self.manifest()? != Some(manifest) => continue,
                other => other?,
            };
            let lock = |epoch: u64, lock: RangeLock| {
                let locked = pages.file().lock_range(epoch..epoch + 1, lock);
                locked.map_err(|e| self.io("locking an epoch in", &name, e))
            };
            let pinned = loop {
                let epoch = choose(&mut log)?;
                let durable = if all { last_durable(&log, lock)? } else { u64::MAX };
                let locked = lock(epoch, RangeLock::Shared)?;
                if !self.look_again(&mut manifest, &mut log)? {
                    break None;
                }
                let is_kept = || log.kept().binary_search_by_key(&epoch, |g| g.info.epoch).is_ok();
                if locked && is_kept() {
                    break Some((epoch, durable));
                }
                if Instant::now() >= until {
                    return Err(self.io("locking an epoch in", &name, ErrorKind::TimedOut.into()));
                }
                if locked {
                    lock(epoch, RangeLock::Free)?;
                } else {
                    // Its writer makes it durable, or drops it.
                    thread::sleep(LOOK);
                }
            };
            let Some((epoch, durable)) = pinned else { continue };
            log.groups.retain(|g| g.info.epoch <= durable.max(epoch));
            if let Ok(index) = log.groups.binary_search_by_key(&epoch, |g| g.info.epoch) {
                return Ok(Pinned { log, pages, index });
            }
        }
    }

    /// Reads what there is now; `false` if the page file is not the store's any more.
    fn look_again(&self, manifest: &mut Manifest, log: &mut LogFile) -> Result<bool, StoreError> {
        if self.manifest()? == Some(*manifest) {
            log.go_on()?;
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

/// The last epoch that is durable: the last of the log, unless its writer has it alone, and then the one before.
fn last_durable(
    log: &LogFile,
    lock: impl Fn(u64, RangeLock) -> Result<bool, StoreError>,
) -> Result<u64, StoreError> {
    let mut epochs = log.groups.iter().rev().map(|g| g.info.epoch);
    match epochs.next() {
        Some(last) if lock(last, RangeLock::Shared)? => Ok(last),
        _ => Ok(epochs.next().unwrap_or(0)),
    }
}
