//! Survey of a damaged store: which of its checkpoints are sound, and why the others are not.
//!
//! If the manifest is lost, the survey tries all pairs of a log and a page file, and takes the pair
//! whose checkpoints are sound. The log has the checksum of each frame, so a page file that does
//! not belong to the log fails.

use std::cmp::Ordering;
use std::io;

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_format::MAGIC_STORE;
use driftline_guest::VmId;
use serde::Serialize;

use crate::damage::Damage;
use crate::error::{StoreError, is_not_found};
use crate::frame_map::FrameMap;
use crate::log::{Hole, LogFile};
use crate::manifest::Manifest;
use crate::names::{MANIFEST, Named, log_name, pages_name, parse_name};
use crate::page_file::PageReader;
use crate::pin::Pinned;
use crate::records::Files;
use crate::retention::apply;
use crate::store::Store;
use crate::verify::{PageCheck, verdict};

/// Number of attempts to survey a store whose files are replaced meanwhile.
const ATTEMPTS: u32 = 10;

/// State of a retained checkpoint, as found by a survey.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct CheckpointState {
    /// Number of the checkpoint; `None` if that cannot be read.
    #[serde(rename = "checkpoint")]
    pub epoch: Option<u64>,
    /// Last number of a range of checkpoints that the damage may have cost; `None` for a single
    /// one.
    pub last: Option<u64>,
    /// Reason why the checkpoint is not sound; `None` if it is.
    pub damage: Option<String>,
}

/// Findings of a survey: what is left of a store.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Survey {
    /// Retained checkpoints, ascending.
    pub checkpoints: Vec<CheckpointState>,
    /// Number of sound ones among them.
    pub sound: u64,
    /// Number of the latest sound one.
    pub latest_sound: Option<u64>,
    /// Damage that costs no checkpoint.
    pub damage: Vec<String>,
}

impl Survey {
    /// Describes how many checkpoints are sound, and which is the latest of those.
    pub fn verdict(&self) -> String {
        verdict(self.sound, self.checkpoints.len() as u64, self.latest_sound)
    }

    /// Returns whether nothing is damaged.
    pub fn is_sound(&self) -> bool {
        self.damage.is_empty() && self.sound == self.checkpoints.len() as u64
    }

    fn push(&mut self, epoch: Option<u64>, damage: Option<String>) {
        if damage.is_none() {
            self.sound += 1;
            self.latest_sound = epoch;
        }
        self.checkpoints.push(CheckpointState { epoch, last: None, damage });
    }
}

/// A store's files, and what is left of them.
#[derive(Debug)]
pub(super) struct Salvage {
    pub(super) vm_id: VmId,
    pub(super) files: Files,
    pub(super) log: LogFile,
    /// `None` if the page file is missing.
    pub(super) pages: Option<PageReader>,
    /// Indices of the sound checkpoints in the log.
    pub(super) chosen: Vec<usize>,
    pub(super) survey: Survey,
    pub(super) manifest_is_sound: bool,
    pub(super) log_is_sound: bool,
    pub(super) pages_are_sound: bool,
}

impl Store {
    /// Reads all of a store that may be damaged, and reports which of its checkpoints are sound.
    /// Changes nothing.
    ///
    /// # Errors
    ///
    /// Fails if no file there is a store's, if it is unknown which guest's store it is, or if the
    /// system refuses an operation.
    pub fn survey(&self) -> Result<Survey, StoreError> {
        for _ in 1..ATTEMPTS {
            let before = self.manifest().ok().flatten();
            let _pinned = self.pin_for_survey()?;
            let salvage = self.salvage();
            let now = self.manifest().ok().flatten();
            // If the log was replaced meanwhile, the old one was still read to its end, and its
            // page file is unchanged.
            let pages = |manifest: Option<Manifest>| manifest.map(|m| m.files.pages);
            let found_all = salvage.as_ref().is_ok_and(|s| s.manifest_is_sound);
            if now == before || found_all && pages(now) == pages(before) {
                return salvage.map(|salvage| salvage.survey);
            }
        }
        self.salvage().map(|salvage| salvage.survey)
    }

