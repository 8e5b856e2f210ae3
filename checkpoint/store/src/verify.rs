//! Reads all of a store to check whether it could be restored.

use std::collections::BTreeMap;
use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use parking_lot::Mutex;
use serde::Serialize;

use crate::damage::Damage;
use crate::epoch_info::EpochInfo;
use crate::epoch_reader::Record;
use crate::error::StoreError;
use crate::frame_map::{FrameLocation, FrameMap};
use crate::log::LogFile;
use crate::page_file::PageReader;
use crate::pin::Pinned;
use crate::read::{Sink, fetch};
use crate::retention::apply;
use crate::store::Store;

/// Content of a sound store.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct VerifyReport {
    /// Number of retained epochs, all of which were read and found sound.
    #[serde(rename = "retained")]
    pub epochs: u64,
    /// Number of the latest of them.
    pub latest: Option<u64>,
    /// Number of frames that they brought, including frames of zeros.
    pub frames: u64,
    /// Number of bytes read.
    pub read_bytes: u64,
    /// Files and log records that were never finished. They are not damage, and the next writer
    /// removes them.
    pub unfinished: Vec<String>,
    /// Files that do not belong to a store, and are left alone.
    pub foreign: Vec<String>,
}

impl VerifyReport {
    /// Describes how many checkpoints are sound (all of them are), and which is the latest.
    pub fn verdict(&self) -> String {
        verdict(self.epochs, self.epochs, self.latest)
    }
}

pub(super) fn verdict(sound: u64, total: u64, latest: Option<u64>) -> String {
    let plural = if total == 1 { "checkpoint is" } else { "checkpoints are" };
    let latest = latest.map(|epoch| format!("; the latest sound one is {epoch}"));
    format!("{sound} of {total} {plural} sound{}", latest.unwrap_or_default())
}

/// Damaged frames that are adjacent, in adjacent slots, and were found in the same epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DamagedRun {
    count: u64,
    /// Slot of the first.
    slot: u32,
    epoch: u64,
}

impl DamagedRun {
    /// Returns whether a frame that is `distance` frames after the first, in this slot, is the next
    /// of the run or a part of it.
    fn reaches(&self, distance: u64, slot: u32, epoch: u64) -> bool {
        distance <= self.count
            && u64::from(self.slot) + distance == u64::from(slot)
            && (self.epoch == epoch || distance < self.count)
    }
}

/// Damaged frames, as runs: a failing disk may have millions of them.
#[derive(Default, Debug)]
struct DamagedRuns(BTreeMap<u64, DamagedRun>);

impl DamagedRuns {
    /// Adds a frame, unless it is there already.
    fn add(&mut self, gfn: u64, slot: u32, epoch: u64) {
        let next = self.0.get(&(gfn + 1)).copied();
        let next =
            next.filter(|next| slot.checked_add(1) == Some(next.slot) && next.epoch == epoch);
        if let Some((start, run)) = self.0.range_mut(..=gfn).next_back() {
            let distance = gfn - start;
            if run.reaches(distance, slot, epoch) {
                if distance == run.count {
                    run.count += 1 + next.map_or(0, |next| next.count);
                    if next.is_some() {
                        self.0.remove(&(gfn + 1));
                    }
                }
                return;
            }
        }
        if next.is_some() {
            self.0.remove(&(gfn + 1));
        }
        let count = 1 + next.map_or(0, |next| next.count);
        self.0.insert(gfn, DamagedRun { count, slot, epoch });
    }

    /// Keeps the frames that are still in the same slots.
    fn retain_in(&mut self, map: &FrameMap) {
        for (start, run) in std::mem::take(&mut self.0) {
            for (gfn, slot) in (start..start + run.count).zip(run.slot..) {
                if map.get(Gfn(gfn)).is_some_and(|location| location.slot == slot) {
                    self.add(gfn, slot, run.epoch);
                }
            }
        }
    }
}

/// A sink that notes the damaged frames among those of `epoch` that are read.
struct DamageSink<'c> {
    runs: Mutex<&'c mut DamagedRuns>,
    epoch: u64,
}

impl Sink for DamageSink<'_> {
    type Error = StoreError;

    fn frames(&self, _: FrameRun, _: &[u8]) -> Result<(), StoreError> {
        Ok(())
    }

    fn damaged(&self, gfn: Gfn, damage: StoreError) -> Result<(), StoreError> {
        let StoreError::Damaged { offset, .. } = damage else { return Err(damage) };
        let slot = (offset / PAGE_SIZE) as u32;
        let mut runs = self.runs.lock();
        runs.add(gfn.0, slot, self.epoch);
        Ok(())
    }
}

impl Store {
    /// Reads and checks everything in the retained epochs. Calls `on_epoch` for each epoch,
    /// ascending, sound or not; an epoch with any damaged frame is not sound. Continues after
    /// damage.
    ///
    /// # Errors
    ///
    /// The first damage found; damage of the log comes before all other damage.
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
        // Damage of the log comes first: epochs after it may have reused slots of those before it.
        let damage = listing.damaged.into_iter().next().or(first_damage);
        damage.map_or(Ok(report), Err)
    }
}

