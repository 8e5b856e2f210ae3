//! Reading a log: which epochs it has, and each of them record by record. The file is hostile: every length is bounded before
//! it is believed, every checksum compared before its bytes are handed out.

use std::io;

use dirty_tracker::{FrameRun, Layout, PAGE_SIZE};

use super::records::{
    Commit, Digest, Front, Placed, TAG_COMMIT, TAG_EPOCH, TAG_FRAMES, TAG_LAYOUT, TAG_STORE,
    TAG_ZEROS, decode_frames, decode_head, decode_layout, decode_zeros, is_known, limit,
};
use super::sectors::{DATA, SECTOR, Sectors, Stop};
use super::{Damage, EpochInfo, Store, StoreError, log_name};
use crate::format::{
    HEADER_LEN, Header, MAGIC_LOG, MAX_SECTIONS, MAX_STATE, RECORD_HEAD_LEN, RecordHead,
};
use crate::{Section, SectionTag, VmId, is_zero, section_tags};

/// Where an epoch begins in a log, and what comes before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) sector: u64,
    /// Of the next record.
    pub(crate) sequence: u32,
    pub(crate) digest: Digest,
}

/// An epoch in a log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) info: EpochInfo,
    pub(crate) front: Front,
    /// The oldest epoch that is kept since this one is there.
    pub(crate) oldest: u64,
    pub(crate) place: Place,
    /// Sectors that it takes.
    pub(crate) sectors: u64,
}

/// How a log ends.
#[derive(Debug)]
pub(crate) enum Tail {
    /// With an epoch, or its header.
    Clean,
    /// With an epoch that was never finished, from this byte on.
    Torn(u64),
    /// With damage: what comes behind is not known.
    Damaged(StoreError),
}

/// A log, open for reading.
#[derive(Debug)]
pub(crate) struct LogFile {
    sectors: Sectors,
    pub(crate) vm_id: VmId,
    /// Ascending, all that it has: also those that are not kept any more.
    pub(crate) groups: Vec<Group>,
    /// Behind the last of them.
    pub(crate) end: Place,
    pub(crate) tail: Tail,
}

