//! Reads one epoch of a log, record by record. The file is untrusted: each length is checked
//! against a limit before it is used, and each checksum is compared before the bytes are returned.

use driftline_dirty_tracker::{FrameRun, Layout, PAGE_SIZE};
use driftline_format::{RECORD_HEAD_LEN, RecordHead, is_zero};
use driftline_guest::{DriveHead, Section, SectionTag};

use crate::damage::Damage;
use crate::error::StoreError;
use crate::limits::SECTOR;
use crate::object::{Objects, decode_drives};
use crate::records::{
    Commit, Digest, Front, StoredRun, TAG_COMMIT, TAG_DRIVES, TAG_EPOCH, TAG_FRAMES, TAG_LAYOUT,
    TAG_STORE, TAG_ZEROS, check_sections, decode_frames, decode_head, decode_layout, decode_zeros,
    is_known, limit,
};
use crate::sectors::{DATA, LogPosition, SectorError, SectorKind, Sectors};

/// A position in a log, up to which all records have been read and checked.
pub(super) struct RecordCursor<'l> {
    sectors: &'l mut Sectors,
    /// Sector in which the epoch begins.
    first: u64,
    sector: u64,
    /// Offset in the sector's data.
    at: usize,
    sequence: u32,
    digest: Option<Digest>,
    /// Offset in the file of the record that was read last, in bytes.
    record_at: u64,
    payload: Vec<u8>,
    /// First damage of the guest's state, which a [lenient](Sectors::lenient) reader skips.
    pub(super) lost: Option<StoreError>,
}

impl RecordCursor<'_> {
    /// Returns the offset in the file of the next byte of data.
    fn offset(&self) -> u64 {
        // After the data of a sector comes its checksum, and then the next sector.
        let at = if self.at == DATA { SECTOR } else { self.at };
        self.sector * SECTOR as u64 + at as u64
    }

    /// Returns an error for damage of the record that was read last.
    pub(super) fn damaged(&self, damage: impl Into<Damage>) -> SectorError {
        self.sectors.damaged(self.record_at, damage).into()
    }

    fn read(&mut self, mut out: &mut [u8]) -> Result<(), SectorError> {
        while !out.is_empty() {
            if self.at == DATA {
                (self.sector, self.at) = (self.sector + 1, 0);
            }
            let kind =
                if self.sector == self.first { SectorKind::First } else { SectorKind::Other };
            let data = self.sectors.data(self.sector, kind)?;
            let count = out.len().min(DATA - self.at);
            let (now, later) = out.split_at_mut(count);
            now.copy_from_slice(&data[self.at..self.at + count]);
            self.at += count;
            out = later;
        }
        Ok(())
    }

    /// Reads a record's head and payload, and checks both.
    fn record(&mut self) -> Result<RecordHead, SectorError> {
        self.record_at = self.offset();
        let mut bytes = [0; RECORD_HEAD_LEN];
        self.read(&mut bytes)?;
        let head = decode_head(&bytes, self.sequence)
            .and_then(|head| Ok(head.bounded(limit(head.tag))?))
            .map_err(|e| self.damaged(e))?;
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(head.length as usize, 0);
        let (sector, at) = (self.sector, self.at + payload.len());
        let read = self.read(&mut payload);
        self.payload = payload;
        let checked = read.and_then(|()| head.check(&self.payload).map_err(|e| self.damaged(e)));
        match checked {
            Err(stop) if self.sectors.lenient && head.tag < TAG_STORE => match stop.into() {
                e @ StoreError::Damaged { .. } => {
                    self.lost.get_or_insert(e);
                    (self.sector, self.at) = (sector + (at / DATA) as u64, at % DATA);
                }
                e => return Err(e.into()),
            },
            checked => checked?,
        }
        self.sequence = self.sequence.wrapping_add(1);
        if head.tag != TAG_COMMIT {
            self.add(&bytes);
        } else {
            self.check_commit(&bytes)?;
        }
        Ok(head)
    }

    /// Checks a COMMIT. Its digest covers the records before it; the next digest covers the COMMIT
    /// itself.
    fn check_commit(&mut self, head: &[u8; RECORD_HEAD_LEN]) -> Result<(), SectorError> {
        let commit = Commit::decode(&self.payload).map_err(|e| self.damaged(e))?;
        let digest = *self.digest.get_or_insert(Digest(commit.digest));
        if commit.digest != digest.0 {
            let (what, found) = ("the digest", commit.digest.into());
            let expected = digest.0.into();
            return Err(self.damaged(Damage::Mismatch { what, found, expected }));
        }
        self.add(head);
        Ok(())
    }

    fn add(&mut self, head: &[u8; RECORD_HEAD_LEN]) {
        if let Some(digest) = &mut self.digest {
            digest.add(head);
        }
    }

    fn expect(&mut self, tag: u16) -> Result<(), SectorError> {
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
    /// The places of frames, of memory or of a drive, and the checksums of their contents in the
    /// order of the runs. The epoch has all of these frames.
    Frames(&'r [StoredRun], &'r [u32]),
    /// Frames of zeros, of memory or of a drive.
    Zeros(&'r [FrameRun]),
    /// A state section other than the configuration.
    Section(Section),
}

/// A reader of an epoch, from front to end.
pub(crate) struct EpochReader<'l> {
    pub(super) cursor: RecordCursor<'l>,
    pub(crate) front: Front,
    pub(crate) layout: Layout,
    pub(crate) config: Vec<u8>,
    /// Drives of which the epoch has blocks.
    pub(crate) drives: Vec<DriveHead>,
    /// End of the epoch, and the place of the next, once all is read.
    ended: Option<(Commit, LogPosition)>,
    first: LogPosition,
    /// Tag that the records have reached: frames, zeros, sections, the end.
    stage: u16,
    before: Option<FrameRun>,
    frames: u64,
    zero_frames: u64,
    sections: u32,
    state_bytes: u64,
    runs: Vec<StoredRun>,
    crcs: Vec<u32>,
    zeros: Vec<FrameRun>,
}

