//! Writing one epoch: under a temporary name, until all of it is durable.

use std::io::{self, BufWriter, Write};
use std::time::SystemTime;

use dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};

use super::backend::StoreFile;
use super::records::{
    FileDigest, MAX_RECORD_FRAMES, MAX_ZERO_RUNS, ParentLink, TAG_FRAMES, TAG_LAYOUT, TAG_PARENT,
    TAG_STORE, TAG_TRAILER, TAG_ZEROS, TAIL_LEN, Trailer, encode_layout, encode_parent,
    encode_runs, limit,
};
use super::{Damage, Store, StoreError, file_name, temporary_name};
use crate::format::{
    FormatError, HEADER_LEN, Header, MAGIC_STORE, MAX_SECTION, MAX_SECTIONS, MAX_STATE,
    RECORD_HEAD_LEN, RecordHead,
};
use crate::{Guest, Section, is_zero, section_tags};

const PAGE: usize = PAGE_SIZE as usize;
/// Small pieces are gathered up to this many bytes; larger ones go to the file as they are.
const BUFFER: usize = 256 << 10;

/// Appends to a file.
#[derive(Debug)]
struct Appender {
    file: Box<dyn StoreFile>,
    at: u64,
}

impl Write for Appender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_all_at(bytes, self.at)?;
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Frames with contents that will be one record: runs, and where their bytes are.
#[derive(Debug, Default)]
struct Pending {
    runs: Vec<FrameRun>,
    frames: u64,
    /// Byte ranges in the contents given.
    pieces: Vec<(usize, usize)>,
}

/// An epoch file being written. Dropping it before [`publish`](Self::publish) removes the file.
#[derive(Debug)]
pub(crate) struct EpochWriter<'s> {
    store: &'s Store,
    epoch: u64,
    out: BufWriter<Appender>,
    /// Counts as the trailer will; `length` runs with the bytes.
    counted: Trailer,
    digest: FileDigest,
    sections: u32,
    state_bytes: u64,
    pending: Pending,
    zeros: Vec<FrameRun>,
    table: Vec<u8>,
    published: bool,
}

impl<'s> EpochWriter<'s> {
    /// Creates the temporary file and writes all that is known before the guest is paused.
    pub(crate) fn create(
        store: &'s Store,
        epoch: u64,
        guest: &dyn Guest,
        parent: Option<ParentLink>,
    ) -> Result<Self, StoreError> {
        store.check_lock()?;
        let layout = guest.layout();
        let header = Header::new(MAGIC_STORE, guest.vm_id(), epoch, layout.hash());
        let mut header_bytes = Vec::with_capacity(HEADER_LEN);
        let name = temporary_name(epoch);
        let file = store.backend().create(&name).map_err(|e| store.io("creating", &name, e))?;
        let mut w = Self {
            store,
            epoch,
            out: BufWriter::with_capacity(BUFFER, Appender { file, at: 0 }),
            counted: Trailer {
                length: 0,
                frames: 0,
                zero_frames: 0,
                created_unix_ms: unix_ms(),
                records: 0,
                digest: 0,
            },
            digest: FileDigest::of(&header),
            sections: 0,
            state_bytes: 0,
            pending: Pending::default(),
            zeros: Vec::new(),
            table: Vec::new(),
            published: false,
        };
        header.write_to(&mut header_bytes).map_err(|e| w.io("writing", e))?;
        w.raw(&header_bytes)?;
        w.record(TAG_PARENT, 0, true, &[&encode_parent(parent)])?;
        w.record(TAG_LAYOUT, 0, true, &[&encode_layout(layout)])?;
        w.section(&Section::new(section_tags::CONFIG, 0, guest.config()))?;
        Ok(w)
    }

    /// Appends frames: `contents` holds theirs, in the order of `runs`. They win over what was
    /// appended for the same frames before. Frames of zeros become runs without contents, or, if
    /// nothing can have stood there before (`forget_zeros`), nothing at all.
    pub(crate) fn frames(
        &mut self,
        runs: impl Iterator<Item = FrameRun>,
        contents: &[u8],
        forget_zeros: bool,
    ) -> Result<(), StoreError> {
        let mut at = 0;
        for (run, gfn) in runs.flat_map(|run| run.frames().map(move |gfn| (run, gfn))) {
            let page = &contents[at..at + PAGE];
            if is_zero(page) {
                if !forget_zeros {
                    push_frame(&mut self.zeros, run, gfn);
                    self.counted.zero_frames += 1;
                }
            } else {
                push_frame(&mut self.pending.runs, run, gfn);
                match self.pending.pieces.last_mut() {
                    Some((_, end)) if *end == at => *end += PAGE,
                    _ => self.pending.pieces.push((at, at + PAGE)),
                }
                self.pending.frames += 1;
                if self.pending.frames == MAX_RECORD_FRAMES {
                    self.flush_frames(contents)?;
                }
            }
            if self.zeros.len() == MAX_ZERO_RUNS {
                self.flush_zeros()?;
            }
            at += PAGE;
        }
        self.flush_frames(contents)?;
        self.flush_zeros()
    }

    fn flush_frames(&mut self, contents: &[u8]) -> Result<(), StoreError> {
        if self.pending.frames == 0 {
            return Ok(());
        }
        let mut pending = std::mem::take(&mut self.pending);
        let mut table = std::mem::take(&mut self.table);
        encode_runs(&pending.runs, &mut table);
        let mut parts = Vec::with_capacity(pending.pieces.len() + 1);
        parts.push(&table[..]);
        parts.extend(pending.pieces.iter().map(|&(from, to)| &contents[from..to]));
        self.record(TAG_FRAMES, 0, true, &parts)?;
        self.counted.frames += pending.frames;
        pending.runs.clear();
        pending.pieces.clear();
        pending.frames = 0;
        (self.pending, self.table) = (pending, table);
        Ok(())
    }