impl LogFile {
    /// Opens the log of `generation` and looks through all of it.
    pub(crate) fn open(store: &Store, generation: u64) -> Result<Self, StoreError> {
        let name = log_name(generation);
        let file = store.backend().open(&name).map_err(|e| store.io("opening", &name, e))?;
        let mut sectors = Sectors::new(file, store.path(&name))?;
        let data = match sectors.data(0) {
            Ok(data) => data,
            Err(Stop::Wrong(e)) => return Err(e),
            Err(Stop::Unwritten(..)) => {
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
        let end = Place { sector: 1, sequence: 0, digest: Digest(header.checksum()) };
        let vm_id = header.vm_id();
        let (groups, tail) = (Vec::new(), Tail::Clean);
        let mut log = Self { sectors, vm_id, groups, end, tail };
        log.go_on()?;
        Ok(log)
    }

    /// The oldest epoch that is kept; `None` if there is none at all.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.groups.last().map(|last| last.oldest)
    }

    /// The epochs that are kept, ascending.
    pub(crate) fn kept(&self) -> &[Group] {
        let Some(oldest) = self.oldest() else { return &[] };
        let from = self.groups.partition_point(|g| g.info.epoch < oldest);
        &self.groups[from..]
    }

    /// Bytes up to the end of the last epoch.
    pub(crate) fn bytes(&self) -> u64 {
        self.end.sector * SECTOR as u64
    }

    /// Looks through what was appended since.
    pub(crate) fn go_on(&mut self) -> Result<(), StoreError> {
        self.sectors.look_again()?;
        self.tail = loop {
            if self.end.sector * SECTOR as u64 == self.sectors.len() {
                break Tail::Clean;
            }
            match self.next_group() {
                Ok((group, end)) => {
                    self.groups.push(group);
                    self.end = end;
                }
                Err(Stop::Wrong(e @ StoreError::Io { .. })) => return Err(e),
                Err(stop) => break self.tail_of(stop)?,
            }
        };
        Ok(())
    }

    /// What it means that the log stops making sense within the group at its end.
    fn tail_of(&mut self, stop: Stop) -> Result<Tail, StoreError> {
        let begin = self.end.sector;
        let later = self.begins_later(begin + 1)?;
        Ok(match stop {
            stop @ Stop::Unwritten(..) if later => Tail::Damaged(stop.into()),
            Stop::Unwritten(..) => Tail::Torn(begin * SECTOR as u64),
            Stop::Wrong(StoreError::Damaged { offset, .. })
                if !later && self.sectors.has_settled(offset / SECTOR as u64) =>
            {
                Tail::Torn(begin * SECTOR as u64)
            }
            Stop::Wrong(e) => Tail::Damaged(e),
        })
    }

    /// Whether an epoch begins in sector `from` or a later one: what is before it was durable then.
    fn begins_later(&mut self, from: u64) -> Result<bool, StoreError> {
        for sector in from..self.sectors.count() {
            match self.sectors.data(sector) {
                Ok(data) => {
                    let tag = u16::from_le_bytes([data[0], data[1]]);
                    let crc = crc32c::crc32c(&data[..RECORD_HEAD_LEN - 4]).to_le_bytes();
                    if tag == TAG_EPOCH && crc == data[RECORD_HEAD_LEN - 4..RECORD_HEAD_LEN] {
                        return Ok(true);
                    }
                }
                Err(Stop::Wrong(e @ StoreError::Io { .. })) => return Err(e),
                Err(_) => {}
            }
        }
        Ok(false)
    }

    fn next_group(&mut self) -> Result<(Group, Place), Stop> {
        let (place, before) = (self.end, self.groups.last().copied());
        let vm_id = self.vm_id;
        let mut reader = GroupReader::open(&mut self.sectors, place)?;
        let Front { epoch, parent, created_unix_ms, .. } = reader.front;
        if let Err(damage) = follows(&reader.front, before.as_ref()) {
            return Err(reader.cursor.damaged(damage));
        }
        while reader.next()?.is_some() {}
        let Some((commit, end)) = reader.ended else {
            return Err(reader.cursor.damaged(Damage::Misplaced { tag: TAG_COMMIT }));
        };
        let oldest = before.map_or(commit.oldest, |before| before.oldest);
        let known =
            |n: u64| n == epoch || self.groups.binary_search_by_key(&n, |g| g.info.epoch).is_ok();
        if commit.oldest < oldest || !known(commit.oldest) {
            let (what, found) = ("the oldest epoch that is kept", commit.oldest);
            let at = reader_offset(place);
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
            created_unix_ms,
        };
        let (front, sectors) = (reader.front, end.sector - place.sector);
        Ok((Group { info, front, oldest: commit.oldest, place, sectors }, end))
    }

    /// Group number `index`, to be read.
    pub(crate) fn group(&mut self, index: usize) -> Result<GroupReader<'_>, StoreError> {
        let place = self.groups[index].place;
        Ok(GroupReader::open(&mut self.sectors, place)?)
    }

    /// Where group number `index` begins, for messages.
    pub(crate) fn damaged(&self, index: usize, damage: Damage) -> StoreError {
        self.sectors.damaged(reader_offset(self.groups[index].place), damage)
    }

    /// The first of the groups that memory at group number `index` is put together from.
    pub(crate) fn base_of(&self, index: usize) -> usize {
        let whole = |g: &Group| g.front.is_whole();
        self.groups[..=index].iter().rposition(whole).unwrap_or(0)
    }

    /// The damage with which the log ends, if it does, to be said.
    pub(crate) fn take_damage(&mut self) -> Option<StoreError> {
        match std::mem::replace(&mut self.tail, Tail::Clean) {
            Tail::Damaged(e) => Some(e),
            Tail::Clean | Tail::Torn(_) => None,
        }
    }
}

fn reader_offset(place: Place) -> u64 {
    place.sector * SECTOR as u64
}

/// Refuses an epoch that cannot stand behind `before`.
fn follows(front: &Front, before: Option<&Group>) -> Result<(), Damage> {
    let Some(before) = before else {
        // Nothing is known of what it builds on.
        let Some(parent) = front.parent.filter(|_| !front.is_whole()) else { return Ok(()) };
        let what = "the parent of the first epoch in a log";
        return Err(Damage::Mismatch { what, found: parent, expected: 0 });
    };
    let last = before.info.epoch;
    if front.epoch <= last {
        let (what, found) = ("an epoch's number", front.epoch);
        return Err(Damage::Mismatch { what, found, expected: last.saturating_add(1) });
    }
    if front.rebased {
        return Err(Damage::Mismatch { what: "an epoch's flags", found: 1, expected: 0 });
    }
    let Some(parent) = front.parent else { return Ok(()) };
    let fields = [
        ("the parent's number", parent, last),
        ("the hash of the memory layout", front.layout.into(), before.front.layout.into()),
    ];
    match fields.into_iter().find(|(_, found, expected)| found != expected) {
        Some((what, found, expected)) => Err(Damage::Mismatch { what, found, expected }),
        None => Ok(()),
    }
}