    /// Pins all checkpoints, so that a writer does not free slots while they are read. Returns
    /// `None` if they cannot be pinned: the manifest or a header was damaged after the writer
    /// opened the store, or a sync of the writer does not end. The writer may then free slots, and
    /// a sound frame may be reported as damaged. [`repair`](Self::repair) locks the page files
    /// themselves, and needs no pin.
    fn pin_for_survey(&self) -> Result<Option<Pinned>, StoreError> {
        match self.pin_all() {
            Err(e) if is_timeout(&e) => {
                tracing::warn!("{e}: checkpoints that its writer drops meanwhile look damaged");
                Ok(None)
            }
            Err(e @ StoreError::Io { .. }) if !is_damaged_or_missing(&e) => Err(e),
            pinned => Ok(pinned.ok().flatten()),
        }
    }

    pub(super) fn salvage(&self) -> Result<Salvage, StoreError> {
        self.check_is_store()?;
        let (manifest, damage) = match self.manifest() {
            Ok(Some(manifest)) => (Some(manifest), None),
            Ok(None) => (None, Some(format!("{} has no manifest", self.location().display()))),
            Err(e) if is_damaged_or_missing(&e) => (None, Some(e.to_string())),
            Err(e) => return Err(e),
        };
        let mut best: Option<Salvage> = None;
        for (files, vm_id) in self.candidates(manifest)? {
            let found = self.assess(files, vm_id)?;
            let rank =
                |s: &Salvage| (s.survey.latest_sound, s.survey.sound, s.files.log, s.files.pages);
            if let Some(other) = best.as_ref().filter(|other| other.vm_id != vm_id)
                && other.survey.sound > 0
                && found.survey.sound > 0
            {
                let (dir, one, other) = (self.dir(), other.vm_id, vm_id);
                return Err(StoreError::Ambiguous { dir, one, other });
            }
            if best.as_ref().is_none_or(|best| rank(&found) > rank(best)) {
                best = Some(found);
            }
        }
        // There is a candidate, or an error was returned.
        let mut best = best.ok_or_else(|| StoreError::HeadersDamaged { dir: self.dir() })?;
        best.manifest_is_sound =
            manifest == Some(Manifest { vm_id: best.vm_id, files: best.files });
        if let Some(manifest) = manifest.filter(|_| !best.manifest_is_sound) {
            let Files { log, pages } = manifest.files;
            best.survey.damage.push(format!(
                "{} names log-{log} and pages-{pages}, which are not both there",
                self.path(MANIFEST).display()
            ));
        }
        best.survey.damage.extend(damage);
        Ok(best)
    }

    /// Returns pairs of log and page file that may be the store's, and the guest of each.
    fn candidates(&self, manifest: Option<Manifest>) -> Result<Vec<(Files, VmId)>, StoreError> {
        let (mut logs, mut pages) = (Vec::new(), Vec::new());
        for name in self.names()? {
            match parse_name(&name) {
                Named::Log(n) => logs.push(n),
                Named::Pages(n) => pages.push(n),
                _ => {}
            }
        }
        if let Some(Manifest { vm_id, files }) = manifest
            && logs.contains(&files.log)
            && pages.contains(&files.pages)
        {
            let of_log = LogFile::owner_of(self, files.log)?;
            let of_pages = PageReader::owner_of(self, files.pages)?;
            let named = [(of_log, log_name(files.log)), (of_pages, pages_name(files.pages))];
            for (found, name) in named {
                if let Some(found) = found.filter(|found| *found != vm_id) {
                    let file = self.path(&name);
                    return Err(StoreError::Mixed { file, found, expected: vm_id });
                }
            }
            return Ok(vec![(files, vm_id)]);
        }
        if logs.is_empty() {
            let log = manifest.map(|manifest| log_name(manifest.files.log));
            return Err(StoreError::NoLog { dir: self.dir(), log });
        }
        if pages.is_empty() {
            // Without page files: the checkpoints of the log are listed as damaged.
            pages.push(manifest.map_or(1, |manifest| manifest.files.pages));
        }
        // The header of a manifest whose record is damaged still names the guest.
        let of_manifest = self.header_owner(MANIFEST, MAGIC_STORE)?;
        let mut candidates = Vec::new();
        let mut owners: Vec<(String, VmId)> = Vec::new();
        for &log in &logs {
            let of_log = LogFile::owner_of(self, log)?;
            owners.extend(of_log.map(|vm_id| (log_name(log), vm_id)));
            for &pages in &pages {
                let of_pages = PageReader::owner_of(self, pages)?;
                owners.extend(of_pages.map(|vm_id| (pages_name(pages), vm_id)));
                let known = manifest.map(|m| m.vm_id).or(of_log).or(of_pages).or(of_manifest);
                let fits = |vm_id: &VmId| [of_log, of_pages].iter().flatten().all(|of| of == vm_id);
                candidates.extend(known.filter(fits).map(|vm_id| (Files { log, pages }, vm_id)));
            }
        }
        if candidates.is_empty() {
            return Err(self.without_owner(manifest, &owners));
        }
        Ok(candidates)
    }

