//! Reading one epoch, record by record. The file is hostile: every length is bounded before it is
//! believed, every checksum compared before its bytes are handed out.

use std::io;
use std::path::PathBuf;

use dirty_tracker::{FrameRun, Layout, PAGE_SIZE};

use super::backend::StoreFile;
use super::records::{
    FileDigest, MAX_ZERO_PASSES, PARENT_LEN, ParentLink, TAG_FRAMES, TAG_LAYOUT, TAG_PARENT,
    TAG_STORE, TAG_TRAILER, TAG_ZEROS, TAIL_LEN, Trailer, decode_head, decode_layout,
    decode_parent, decode_runs, is_known, limit,
};
use super::{Damage, EpochInfo, Store, StoreError, file_name};
use crate::format::{
    HEADER_LEN, Header, MAGIC_STORE, MAX_SECTIONS, MAX_STATE, RECORD_HEAD_LEN, RecordHead,
};
use crate::{Section, SectionTag, VmId, section_tags};

/// A file with its name for errors.
#[derive(Debug)]
struct Source {
    file: Box<dyn StoreFile>,
    path: PathBuf,
    len: u64,
    epoch: u64,
}

impl Source {
    fn open(store: &Store, epoch: u64) -> Result<Self, StoreError> {
        let name = file_name(epoch);
        let file = store.backend().open(&name).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => store.no_epoch(Some(epoch)),
            _ => store.io("opening", &name, e),
        })?;
        let len = file.len().map_err(|e| store.io("reading", &name, e))?;
        Ok(Self { file, path: store.path(&name), len, epoch })
    }

    fn damaged(&self, offset: u64, damage: impl Into<Damage>) -> StoreError {
        StoreError::Damaged { file: self.path.clone(), offset, damage: damage.into() }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), StoreError> {
        let wanted = buf.len() as u64;
        if offset.saturating_add(wanted) > self.len {
            return Err(self.damaged(offset, Damage::EndsEarly { length: self.len, wanted }));
        }
        self.file.read_exact_at(buf, offset).map_err(|cause| StoreError::Io {
            what: "reading",
            path: self.path.clone(),
            cause,
        })
    }

    fn header(&self) -> Result<Header, StoreError> {
        let mut bytes = [0; HEADER_LEN];
        self.read(0, &mut bytes)?;
        let header = Header::read_from(&bytes[..], MAGIC_STORE).map_err(|e| self.damaged(0, e))?;
        if header.epoch() != self.epoch {
            let (found, expected) = (header.epoch(), self.epoch);
            let what = "the epoch in the header";
            return Err(self.damaged(0, Damage::Mismatch { what, found, expected }));
        }
        Ok(header)
    }
}

/// What an epoch says about itself, read from its front and its trailer: three small reads. Page
/// contents and state are not looked at.
pub(crate) fn peek(store: &Store, epoch: u64) -> Result<(EpochInfo, Peeked), StoreError> {
    let s = Source::open(store, epoch)?;
    let header = s.header()?;
    let at = HEADER_LEN as u64;
    let mut bytes = [0; RECORD_HEAD_LEN + PARENT_LEN];
    s.read(at, &mut bytes)?;
    let (head, payload) = bytes.split_at(RECORD_HEAD_LEN);
    let head = decode_head(head, 0).map_err(|e| s.damaged(at, e))?;
    if head.tag != TAG_PARENT || head.length as usize != PARENT_LEN {
        return Err(s.damaged(at, Damage::Misplaced { tag: head.tag }));
    }
    head.check(payload).map_err(|e| s.damaged(at, e))?;
    let parent = decode_parent(payload, epoch).map_err(|e| s.damaged(at, e))?;

    let at = s.len.saturating_sub(TAIL_LEN);
    let mut bytes = [0; TAIL_LEN as usize];
    s.read(at, &mut bytes)?;
    let (head, payload) = bytes.split_at(RECORD_HEAD_LEN);
    // The trailer knows how many records there are; its head must agree.
    let trailer = Trailer::decode(payload).map_err(|e| s.damaged(at, e))?;
    let head = decode_head(head, trailer.records.wrapping_sub(1)).map_err(|e| s.damaged(at, e))?;
    if head.tag != TAG_TRAILER {
        return Err(s.damaged(at, Damage::Misplaced { tag: head.tag }));
    }
    head.check(payload).map_err(|e| s.damaged(at, e))?;
    if trailer.length != s.len {
        let (what, found, expected) = ("the file's length", s.len, trailer.length);
        return Err(s.damaged(at, Damage::Mismatch { what, found, expected }));
    }
    let info = EpochInfo {
        epoch,
        vm_id: header.vm_id(),
        parent: parent.map(|p| p.epoch),
        full: parent.is_none(),
        frames: trailer.frames.saturating_add(trailer.zero_frames),
        zero_frames: trailer.zero_frames,
        bytes: s.len,
        created_unix_ms: trailer.created_unix_ms,
    };
    let link = ParentLink { epoch, digest: trailer.digest };
    Ok((info, Peeked { link, parent, layout_hash: header.layout_hash() }))
}