/// The place in a log up to which all records have been read and checked.
struct Cursor<'l> {
    sectors: &'l mut Sectors,
    sector: u64,
    /// In the sector's data.
    at: usize,
    sequence: u32,
    digest: Digest,
    /// The byte of the file at which the record read last begins.
    record_at: u64,
    payload: Vec<u8>,
}

impl Cursor<'_> {
    fn offset(&self) -> u64 {
        self.sector * SECTOR as u64 + self.at as u64
    }

    /// A damage of the record read last.
    fn damaged(&self, damage: impl Into<Damage>) -> Stop {
        self.sectors.damaged(self.record_at, damage).into()
    }

    fn read(&mut self, mut out: &mut [u8]) -> Result<(), Stop> {
        while !out.is_empty() {
            if self.at == DATA {
                (self.sector, self.at) = (self.sector + 1, 0);
            }
            let data = self.sectors.data(self.sector)?;
            let count = out.len().min(DATA - self.at);
            let (now, later) = out.split_at_mut(count);
            now.copy_from_slice(&data[self.at..self.at + count]);
            self.at += count;
            out = later;
        }
        Ok(())
    }

    /// Reads a record's head and payload, and checks both.
    fn record(&mut self) -> Result<RecordHead, Stop> {
        self.record_at = self.offset();
        let mut bytes = [0; RECORD_HEAD_LEN];
        self.read(&mut bytes)?;
        let head = decode_head(&bytes, self.sequence)
            .and_then(|head| Ok(head.bounded(limit(head.tag))?))
            .map_err(|e| self.damaged(e))?;
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(head.length as usize, 0);
        let read = self.read(&mut payload);
        self.payload = payload;
        read?;
        head.check(&self.payload).map_err(|e| self.damaged(e))?;
        self.sequence = self.sequence.wrapping_add(1);
        if head.tag != TAG_COMMIT {
            self.digest.add(&bytes);
        } else {
            self.check_commit(&bytes)?;
        }
        Ok(head)
    }

    /// The digest is of what comes before its record; the record itself is in the next one.
    fn check_commit(&mut self, head: &[u8; RECORD_HEAD_LEN]) -> Result<(), Stop> {
        let commit = Commit::decode(&self.payload).map_err(|e| self.damaged(e))?;
        if commit.digest != self.digest.0 {
            let (what, found) = ("the digest", commit.digest.into());
            let expected = self.digest.0.into();
            return Err(self.damaged(Damage::Mismatch { what, found, expected }));
        }
        self.digest.add(head);
        Ok(())
    }

    fn expect(&mut self, tag: u16) -> Result<(), Stop> {
        let head = self.record()?;
        if head.tag == tag {
            Ok(())
        } else {
            Err(self.damaged(Damage::Misplaced { tag: head.tag }))
        }
    }
}

/// One record of an epoch, checked.
#[derive(Debug)]
pub(crate) enum Record<'r> {
    /// Where frames are, and their contents' checksums in the order of the runs. All lie in the layout.
    Frames(&'r [Placed], &'r [u32]),
    /// Frames of zeros, in the layout.
    Zeros(&'r [FrameRun]),
    /// A piece of state other than the configuration.
    Section(Section),
}

/// An epoch being read from front to end.
pub(crate) struct GroupReader<'l> {
    cursor: Cursor<'l>,
    pub(crate) front: Front,
    pub(crate) layout: Layout,
    pub(crate) config: Vec<u8>,
    /// How it ends, and where the next begins, once all is read.
    pub(crate) ended: Option<(Commit, Place)>,
    first: Place,
    /// The tag that records have reached: frames, zeros, sections, the end.
    stage: u16,
    before: Option<FrameRun>,
    frames: u64,
    zero_frames: u64,
    sections: u32,
    state_bytes: u64,
    runs: Vec<Placed>,
    crcs: Vec<u32>,
    zeros: Vec<FrameRun>,
}

impl<'l> GroupReader<'l> {
    fn open(sectors: &'l mut Sectors, place: Place) -> Result<Self, Stop> {
        let mut c = Cursor {
            sectors,
            sector: place.sector,
            at: 0,
            sequence: place.sequence,
            digest: place.digest,
            record_at: 0,
            payload: Vec::new(),
        };
        c.expect(TAG_EPOCH)?;
        let front = Front::decode(&c.payload).map_err(|e| c.damaged(e))?;
        c.expect(TAG_LAYOUT)?;
        let layout = decode_layout(&c.payload, front.layout).map_err(|e| c.damaged(e))?;
        c.expect(section_tags::CONFIG.0)?;
        let config = std::mem::take(&mut c.payload);
        Ok(Self {
            cursor: c,
            front,
            layout,
            state_bytes: config.len() as u64,
            config,
            ended: None,
            first: place,
            stage: TAG_FRAMES,
            before: None,
            frames: 0,
            zero_frames: 0,
            sections: 1,
            runs: Vec::new(),
            crcs: Vec::new(),
            zeros: Vec::new(),
        })
    }