    /// Returns the reason why no log and page file belong together: they are of several guests, or
    /// the guest is unknown.
    fn without_owner(&self, manifest: Option<Manifest>, owners: &[(String, VmId)]) -> StoreError {
        let dir = self.dir();
        let other_than = |vm_id: VmId| owners.iter().find(|(_, owner)| *owner != vm_id);
        if let Some(Manifest { vm_id: expected, .. }) = manifest
            && let Some((file, found)) = other_than(expected)
        {
            return StoreError::Mixed { file: self.path(file), found: *found, expected };
        }
        match owners.first().map(|(_, one)| (*one, other_than(*one))) {
            Some((one, Some((_, other)))) => StoreError::Ambiguous { dir, one, other: *other },
            _ => StoreError::HeadersDamaged { dir },
        }
    }

    /// Opens the page file, which may be damaged. Returns `None` if it is missing, and the damage
    /// of its header.
    fn open_damaged_pages(
        &self,
        files: Files,
        vm_id: VmId,
    ) -> Result<(Option<PageReader>, Option<StoreError>), StoreError> {
        match PageReader::open_damaged(self, files.pages) {
            Ok(pages) => match pages.check_header(files.pages, vm_id) {
                Err(e) if !is_damaged_or_missing(&e) => Err(e),
                checked => Ok((Some(pages), checked.err())),
            },
            Err(e) if is_damaged_or_missing(&e) => Ok((None, Some(e))),
            Err(e) => Err(e),
        }
    }

    /// Reads all of these files.
    fn assess(&self, files: Files, vm_id: VmId) -> Result<Salvage, StoreError> {
        let (mut log, header, holes) = LogFile::salvage(self, files.log, vm_id)?;
        let (pages, wrong) = self.open_damaged_pages(files, vm_id)?;
        let mut survey = Survey::default();
        survey.damage.extend(header.iter().chain(&wrong).map(ToString::to_string));
        let pages_are_sound = wrong.is_none();
        let mut checked = CheckedPages { store: self, files, pages, check: PageCheck::default() };
        let chosen = checked.assess_epochs(&mut log, &holes, &mut survey)?;
        let all_sound = survey.sound == survey.checkpoints.len() as u64;
        let log_is_sound = header.is_none() && holes.is_empty() && log.lost.is_empty() && all_sound;
        Ok(Salvage {
            vm_id,
            files,
            log,
            pages: checked.pages,
            chosen,
            survey,
            manifest_is_sound: false,
            log_is_sound,
            pages_are_sound,
        })
    }
}

/// The page file of a store that is surveyed, and what has been checked of it.
struct CheckedPages<'s> {
    store: &'s Store,
    files: Files,
    /// `None` if the page file is missing.
    pages: Option<PageReader>,
    check: PageCheck,
}