/// How an epoch is tied to others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peeked {
    /// How its children name it.
    pub(crate) link: ParentLink,
    pub(crate) parent: Option<ParentLink>,
    pub(crate) layout_hash: u32,
}

/// The place in a file up to which all records have been read and checked.
#[derive(Debug)]
struct Cursor {
    source: Source,
    at: u64,
    /// Counts as the trailer does.
    counted: Trailer,
    digest: FileDigest,
    /// Of the record read last.
    payload: Vec<u8>,
}

impl Cursor {
    fn new(source: Source, header: &Header) -> Self {
        let counted = Trailer {
            length: source.len,
            frames: 0,
            zero_frames: 0,
            created_unix_ms: 0,
            records: 0,
            digest: 0,
        };
        let digest = FileDigest::of(header);
        Self { source, at: HEADER_LEN as u64, counted, digest, payload: Vec::new() }
    }

    /// A damage in the record read last.
    fn here(&self, damage: impl Into<Damage>) -> StoreError {
        let record = (RECORD_HEAD_LEN + self.payload.len()) as u64;
        self.source.damaged(self.at.saturating_sub(record), damage)
    }

    /// Reads a record's head and payload, and checks both.
    fn read_record(&mut self) -> Result<RecordHead, StoreError> {
        let mut bytes = [0; RECORD_HEAD_LEN];
        self.source.read(self.at, &mut bytes)?;
        let head = decode_head(&bytes, self.counted.records)
            .and_then(|head| Ok(head.bounded(limit(head.tag))?))
            .map_err(|e| self.source.damaged(self.at, e))?;
        let payload_at = self.at + RECORD_HEAD_LEN as u64;
        let wanted = u64::from(head.length);
        if payload_at + wanted > self.source.len {
            let damage = Damage::EndsEarly { length: self.source.len, wanted };
            return Err(self.source.damaged(payload_at, damage));
        }
        self.payload.resize(head.length as usize, 0);
        self.source.read(payload_at, &mut self.payload)?;
        head.check(&self.payload).map_err(|e| self.source.damaged(payload_at, e))?;
        self.at = payload_at + wanted;
        self.counted.records = self.counted.records.wrapping_add(1);
        if head.tag != TAG_TRAILER {
            self.digest.add(&bytes);
            self.counted.digest = self.digest.value();
        }
        Ok(head)
    }

    fn expect(&mut self, tag: u16) -> Result<(), StoreError> {
        let head = self.read_record()?;
        if head.tag == tag { Ok(()) } else { Err(self.here(Damage::Misplaced { tag: head.tag })) }
    }
}

/// An epoch file being read from front to end.
#[derive(Debug)]
pub(crate) struct EpochReader {
    cursor: Cursor,
    vm_id: VmId,
    parent: Option<ParentLink>,
    layout: Layout,
    config: Vec<u8>,
    sections: u32,
    state_bytes: u64,
    runs: Vec<FrameRun>,
}

/// One record, checked.
#[derive(Debug)]
pub(crate) enum Record<'r> {
    /// Frames and, in the order of the runs, their contents. All lie in the layout.
    Frames(&'r [FrameRun], &'r [u8]),
    /// Frames of zeros, in the layout.
    Zeros(&'r [FrameRun]),
    /// A piece of state other than the configuration.
    Section(Section),
}

impl EpochReader {
    /// Opens an epoch and reads its header, parent link, layout and configuration.
    pub(crate) fn open(store: &Store, epoch: u64) -> Result<Self, StoreError> {
        let source = Source::open(store, epoch)?;
        let header = source.header()?;
        let mut c = Cursor::new(source, &header);
        c.expect(TAG_PARENT)?;
        let parent = decode_parent(&c.payload, epoch).map_err(|e| c.here(e))?;
        c.expect(TAG_LAYOUT)?;
        let layout = decode_layout(&c.payload, header.layout_hash()).map_err(|e| c.here(e))?;
        c.expect(section_tags::CONFIG.0)?;
        let config = std::mem::take(&mut c.payload);
        let state_bytes = config.len() as u64;
        let vm_id = header.vm_id();
        let runs = Vec::new();
        Ok(Self { cursor: c, vm_id, parent, layout, config, sections: 1, state_bytes, runs })
    }