impl<'l> EpochReader<'l> {
    pub(super) fn open(sectors: &'l mut Sectors, place: LogPosition) -> Result<Self, SectorError> {
        let mut c = RecordCursor {
            sectors,
            first: place.sector,
            sector: place.sector,
            at: 0,
            sequence: place.sequence,
            digest: place.digest,
            record_at: 0,
            payload: Vec::new(),
            lost: None,
        };
        c.expect(TAG_EPOCH)?;
        let front = Front::decode(&c.payload).map_err(|e| c.damaged(e))?;
        c.expect(TAG_LAYOUT)?;
        let layout = decode_layout(&c.payload, front.layout).map_err(|e| c.damaged(e))?;
        c.expect(SectionTag::CONFIG.0)?;
        let config = std::mem::take(&mut c.payload);
        let drives = match front.drives {
            true => {
                c.expect(TAG_DRIVES)?;
                decode_drives(&c.payload).map_err(|e| c.damaged(e))?
            }
            false => Vec::new(),
        };
        Ok(Self {
            cursor: c,
            front,
            layout,
            state_bytes: config.len() as u64,
            config,
            drives,
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

    /// Returns the next record; `None` at the end, after the totals have been checked.
    pub(crate) fn next(&mut self) -> Result<Option<Record<'_>>, SectorError> {
        if self.ended.is_some() {
            return Ok(None);
        }
        let head = loop {
            let head = self.cursor.record()?;
            // A record of a later version, which its writer allows readers to skip, is skipped.
            if head.tag < TAG_STORE || is_known(head.tag) || head.must_understand {
                break head;
            }
        };
        match head.tag {
            TAG_FRAMES if self.stage == TAG_FRAMES => {
                let object = self.object(head)?;
                let Self { cursor: c, layout, drives, before, runs, crcs, .. } = self;
                let objects = Objects { layout, drives };
                let frames = decode_frames(&c.payload, object, objects, before, runs, crcs);
                self.frames += frames.map_err(|e| c.damaged(e))?;
                Ok(Some(Record::Frames(&self.runs, &self.crcs)))
            }
            TAG_ZEROS if self.stage <= TAG_ZEROS => {
                if self.stage < TAG_ZEROS {
                    (self.stage, self.before) = (TAG_ZEROS, None);
                }
                let object = self.object(head)?;
                let Self { cursor: c, layout, drives, before, zeros, .. } = self;
                let objects = Objects { layout, drives };
                let frames = decode_zeros(&c.payload, object, objects, before, zeros);
                self.zero_frames += frames.map_err(|e| c.damaged(e))?;
                Ok(Some(Record::Zeros(&self.zeros)))
            }
            TAG_COMMIT => {
                self.end()?;
                Ok(None)
            }
            tag if tag > SectionTag::CONFIG.0 && tag < TAG_STORE => {
                self.stage = TAG_COMMIT;
                self.section(head).map(Some)
            }
            tag => Err(self.cursor.damaged(Damage::Misplaced { tag })),
        }
    }

    /// Reads and checks what is left of the epoch. Returns its end, and the place of the next
    /// epoch.
    pub(crate) fn read_end(&mut self) -> Result<(Commit, LogPosition), SectorError> {
        loop {
            if let Some(ended) = self.ended {
                return Ok(ended);
            }
            self.next()?;
        }
    }

    /// Returns the object whose frames a record has.
    fn object(&self, head: RecordHead) -> Result<u16, SectorError> {
        let objects = Objects { layout: &self.layout, drives: &self.drives };
        match head.instance {
            object if usize::from(object) < objects.count() => Ok(object),
            object => Err(self.cursor.damaged(Damage::Object { object })),
        }
    }

    fn section(&mut self, head: RecordHead) -> Result<Record<'_>, SectorError> {
        self.sections += 1;
        self.state_bytes += u64::from(head.length);
        check_sections(self.sections, self.state_bytes).map_err(|e| self.cursor.damaged(e))?;
        Ok(Record::Section(Section {
            tag: SectionTag(head.tag),
            instance: head.instance,
            must_understand: head.must_understand,
            bytes: std::mem::take(&mut self.cursor.payload),
        }))
    }

    /// Compares the end with the totals of the records, field by field.
    fn end(&mut self) -> Result<(), SectorError> {
        let c = &mut self.cursor;
        let commit = Commit::decode(&c.payload).map_err(|e| c.damaged(e))?;
        let records = c.sequence.wrapping_sub(self.first.sequence);
        let sectors = c.sector + 1 - self.first.sector;
        let mut fields = vec![
            ("the checkpoint's number at its end", commit.epoch, self.front.epoch),
            ("the number of records", commit.records.into(), records.into()),
        ];
        if !self.front.rebased {
            let bytes = self.frames * PAGE_SIZE + sectors * SECTOR as u64;
            fields.extend([
                ("the number of pages", commit.frames, self.frames),
                ("the number of zero pages", commit.zero_frames, self.zero_frames),
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
            let what = "what follows a checkpoint";
            let damage = Damage::Mismatch { what, found: 1, expected: 0 };
            return Err(c.sectors.damaged(rest_at, damage).into());
        }
        let next = LogPosition { sector: c.sector + 1, sequence: c.sequence, digest: c.digest };
        self.ended = Some((commit, next));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
