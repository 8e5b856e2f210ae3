//! A log: which epochs it has, and how it ends. `epoch_reader` reads a single epoch.

use std::collections::BTreeMap;

use driftline_format::{HEADER_LEN, Header, MAGIC_LOG, is_zero};
use driftline_guest::VmId;

use crate::damage::Damage;
use crate::epoch_info::EpochInfo;
use crate::epoch_reader::EpochReader;
use crate::error::StoreError;
use crate::limits::SECTOR;
use crate::logged_epoch::{LoggedEpoch, follows};
use crate::names::log_name;
use crate::object::encode_drives;
use crate::records::{Digest, Front};
use crate::sectors::{LogPosition, SectorError, SectorKind, Sectors};
use crate::store::Store;

/// Number of sectors in which the record that ends an epoch may lie.
const DIGEST_SECTORS: u64 = 2;

/// How a log ends.
#[derive(Debug)]
pub(crate) enum Tail {
    /// With a complete epoch, or with the log's header.
    Clean,
    /// With an epoch that was never finished, from this byte on.
    Torn(u64),
    /// With damage in epochs that a retained epoch needs, and the number of the damaged epoch, if
    /// known.
    Damaged(StoreError, Option<u64>),
}

/// Damage followed by another epoch. It does not count if a later, whole epoch is sound, and no
/// older epoch is retained.
#[derive(Debug)]
struct DamageGap {
    damage: StoreError,
    /// Number of the damaged epoch, if that can be read.
    epoch: Option<u64>,
    /// The epochs before the damage.
    epochs: Vec<LoggedEpoch>,
    end: LogPosition,
    last_sectors: Option<Vec<u8>>,
}

/// A log, open for reading.
#[derive(Debug)]
pub(crate) struct LogFile {
    sectors: Sectors,
    pub(crate) vm_id: VmId,
    /// Epochs of the log after [skipped](Self::skipped) damage, ascending; includes epochs that are
    /// no longer retained.
    pub(crate) epochs: Vec<LoggedEpoch>,
    /// Position after the last epoch.
    pub(crate) end: LogPosition,
    /// The two sectors before that position, as read with the last epoch, if known: its digest is
    /// in them.
    last_sectors: Option<Vec<u8>>,
    pub(crate) tail: Tail,
    /// Damage before `epochs`, in epochs that no retained epoch needs.
    pub(crate) skipped: Option<StoreError>,
    /// For a salvage: damage of the guest's state, by the sector in which the epoch begins.
    pub(crate) lost: BTreeMap<u64, StoreError>,
}

fn check_owner(sectors: &Sectors, found: VmId, expected: VmId) -> Result<(), StoreError> {
    match found == expected {
        true => Ok(()),
        false => Err(sectors.damaged(0, Damage::OtherVm { found, expected })),
    }
}

/// Returns the checksum with which the digest of a log that is salvaged begins, and the damage of
/// the log's header.
fn salvage_header(
    sectors: &mut Sectors,
    generation: u64,
    vm_id: VmId,
) -> Result<(u32, Option<StoreError>), StoreError> {
    let header = Header::new(MAGIC_LOG, vm_id, generation, 0);
    let found = sectors.data(0, SectorKind::Other).map(|data| Header::read_from(data, MAGIC_LOG));
    // The digest in the first COMMIT began with the header as written.
    let seed = match &found {
        Ok(Ok(found)) => found.checksum(),
        _ => header.checksum(),
    };
    let damage = match found {
        Ok(Ok(found)) if found.checksum() == header.checksum() => None,
        Ok(Ok(found)) if found.vm_id() != vm_id => {
            let damage = Damage::OtherVm { found: found.vm_id(), expected: vm_id };
            Some(sectors.damaged(0, damage))
        }
        Ok(Ok(found)) => {
            let (what, found) = ("the generation in the header", found.epoch());
            let damage = Damage::Mismatch { what, found, expected: generation };
            Some(sectors.damaged(0, damage))
        }
        Ok(Err(e)) => Some(sectors.damaged(0, e)),
        Err(SectorError::Damaged(e)) if e.is_of_system() => return Err(e),
        Err(stop) => Some(stop.into()),
    };
    Ok((seed, damage))
}