    pub(crate) fn vm_id(&self) -> VmId {
        self.vm_id
    }

    pub(crate) fn parent(&self) -> Option<ParentLink> {
        self.parent
    }

    /// Bytes in the file.
    pub(crate) fn len(&self) -> u64 {
        self.cursor.source.len
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn config(&self) -> &[u8] {
        &self.config
    }

    /// The next record, or `None` behind the trailer, with which everything before has been
    /// compared by then.
    pub(crate) fn next(&mut self) -> Result<Option<Record<'_>>, StoreError> {
        let mut head = self.cursor.read_record()?;
        while head.tag >= TAG_STORE && !head.must_understand && !is_known(head.tag) {
            head = self.cursor.read_record()?;
        }
        match head.tag {
            TAG_FRAMES => self.frames().map(Some),
            TAG_ZEROS => self.zeros().map(Some),
            TAG_TRAILER => self.trailer().map(|()| None),
            tag if tag < TAG_STORE && tag > section_tags::CONFIG.0 => self.section(head).map(Some),
            tag => Err(self.cursor.here(Damage::Misplaced { tag })),
        }
    }

    /// Reads everything that is left, for its checksums; returns what children must link to.
    pub(crate) fn finish(&mut self) -> Result<ParentLink, StoreError> {
        while self.next()?.is_some() {}
        Ok(self.link())
    }

    /// What children of this epoch must link to: all of it, once all records are read.
    pub(crate) fn link(&self) -> ParentLink {
        ParentLink { epoch: self.cursor.source.epoch, digest: self.cursor.counted.digest }
    }

    fn frames(&mut self) -> Result<Record<'_>, StoreError> {
        let c = &mut self.cursor;
        let decoded = decode_runs(&c.payload, &self.layout, &mut self.runs);
        let (contents, frames) = decoded.map_err(|e| c.here(e))?;
        let (found, expected) = (contents.len() as u64, frames.saturating_mul(PAGE_SIZE));
        if found != expected {
            let what = "the length of page contents";
            return Err(c.here(Damage::Mismatch { what, found, expected }));
        }
        c.counted.frames += frames;
        Ok(Record::Frames(&self.runs, contents))
    }

    fn zeros(&mut self) -> Result<Record<'_>, StoreError> {
        let c = &mut self.cursor;
        let decoded = decode_runs(&c.payload, &self.layout, &mut self.runs);
        let (rest, frames) = decoded.map_err(|e| c.here(e))?;
        if !rest.is_empty() {
            let (what, found) = ("the bytes behind a table of zero frames", rest.len() as u64);
            return Err(c.here(Damage::Mismatch { what, found, expected: 0 }));
        }
        let found = c.counted.zero_frames.saturating_add(frames);
        let limit = self.layout.frames().saturating_mul(MAX_ZERO_PASSES);
        if found > limit {
            return Err(c.here(Damage::TooManyZeros { found, limit }));
        }
        c.counted.zero_frames = found;
        Ok(Record::Zeros(&self.runs))
    }

    fn section(&mut self, head: RecordHead) -> Result<Record<'_>, StoreError> {
        self.sections += 1;
        self.state_bytes += u64::from(head.length);
        if self.sections > MAX_SECTIONS || self.state_bytes > MAX_STATE {
            let (what, found) = ("the size of all state sections", self.state_bytes);
            return Err(self.cursor.here(Damage::Mismatch { what, found, expected: MAX_STATE }));
        }
        Ok(Record::Section(Section {
            tag: SectionTag(head.tag),
            instance: head.instance,
            must_understand: head.must_understand,
            bytes: std::mem::take(&mut self.cursor.payload),
        }))
    }

    fn trailer(&mut self) -> Result<(), StoreError> {
        let c = &self.cursor;
        let trailer = Trailer::decode(&c.payload).map_err(|e| c.here(e))?;
        if c.at != c.source.len {
            let (what, found) = ("the file's length", c.source.len);
            return Err(c.source.damaged(c.at, Damage::Mismatch { what, found, expected: c.at }));
        }
        trailer.check(&c.counted).map_err(|e| c.here(e))
    }
}