    /// The next record; `None` at the end, once all of it has been found to add up.
    pub(crate) fn next(&mut self) -> Result<Option<Record<'_>>, Stop> {
        if self.ended.is_some() {
            return Ok(None);
        }
        let head = loop {
            let head = self.cursor.record()?;
            // One of a later version, whose writer says that it may be passed over.
            if head.tag < TAG_STORE || is_known(head.tag) || head.must_understand {
                break head;
            }
        };
        match head.tag {
            TAG_FRAMES if self.stage == TAG_FRAMES => {
                let Self { cursor: c, layout, before, runs, crcs, .. } = self;
                let frames = decode_frames(&c.payload, layout, before, runs, crcs);
                self.frames += frames.map_err(|e| c.damaged(e))?;
                Ok(Some(Record::Frames(&self.runs, &self.crcs)))
            }
            TAG_ZEROS if self.stage <= TAG_ZEROS => {
                if self.stage < TAG_ZEROS {
                    (self.stage, self.before) = (TAG_ZEROS, None);
                }
                let Self { cursor: c, layout, before, zeros, .. } = self;
                let frames = decode_zeros(&c.payload, layout, before, zeros);
                self.zero_frames += frames.map_err(|e| c.damaged(e))?;
                Ok(Some(Record::Zeros(&self.zeros)))
            }
            TAG_COMMIT => {
                self.end()?;
                Ok(None)
            }
            tag if tag > section_tags::CONFIG.0 && tag < TAG_STORE => {
                self.stage = TAG_COMMIT;
                self.section(head).map(Some)
            }
            tag => Err(self.cursor.damaged(Damage::Misplaced { tag })),
        }
    }

    fn section(&mut self, head: RecordHead) -> Result<Record<'_>, Stop> {
        self.sections += 1;
        self.state_bytes += u64::from(head.length);
        if self.sections > MAX_SECTIONS || self.state_bytes > MAX_STATE {
            let (what, found) = ("the size of all state sections", self.state_bytes);
            return Err(self.cursor.damaged(Damage::Mismatch { what, found, expected: MAX_STATE }));
        }
        Ok(Record::Section(Section {
            tag: SectionTag(head.tag),
            instance: head.instance,
            must_understand: head.must_understand,
            bytes: std::mem::take(&mut self.cursor.payload),
        }))
    }

    /// Compares the end with what was counted on the way to it, field by field.
    fn end(&mut self) -> Result<(), Stop> {
        let c = &mut self.cursor;
        let commit = Commit::decode(&c.payload).map_err(|e| c.damaged(e))?;
        let records = c.sequence.wrapping_sub(self.first.sequence);
        let sectors = c.sector + 1 - self.first.sector;
        let mut fields = vec![
            ("the epoch's number at its end", commit.epoch, self.front.epoch),
            ("the number of records", commit.records.into(), records.into()),
        ];
        if !self.front.rebased {
            let bytes = self.frames * PAGE_SIZE + sectors * SECTOR as u64;
            fields.extend([
                ("the number of frames", commit.frames, self.frames),
                ("the number of zero frames", commit.zero_frames, self.zero_frames),
                ("the number of bytes", commit.bytes, bytes),
            ]);
        }
        if let Some((what, found, expected)) = fields.into_iter().find(|(_, a, b)| a != b) {
            return Err(c.damaged(Damage::Mismatch { what, found, expected }));
        }
        let mut rest = vec![0; DATA - c.at];
        let rest_at = c.offset();
        c.read(&mut rest)?;
        if !is_zero(&rest) {
            let damage = Damage::Mismatch { what: "what follows an epoch", found: 1, expected: 0 };
            return Err(c.sectors.damaged(rest_at, damage).into());
        }
        let next = Place { sector: c.sector + 1, sequence: c.sequence, digest: c.digest };
        self.ended = Some((commit, next));
        Ok(())
    }
}

/// An error of a read that cannot be one of the system.
pub(crate) fn is_not_found(e: &StoreError) -> bool {
    matches!(e, StoreError::Io { cause, .. } if cause.kind() == io::ErrorKind::NotFound)
}