/// Returns the first damage of an epoch, if there is any.
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
    for index in first..log.epochs.len() {
        let info = log.epochs[index].info;
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

/// Reads the frames of consecutive epochs, each frame once.
#[derive(Default)]
pub(super) struct PageCheck {
    damaged: DamagedRuns,
    /// First damaged frame of the epoch that was read last, with its slot and damage.
    first: Option<(u64, u32, Arc<StoreError>)>,
}

impl PageCheck {
    /// Reads the frames that epoch `index` brought, or `all` of its frames, which are in `map`.
    /// Returns the number of frames read, and the first damage among all frames of the epoch.
    pub(super) fn epoch(
        &mut self,
        pages: &PageReader,
        log: &mut LogFile,
        index: usize,
        map: &FrameMap,
        all: bool,
    ) -> Result<(u64, Option<Arc<StoreError>>), StoreError> {
        let mut new: Vec<(Gfn, FrameLocation)> = Vec::new();
        if all {
            new.extend(map.all());
        } else {
            let mut reader = log.epoch(index)?;
            while let Some(record) = reader.next()? {
                let Record::Frames(runs, _) = record else { continue };
                let frames = runs.iter().flat_map(|run| run.frames.frames());
                new.extend(frames.filter_map(|gfn| Some((gfn, map.get(gfn)?))));
            }
        }
        // A frame that this epoch has in another slot, or does not have, is no longer damaged.
        self.damaged.retain_in(map);
        let epoch = log.epochs[index].info.epoch;
        let damaged = DamageSink { runs: Mutex::new(&mut self.damaged), epoch };
        fetch(pages, epoch, &mut new, &damaged)?;
        self.first = match self.damaged.0.first_key_value() {
            None => None,
            Some((gfn, run)) => match self.first.take() {
                Some(first) if (first.0, first.1) == (*gfn, run.slot) => Some(first),
                _ => {
                    let damage = damage_of(pages, map, Gfn(*gfn), *run)?;
                    Some((*gfn, run.slot, Arc::new(damage)))
                }
            },
        };
        let first = self.first.as_ref().map(|(.., damage)| damage.clone());
        Ok((new.len() as u64, first))
    }
}

/// Returns the damage of the first frame of a run, which is read once more for that.
fn damage_of(
    pages: &PageReader,
    map: &FrameMap,
    gfn: Gfn,
    run: DamagedRun,
) -> Result<StoreError, StoreError> {
    let mut page = vec![0; PAGE_SIZE as usize];
    let damage = match pages.read(run.slot, &mut page) {
        Err(e @ StoreError::Damaged { .. }) => return Ok(e),
        Err(e) => return Err(e),
        Ok(()) => {
            let (found, expected) =
                (crc32c::crc32c(&page), map.get(gfn).map(|location| location.crc));
            match expected.filter(|expected| *expected != found) {
                Some(expected) => Damage::Frame { gfn, epoch: run.epoch, found, expected },
                None => Damage::Changed,
            }
        }
    };
    let offset = u64::from(run.slot) * PAGE_SIZE;
    Ok(StoreError::Damaged { file: pages.path.clone(), offset, damage })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_damaged_frames_take_one_run() {
        let mut runs = DamagedRuns::default();
        // Added by several threads, in pieces, and partly twice.
        for start in [512, 0, 256, 512, 768, 256] {
            (start..start + 256).for_each(|gfn| runs.add(gfn, gfn as u32 + 9, 3));
        }
        (0..1024).step_by(2).for_each(|gfn| runs.add(gfn, gfn as u32 + 9, 4));
        let all = DamagedRun { count: 1024, slot: 9, epoch: 3 };
        assert_eq!(runs.0, BTreeMap::from([(0, all)]));
        // Another epoch, another slot, and a frame between.
        runs.add(1024, 1024 + 9, 4);
        runs.add(1025, 7, 4);
        runs.add(1027, 9, 4);
        runs.add(1026, 8, 4);
        let more = [(1024, 1, 1033, 4), (1025, 3, 7, 4)];
        let more = more.map(|(gfn, count, slot, epoch)| (gfn, DamagedRun { count, slot, epoch }));
        assert_eq!(runs.0, BTreeMap::from_iter([(0, all)].into_iter().chain(more)));
    }

    fn frames(runs: &DamagedRuns) -> BTreeMap<u64, (u32, u64)> {
        let frames = runs.0.iter().flat_map(|(start, run)| {
            let frames = (*start..start + run.count).zip(run.slot..);
            frames.map(|(gfn, slot)| (gfn, (slot, run.epoch)))
        });
        frames.collect()
    }

    #[test]
    fn filled_gap_keeps_the_frame_behind_it() {
        let mut runs = DamagedRuns::default();
        runs.add(12, 5, 1);
        runs.add(10, 20, 2);
        runs.add(11, 21, 2);
        assert_eq!(frames(&runs), BTreeMap::from([(10, (20, 2)), (11, (21, 2)), (12, (5, 1))]));
    }

    proptest::proptest! {
        /// A frame has one slot, as in the map of an epoch.
        #[test]
        fn runs_hold_what_a_plain_map_holds(
            slots in proptest::collection::vec(0u32..3, 24),
            adds in proptest::collection::vec((0u64..24, 0u64..2), 0..60),
        ) {
            let (mut runs, mut plain) = (DamagedRuns::default(), BTreeMap::new());
            for (gfn, epoch) in adds {
                let slot = gfn as u32 + 100 * slots[gfn as usize];
                runs.add(gfn, slot, epoch);
                plain.entry(gfn).or_insert((slot, epoch));
                assert_eq!(frames(&runs), plain);
            }
        }
    }
}