impl CheckedPages<'_> {
    /// Reads the frames of all retained epochs of `log`, and notes in `survey` which epochs are
    /// sound. Returns the indices of those.
    fn assess_epochs(
        &mut self,
        log: &mut LogFile,
        holes: &[Hole],
        survey: &mut Survey,
    ) -> Result<Vec<usize>, StoreError> {
        let (count, oldest) = (log.epochs.len(), log.oldest().unwrap_or(0));
        let first = log.epochs.partition_point(|g| g.info.epoch < oldest);
        let (mut chosen, mut map) = (Vec::new(), FrameMap::default());
        // Whether the places of this epoch's frames are known, and whether the frames of the epoch
        // before it were read.
        let (mut known, mut was_read) = (false, false);
        for index in 0..count {
            let is_behind = note_holes(survey, log, holes, index, oldest);
            let whole = log.epochs[index].front.is_whole();
            let info = log.epochs[index].info;
            known = whole || (known && !is_behind);
            if !known {
                was_read = false;
                if index >= first {
                    let parent = info.parent.unwrap_or(0);
                    let why =
                        format!("it builds on checkpoint {parent}, whose records are damaged");
                    survey.push(Some(info.epoch), Some(why));
                }
                continue;
            }
            apply(log, index, &mut map)?;
            if index < first {
                continue;
            }
            let of_pages = self.damage(log, index, &map, whole || !was_read)?;
            was_read = true;
            let of_state = log.lost.get(&log.epochs[index].place.sector).map(ToString::to_string);
            let damage = of_state.or(of_pages);
            if damage.is_none() {
                chosen.push(index);
            }
            survey.push(Some(info.epoch), damage);
        }
        note_holes(survey, log, holes, count, oldest);
        Ok(chosen)
    }

    /// Reads the frames that epoch `index` brought, or `all` of its frames, which are in `map`.
    /// Returns the first damage among all frames of the epoch.
    fn damage(
        &mut self,
        log: &mut LogFile,
        index: usize,
        map: &FrameMap,
        all: bool,
    ) -> Result<Option<String>, StoreError> {
        match &self.pages {
            Some(pages) => {
                let (_, damage) = self.check.epoch(pages, log, index, map, all)?;
                Ok(damage.map(|e| e.to_string()))
            }
            None => Ok(self.missing_page(map).map(|e| e.to_string())),
        }
    }

    /// Returns the damage of an epoch whose page file is missing; `None` if it has no stored frame.
    fn missing_page(&self, map: &FrameMap) -> Option<StoreError> {
        let (_, location) = map.all().next()?;
        let damage = Damage::EndsEarly { length: 0, wanted: PAGE_SIZE };
        let offset = u64::from(location.slot) * PAGE_SIZE;
        let file = self.store.path(&pages_name(self.files.pages));
        Some(StoreError::Damaged { file, offset, damage })
    }
}

/// Returns whether an error means that a file is damaged or missing, not that the system refuses to
/// read it.
fn is_damaged_or_missing(e: &StoreError) -> bool {
    e.is_damage() || is_not_found(e)
}

fn is_timeout(e: &StoreError) -> bool {
    matches!(e, StoreError::Io { cause, .. } if cause.kind() == io::ErrorKind::TimedOut)
}

/// Notes what is missing before epoch `at`. Returns whether anything is.
fn note_holes(survey: &mut Survey, log: &LogFile, holes: &[Hole], at: usize, oldest: u64) -> bool {
    let later = log.epochs.get(at);
    for hole in holes.iter().filter(|hole| hole.at == at) {
        let before = at.checked_sub(1).map_or(0, |before| log.epochs[before].info.epoch);
        let damage = hole.damage.to_string();
        let Some(later) = later else {
            survey.push(hole.epoch, Some(damage));
            continue;
        };
        // The range covers every epoch that may be in the hole, not only the one in which the hole
        // begins.
        let first = hole.epoch.unwrap_or(0).max(before + 1).max(oldest);
        let parent = later.info.parent.filter(|parent| *parent > before);
        let last = parent.unwrap_or(later.info.epoch.saturating_sub(1));
        match first.cmp(&last) {
            Ordering::Greater => survey.damage.push(damage),
            Ordering::Equal => survey.push(Some(first), Some(damage)),
            Ordering::Less => {
                let (epoch, last) = (Some(first), Some(last));
                survey.checkpoints.push(CheckpointState { epoch, last, damage: Some(damage) });
            }
        }
    }
    holes.iter().any(|hole| hole.at == at)
}