/// A damaged part of a salvaged log, in place of one or several epochs.
#[derive(Debug)]
pub(crate) struct Hole {
    /// Index of the epoch after it.
    pub(crate) at: usize,
    pub(crate) damage: StoreError,
    /// Number of the epoch, if that can be read.
    pub(crate) epoch: Option<u64>,
}

impl LogFile {
    /// Opens the log of `generation` and reads through all of it.
    pub(crate) fn open(store: &Store, generation: u64) -> Result<Self, StoreError> {
        let (sectors, header) = Self::open_header(store, generation)?;
        let mut log = Self::unread(sectors, header.vm_id(), header.checksum());
        log.read_appended()?;
        Ok(log)
    }

    /// Returns a log of which no epoch has been read. `seed` is the checksum with which its digest
    /// begins.
    fn unread(sectors: Sectors, vm_id: VmId, seed: u32) -> Self {
        let end = LogPosition { sector: 1, sequence: 0, digest: Some(Digest(seed)) };
        Self {
            sectors,
            vm_id,
            epochs: Vec::new(),
            end,
            last_sectors: None,
            tail: Tail::Clean,
            skipped: None,
            lost: BTreeMap::new(),
        }
    }

    /// Opens the log of `generation`; nothing in it has been read. A `lenient` reader, for a
    /// salvage, skips damaged state and gives up parts that the disk cannot read.
    fn open_sectors(store: &Store, generation: u64, lenient: bool) -> Result<Sectors, StoreError> {
        let name = log_name(generation);
        let file = store.backend().open(&name).map_err(|e| store.not_read("opening", &name, e))?;
        let (path, pause_gate) = (store.path(&name), store.pause_gate().clone());
        let mut sectors = Sectors::new(file, path, pause_gate, store.unreadable(lenient))?;
        sectors.lenient = lenient;
        Ok(sectors)
    }

    /// Fails if the log of `generation` is missing, has a damaged header, or is not of guest
    /// `vm_id`.
    pub(crate) fn check_header(
        store: &Store,
        generation: u64,
        vm_id: VmId,
    ) -> Result<(), StoreError> {
        let (sectors, header) = Self::open_header(store, generation)?;
        check_owner(&sectors, header.vm_id(), vm_id)
    }

    /// Fails if the log is not of guest `vm_id`.
    pub(crate) fn check_owner(&self, vm_id: VmId) -> Result<(), StoreError> {
        check_owner(&self.sectors, self.vm_id, vm_id)
    }

    fn open_header(store: &Store, generation: u64) -> Result<(Sectors, Header), StoreError> {
        let mut sectors = Self::open_sectors(store, generation, false)?;
        let data = match sectors.data(0, SectorKind::Other) {
            Ok(data) => data,
            Err(SectorError::Damaged(e)) => return Err(e),
            Err(SectorError::Unwritten(..)) => {
                let (length, wanted) = (sectors.len(), SECTOR as u64);
                return Err(sectors.damaged(0, Damage::EndsEarly { length, wanted }));
            }
        };
        let header = Header::read_from(data, MAGIC_LOG);
        let padding = is_zero(&data[HEADER_LEN..]);
        let header = header.map_err(|e| sectors.damaged(0, e))?;
        let fields = [
            ("the generation in the header", header.epoch(), generation),
            ("the layout in the header of a log", header.layout_hash().into(), 0),
            ("what follows the header", (!padding).into(), 0),
        ];
        for (what, found, expected) in fields {
            if found != expected {
                return Err(sectors.damaged(0, Damage::Mismatch { what, found, expected }));
            }
        }
        Ok((sectors, header))
    }

    /// Returns the guest of the log of `generation`; `None` if the log is missing, or its header is
    /// damaged.
    pub(crate) fn owner_of(store: &Store, generation: u64) -> Result<Option<VmId>, StoreError> {
        store.header_owner(&log_name(generation), MAGIC_LOG)
    }

