//! Reading all of a store to see whether it could be restored.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use serde::Serialize;

use super::log::LogFile;
use super::pages::PageReader;
use super::space::apply;
use super::{Cell, EpochInfo, FrameMap, Pinned, Record, Sink, Store, StoreError, fetch};

/// What a sound store holds.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct VerifyReport {
    /// Epochs that are kept, read and found sound.
    pub epochs: u64,
    /// The latest of them.
    pub latest: Option<u64>,
    /// Frames that they brought, those of zeros included.
    pub frames: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// What was never finished: no damage, the next writer removes it.
    pub unfinished: Vec<String>,
    /// Files that have no place in a store: left alone.
    pub foreign: Vec<String>,
}

impl VerifyReport {
    /// How many checkpoints are sound, which are all of them, and which is the latest.
    pub fn verdict(&self) -> String {
        verdict(self.epochs, self.epochs, self.latest)
    }
}

pub(super) fn verdict(sound: u64, total: u64, latest: Option<u64>) -> String {
    let plural = if total == 1 { "checkpoint is" } else { "checkpoints are" };
    let latest = latest.map(|epoch| format!("; the latest sound one is {epoch}"));
    format!("{sound} of {total} {plural} sound{}", latest.unwrap_or_default())
}

/// Damaged frames, by number.
#[derive(Default)]
struct Damaged(Mutex<BTreeMap<Gfn, Arc<StoreError>>>);

impl Sink for Damaged {
    type Error = StoreError;

    fn frames(&self, _: FrameRun, _: &[u8]) -> Result<(), StoreError> {
        Ok(())
    }

    fn damaged(&self, gfn: Gfn, damage: StoreError) -> Result<(), StoreError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(gfn, Arc::new(damage));
        Ok(())
    }
}

impl Store {
    /// Reads all that the kept epochs have and checks it. `on_epoch` hears of each epoch, ascending, sound or not: one is not if
    /// any frame of its memory is damaged. All are read even if one is, and the first damage is the result, the log's before all others.
    pub fn verify(
        &self,
        mut on_epoch: impl FnMut(u64, Result<&EpochInfo, &StoreError>),
    ) -> Result<VerifyReport, StoreError> {
        let listing = self.list()?;
        let mut report = VerifyReport {
            unfinished: listing.unfinished,
            foreign: listing.foreign,
            ..VerifyReport::default()
        };
        let mut first_damage = None;
        if let Some(pinned) = self.pin_all()? {
            first_damage = verify_epochs(pinned, &mut report, &mut on_epoch)?;
        }
        // Of the log first: epochs behind it may have used slots again that those before it had.
        let damage = listing.damaged.into_iter().next().or(first_damage);
        damage.map_or(Ok(report), Err)
    }
}

/// The first damage of an epoch, if there is one.
fn verify_epochs(
    pinned: Pinned,
    report: &mut VerifyReport,
    on_epoch: &mut impl FnMut(u64, Result<&EpochInfo, &StoreError>),
) -> Result<Option<StoreError>, StoreError> {
    let Pinned { mut log, pages, index: first } = pinned;
    let mut map = FrameMap::default();
    for index in log.base_of(first)..first {
        apply(&mut log, index, &mut map)?;
    }
    let (mut check, mut first_damage) = (PageCheck::default(), None);
    report.read_bytes = log.bytes() + PAGE_SIZE;
    for index in first..log.groups.len() {
        let info = log.groups[index].info;
        apply(&mut log, index, &mut map)?;
        let (read, damage) = check.epoch(&pages, &mut log, index, &map, index == first)?;
        report.read_bytes += read * PAGE_SIZE;
        match damage {
            None => {
                report.epochs += 1;
                report.latest = Some(info.epoch);
                report.frames = report.frames.saturating_add(info.frames);
                on_epoch(info.epoch, Ok(&info));
            }
            Some(damage) => {
                on_epoch(info.epoch, Err(&damage));
                first_damage.get_or_insert(damage);
            }
        }
    }
    drop(check);
    Ok(first_damage.and_then(Arc::into_inner))
}

/// Reads the frames of epochs that follow one another, each frame once.
#[derive(Default)]
pub(super) struct PageCheck {
    damaged: Damaged,
}

impl PageCheck {
    /// Reads what group number `index` brought, or `all` of its frames, which `map` has. How many
    /// that are, and the first of all frames of the epoch that are damaged.
    pub(super) fn epoch(
        &mut self,
        pages: &PageReader,
        log: &mut LogFile,
        index: usize,
        map: &FrameMap,
        all: bool,
    ) -> Result<(u64, Option<Arc<StoreError>>), StoreError> {
        let mut new: Vec<(Gfn, Cell)> = Vec::new();
        if all {
            new.extend(map.all());
        } else {
            let mut group = log.group(index)?;
            while let Some(record) = group.next()? {
                let Record::Frames(runs, _) = record else { continue };
                let frames = runs.iter().flat_map(|run| run.frames.frames());
                new.extend(frames.filter_map(|gfn| Some((gfn, map.get(gfn)?))));
            }
        }
        // What this epoch has in another place, or does not have, is no longer damaged.
        let damaged = self.damaged.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        damaged.retain(|gfn, damage| map.get(*gfn).is_some_and(|cell| is_of(damage, cell)));
        fetch(pages, log.groups[index].info.epoch, &mut new, &self.damaged)?;
        let damaged = self.damaged.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        let first = damaged.first_key_value().map(|(_, damage)| damage.clone());
        Ok((new.len() as u64, first))
    }
}

/// Whether a damage is of the slot that a frame is in.
fn is_of(damage: &StoreError, cell: Cell) -> bool {
    matches!(damage, StoreError::Damaged { offset, .. } if *offset == u64::from(cell.slot) * PAGE_SIZE)
}