    fn flush_zeros(&mut self) -> Result<(), StoreError> {
        if self.zeros.is_empty() {
            return Ok(());
        }
        let mut table = std::mem::take(&mut self.table);
        encode_runs(&self.zeros, &mut table);
        self.record(TAG_ZEROS, 0, true, &[&table])?;
        self.zeros.clear();
        self.table = table;
        Ok(())
    }

    /// Appends a state section.
    pub(crate) fn section(&mut self, section: &Section) -> Result<(), StoreError> {
        let tag = section.tag.0;
        // The configuration is the first section, and nowhere else.
        let config = self.sections == 0;
        if tag >= TAG_STORE || tag == 0 || (tag == section_tags::CONFIG.0) != config {
            return Err(self.damage(Damage::Misplaced { tag }));
        }
        let length = u32::try_from(section.bytes.len()).unwrap_or(u32::MAX);
        self.sections += 1;
        self.state_bytes += u64::from(length);
        if self.sections > MAX_SECTIONS || self.state_bytes > MAX_STATE {
            return Err(
                self.damage(FormatError::TooLong { tag, length, limit: MAX_SECTION }.into())
            );
        }
        self.record(tag, section.instance, section.must_understand, &[&section.bytes])
    }

    /// Writes the trailer, makes the file durable, gives it its name and makes that durable too.
    /// The epoch exists, and is durable, exactly if this returns `Ok`.
    pub(crate) fn publish(mut self) -> Result<Published, StoreError> {
        let trailer = Trailer {
            length: self.counted.length + TAIL_LEN,
            records: self.counted.records + 1,
            ..self.counted
        };
        self.record(TAG_TRAILER, 0, true, &[&trailer.to_bytes()])?;
        self.out.flush().map_err(|e| self.io("writing", e))?;
        self.out.get_ref().file.sync().map_err(|e| self.io("syncing", e))?;
        // Again: the directory may have been exchanged while the file was written.
        self.store.check_lock()?;
        let (from, to) = (temporary_name(self.epoch), file_name(self.epoch));
        let backend = self.store.backend();
        backend.rename(&from, &to).map_err(|e| self.store.io("renaming", &from, e))?;
        // From here on the temporary name is gone; what is left to undo is the new one.
        self.published = true;
        if let Err(e) = backend.sync_dir() {
            // Not said to be durable, so it must not look as if it were. Should it survive all the
            // same it does no harm: it is complete, and no later epoch builds on it.
            let _ = backend.remove(&to);
            return Err(self.store.io_dir("syncing", e));
        }
        let link = ParentLink { epoch: self.epoch, digest: trailer.digest };
        let frames = trailer.frames + trailer.zero_frames;
        Ok(Published { link, frames, bytes: trailer.length })
    }

    fn record(
        &mut self,
        tag: u16,
        instance: u16,
        must_understand: bool,
        parts: &[&[u8]],
    ) -> Result<(), StoreError> {
        // What no reader would take is not written.
        let length = parts.iter().map(|part| part.len()).sum::<usize>();
        let (length, limit) = (u32::try_from(length).unwrap_or(u32::MAX), limit(tag));
        if length > limit {
            return Err(self.damage(FormatError::TooLong { tag, length, limit }.into()));
        }
        let head = head(tag, instance, must_understand, self.counted.records, parts);
        self.digest.add(&head);
        self.counted.digest = self.digest.value();
        self.counted.records += 1;
        self.raw(&head)?;
        for part in parts {
            self.raw(part)?;
        }
        Ok(())
    }

    fn raw(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.out.write_all(bytes).map_err(|e| self.io("writing", e))?;
        self.counted.length += bytes.len() as u64;
        Ok(())
    }

    fn io(&self, what: &'static str, e: io::Error) -> StoreError {
        self.store.io(what, &temporary_name(self.epoch), e)
    }

    fn damage(&self, damage: Damage) -> StoreError {
        let file = self.store.path(&temporary_name(self.epoch));
        StoreError::Damaged { file, offset: self.counted.length, damage }
    }
}

impl Drop for EpochWriter<'_> {
    fn drop(&mut self) {
        // Where the lock is lost the name may be another process's.
        if !self.published && self.store.check_lock().is_ok() {
            // Leftovers that cannot be removed now are when the store is next opened.
            let _ = self.store.backend().remove(&temporary_name(self.epoch));
        }
    }
}

/// An epoch that is durable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Published {
    pub(crate) link: ParentLink,
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
}

fn head(
    tag: u16,
    instance: u16,
    must_understand: bool,
    sequence: u32,
    parts: &[&[u8]],
) -> [u8; RECORD_HEAD_LEN] {
    let payload_crc = parts.iter().fold(0, |crc, part| crc32c::crc32c_append(crc, part));
    // Every payload is bounded far below 4 GiB by the caller.
    let length = parts.iter().map(|p| p.len()).sum::<usize>() as u32;
    RecordHead { tag, must_understand, instance, length, payload_crc, sequence }.to_bytes()
}

/// Appends frame `gfn` of `run`. What is not of the same run is not joined: it may be another slot.
fn push_frame(runs: &mut Vec<FrameRun>, run: FrameRun, gfn: Gfn) {
    match runs.last_mut() {
        Some(last) if last.start >= run.start && last.end() == gfn => last.count += 1,
        _ => runs.push(FrameRun { start: gfn, count: 1 }),
    }
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |d| d.as_millis() as u64)
}