    /// Reads all that is left of the log of `generation` of guest `vm_id`. That includes epochs
    /// after damage, whose parents may be lost, and epochs whose state is damaged. Returns the log
    /// with the damage of its header, if any, and the places where epochs are missing.
    pub(crate) fn salvage(
        store: &Store,
        generation: u64,
        vm_id: VmId,
    ) -> Result<(Self, Option<StoreError>, Vec<Hole>), StoreError> {
        let mut sectors = Self::open_sectors(store, generation, true)?;
        let (seed, header_damage) = salvage_header(&mut sectors, generation, vm_id)?;
        let mut log = Self::unread(sectors, vm_id, seed);
        let holes = log.salvage_epochs()?;
        Ok((log, header_damage, holes))
    }

    /// Reads all epochs, also those after damage. Returns the places where epochs are missing.
    fn salvage_epochs(&mut self) -> Result<Vec<Hole>, StoreError> {
        let mut holes: Vec<Hole> = Vec::new();
        while self.end.sector < self.sectors.count() {
            let stop = match self.next_epoch(None) {
                Ok((epoch, end)) => {
                    self.epochs.push(epoch);
                    self.end = end;
                    continue;
                }
                Err(SectorError::Damaged(e)) if e.is_of_system() => return Err(e),
                Err(stop) => stop,
            };
            let (at, epoch) = (self.epochs.len(), self.front_epoch(self.end));
            match self.next_epoch_start(self.end.sector + 1)? {
                Some(later) => {
                    holes.push(Hole { at, damage: stop.into(), epoch });
                    self.end = later;
                }
                None => {
                    // Damage that a salvage skips stops every other reader.
                    let stop = match self.end.digest {
                        Some(_) => self.strictly(|log| log.next_epoch(None)).err().unwrap_or(stop),
                        None => stop,
                    };
                    let tail = match stop {
                        SectorError::Damaged(e) if e.is_of_system() => return Err(e),
                        stop => self.tail_of(stop)?,
                    };
                    match tail {
                        Tail::Damaged(damage, epoch) => holes.push(Hole { at, damage, epoch }),
                        tail => self.tail = tail,
                    }
                    break;
                }
            }
        }
        Ok(holes)
    }

    /// Runs `read` without skipping any damage.
    fn strictly<T>(&mut self, read: impl FnOnce(&mut Self) -> T) -> T {
        let lenient = std::mem::replace(&mut self.sectors.lenient, false);
        let read = read(self);
        self.sectors.lenient = lenient;
        read
    }

    /// Returns the oldest retained epoch; `None` if the log has no epoch.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.epochs.last().map(|last| last.oldest)
    }

    /// Returns the retained epochs, ascending.
    pub(crate) fn kept(&self) -> &[LoggedEpoch] {
        let Some(oldest) = self.oldest() else { return &[] };
        let from = self.epochs.partition_point(|g| g.info.epoch < oldest);
        &self.epochs[from..]
    }

    /// Returns the number of bytes up to the end of the last epoch.
    pub(crate) fn bytes(&self) -> u64 {
        self.end.offset()
    }

    /// Reads what was appended since the last read. The last epoch may have failed after it was
    /// read, and have been removed.
    pub(crate) fn read_appended(&mut self) -> Result<(), StoreError> {
        self.sectors.refresh()?;
        if !self.ends_as_before()
            && let Some(last) = self.epochs.pop()
        {
            (self.end, self.last_sectors) = (last.place, None);
        }
        let mut gap: Option<DamageGap> = None;
        self.tail = loop {
            if self.end.offset() == self.sectors.len() {
                break Tail::Clean;
            }
            let after = gap.as_ref().and_then(|gap| gap.epochs.last()).map(|g| g.info.epoch);
            match self.next_epoch(after) {
                Ok((epoch, end)) => {
                    self.epochs.push(epoch);
                    self.end = end;
                    self.last_sectors =
                        self.sectors.buffered(end.sector - DIGEST_SECTORS..end.sector);
                    if epoch.oldest >= self.epochs[0].info.epoch
                        && let Some(gap) = gap.take()
                    {
                        self.skipped = Some(gap.damage);
                    }
                }
                Err(SectorError::Damaged(e)) if e.is_of_system() => return Err(e),
                Err(stop) => match self.next_epoch_start(self.end.sector + 1)? {
                    None => break self.tail_of(stop)?,
                    Some(later) => self.skip_damage(stop, later, &mut gap),
                },
            }
        };
        if let Some(gap) = gap {
            (self.epochs, self.end, self.last_sectors) = (gap.epochs, gap.end, gap.last_sectors);
            self.tail = Tail::Damaged(gap.damage, gap.epoch);
        }
        Ok(())
    }

    /// Continues after the damage that `stop` found in the epoch at the end. Another epoch begins
    /// at `later`.
    fn skip_damage(&mut self, stop: SectorError, later: LogPosition, gap: &mut Option<DamageGap>) {
        let (epoch, end) = (self.front_epoch(self.end), std::mem::replace(&mut self.end, later));
        let (epochs, last_sectors) = (std::mem::take(&mut self.epochs), self.last_sectors.take());
        // Epochs that were found after an earlier gap are useless without the epochs of this gap.
        gap.get_or_insert_with(|| DamageGap {
            damage: stop.into(),
            epoch,
            epochs,
            end,
            last_sectors,
        });
    }

    /// Returns the number of the epoch that begins at `place`, if its first records are sound.
    fn front_epoch(&mut self, place: LogPosition) -> Option<u64> {
        EpochReader::open(&mut self.sectors, place).ok().map(|reader| reader.front.epoch)
    }

    /// Returns whether the last epoch is still there: an epoch in its place would have another
    /// digest at its end.
    fn ends_as_before(&mut self) -> bool {
        let Some(was) = &self.last_sectors else { return false };
        let last_sectors = self.end.sector - DIGEST_SECTORS..self.end.sector;
        if last_sectors.end > self.sectors.count() || self.sectors.raw(last_sectors.start).is_err()
        {
            return false;
        }
        self.sectors.buffered(last_sectors).as_ref() == Some(was)
    }

    /// Forgets all epochs after `epoch`.
    pub(crate) fn forget_after(&mut self, epoch: u64) {
        let known = self.epochs.partition_point(|g| g.info.epoch <= epoch);
        if let Some(first) = self.epochs.get(known) {
            (self.end, self.last_sectors) = (first.place, None);
            self.epochs.truncate(known);
        }
    }

    /// Returns how the log ends, if reading stops within the last epoch that begins in it.
    fn tail_of(&mut self, stop: SectorError) -> Result<Tail, StoreError> {
        let torn = Tail::Torn(self.end.offset());
        Ok(match stop {
            SectorError::Unwritten(..) => torn,
            SectorError::Damaged(StoreError::Damaged { offset, .. })
                if self.sectors.changes_when_reread(offset / SECTOR as u64) =>
            {
                torn
            }
            SectorError::Damaged(e) => Tail::Damaged(e, self.front_epoch(self.end)),
        })
    }

    /// Returns the place of the next epoch that begins in sector `from` or a later one. Everything
    /// before that was durable when the epoch was written.
    fn next_epoch_start(&mut self, from: u64) -> Result<Option<LogPosition>, StoreError> {
        for sector in from..self.sectors.count() {
            match self.sectors.data(sector, SectorKind::First) {
                Ok(data) => {
                    let sequence = sequence_of(data);
                    return Ok(Some(LogPosition { sector, sequence, digest: None }));
                }
                Err(SectorError::Damaged(e)) if e.is_of_system() => return Err(e),
                Err(_) => {}
            }
        }
        Ok(None)
    }

    /// Reads the epoch at the end. `after` is the last one that is known before a gap.
    fn next_epoch(
        &mut self,
        after: Option<u64>,
    ) -> Result<(LoggedEpoch, LogPosition), SectorError> {
        // A salvage knows nothing of what is before a hole.
        let lenient = self.sectors.lenient;
        let fresh = self.end.digest.is_none() && lenient;
        let (place, before) = (self.end, self.epochs.last().copied().filter(|_| !fresh));
        let vm_id = self.vm_id;
        let mut reader = EpochReader::open(&mut self.sectors, place)?;
        let Front { epoch, parent, created_unix_ms, line, .. } = reader.front;
        // `None` without drives: a list has at least one.
        let drives = encode_drives(&reader.drives).map_or(0, |list| crc32c::crc32c(&list));
        if fresh {
            let last = self.epochs.last().map_or(0, |g| g.info.epoch);
            if reader.front.epoch <= last {
                let (what, found) = ("a checkpoint's number", reader.front.epoch);
                let expected = last + 1;
                return Err(reader.cursor.damaged(Damage::Mismatch { what, found, expected }));
            }
        } else if let Err(damage) = follows(&reader.front, drives, before.as_ref(), after) {
            return Err(reader.cursor.damaged(damage));
        }
        let (commit, end) = reader.read_end()?;
        let oldest = before.map_or(commit.oldest, |before| before.oldest);
        let known =
            |n: u64| n == epoch || self.epochs.binary_search_by_key(&n, |g| g.info.epoch).is_ok();
        // After a gap, the oldest epoch may be one before it.
        let is_behind =
            place.digest.is_none() || self.epochs.first().is_some_and(|g| g.place.digest.is_none());
        let beyond =
            is_behind && self.epochs.first().map_or(epoch, |g| g.info.epoch) > commit.oldest;
        let lenient = lenient && commit.oldest <= epoch;
        if commit.oldest < oldest || !(known(commit.oldest) || beyond || lenient) {
            let (what, found) = ("the oldest retained checkpoint", commit.oldest);
            let at = place.offset();
            let e = self.sectors.damaged(at, Damage::Mismatch { what, found, expected: oldest });
            return Err(e.into());
        }
        let info = EpochInfo {
            epoch,
            vm_id,
            parent,
            full: parent.is_none(),
            frames: commit.frames.saturating_add(commit.zero_frames),
            zero_frames: commit.zero_frames,
            bytes: commit.bytes,
            drives: reader.drives.len() as u32,
            created_unix_ms,
            line,
        };
        let (front, sectors) = (reader.front, end.sector - place.sector);
        let lost = reader.cursor.lost.take();
        if let Some(e) = lost {
            self.lost.insert(place.sector, e);
        }
        Ok((LoggedEpoch { info, front, drives, oldest: commit.oldest, place, sectors }, end))
    }

    /// Returns a reader of the epoch at `index`.
    pub(crate) fn epoch(&mut self, index: usize) -> Result<EpochReader<'_>, StoreError> {
        let place = self.epochs[index].place;
        Ok(EpochReader::open(&mut self.sectors, place)?)
    }

    /// Returns an error for damage of epoch `index`, with the place where the epoch begins.
    pub(crate) fn damaged(&self, index: usize, damage: Damage) -> StoreError {
        self.sectors.damaged(self.epochs[index].place.offset(), damage)
    }

    /// Returns the index of the first epoch that is needed for the memory of epoch `index`.
    pub(crate) fn base_of(&self, index: usize) -> usize {
        let whole = |g: &LoggedEpoch| g.front.is_whole();
        self.epochs[..=index].iter().rposition(whole).unwrap_or(0)
    }

    /// Fails if the log has damage in epochs that a retained epoch needs.
    pub(crate) fn check_sound(&mut self, store: &Store) -> Result<(), StoreError> {
        match std::mem::replace(&mut self.tail, Tail::Clean) {
            Tail::Damaged(e, epoch) => {
                let (dir, cause) = (store.dir(), Box::new(e));
                Err(StoreError::NeedsRepair { dir, epoch, cause })
            }
            tail => {
                self.tail = tail;
                Ok(())
            }
        }
    }

    /// Takes the damage with which the log ends, if it does, for the caller to report.
    pub(crate) fn take_damage(&mut self) -> Option<StoreError> {
        match std::mem::replace(&mut self.tail, Tail::Clean) {
            Tail::Damaged(e, _) => Some(e),
            Tail::Clean | Tail::Torn(_) => None,
        }
    }
}

/// Returns the sequence number in the record's head at the beginning of a sector's data.
fn sequence_of(data: &[u8]) -> u32 {
    data[16..20].iter().rev().fold(0, |all, byte| all << 8 | u32::from(*byte))
}

#[cfg(all(test, feature = "testing"))]
mod tests;
