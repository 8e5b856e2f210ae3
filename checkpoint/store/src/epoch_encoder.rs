//! Writes epochs to a log, sector by sector.

use std::io;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout};
use driftline_format::{HEADER_LEN, Header, MAGIC_LOG, RECORD_HEAD_LEN, RecordHead};
use driftline_guest::{DriveHead, Section, SectionTag, VmId};

use crate::address::place;
use crate::backend::StoreFile;
use crate::limits::SECTOR;
use crate::object::encode_drives;
use crate::records::{
    COMMIT_LEN, Commit, Digest, Front, MAX_RUNS, StoredRun, TAG_COMMIT, TAG_DRIVES, TAG_EPOCH,
    TAG_FRAMES, TAG_LAYOUT, TAG_ZEROS, encode_frames, encode_layout, encode_zeros,
};
use crate::sectors::{DATA, Framer, LogPosition};

/// Number of frames of a record; a reader accepts up to `MAX_RECORD_FRAMES`. Its buffers of 32 KiB
/// are used again for each record. Until the guest runs, a lazy restore of 65,571 frames takes 723
/// page faults (`/proc/PID/stat`) with records of this size, and 1,162 with records of 2^16 frames.
const RECORD_FRAMES: usize = 1 << 13;
/// Number of bytes after which complete sectors are written.
const FLUSH_BYTES: usize = 1 << 20;

/// A frame that is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StoredFrame {
    pub(crate) frame: u64,
    pub(crate) slot: u32,
    pub(crate) crc: u32,
}

/// Writes the header of a new log and returns where its first epoch begins.
pub(crate) fn begin_log(
    file: &dyn StoreFile,
    vm_id: VmId,
    generation: u64,
) -> io::Result<LogPosition> {
    let header = Header::new(MAGIC_LOG, vm_id, generation, 0);
    let mut bytes = Vec::with_capacity(HEADER_LEN);
    header.write_to(&mut bytes)?;
    let mut framer = Framer::new(0);
    framer.push(&bytes);
    framer.pad();
    framer.write_to(file)?;
    Ok(LogPosition { sector: 1, sequence: 0, digest: Some(Digest(header.checksum())) })
}

/// Appends epochs to a log.
pub(crate) struct EpochEncoder<'f> {
    file: &'f dyn StoreFile,
    framer: Framer,
    place: LogPosition,
    /// Number of records so far, and first sector, of the epoch that is being written.
    records: u32,
    first: u64,
    table: Vec<u8>,
}

impl<'f> EpochEncoder<'f> {
    pub(crate) fn new(file: &'f dyn StoreFile, place: LogPosition) -> Self {
        let framer = Framer::new(place.sector);
        Self { file, framer, place, records: 0, first: place.sector, table: Vec::new() }
    }

    /// Begins an epoch that has these drives.
    pub(crate) fn front(
        &mut self,
        front: Front,
        layout: &Layout,
        config: &[u8],
        drives: &[DriveHead],
    ) -> io::Result<()> {
        self.framer.begin();
        self.record(TAG_EPOCH, 0, true, &front.encode())?;
        self.record(TAG_LAYOUT, 0, true, &encode_layout(layout))?;
        self.record(SectionTag::CONFIG.0, 0, true, config)?;
        if !front.drives {
            return Ok(());
        }
        let list = encode_drives(drives);
        let list = list.ok_or_else(|| io::Error::other("a drive's name or size is invalid"))?;
        self.record(TAG_DRIVES, 0, true, &list)
    }

    /// Appends stored frames, and then frames of zeros; both ascend.
    pub(crate) fn entries(
        &mut self,
        layout: &Layout,
        stored: impl Iterator<Item = StoredFrame>,
        zeros: impl Iterator<Item = FrameRun>,
    ) -> io::Result<()> {
        self.stored(layout, stored)?;
        self.zeros(layout, zeros)
    }

    fn stored(
        &mut self,
        layout: &Layout,
        entries: impl Iterator<Item = StoredFrame>,
    ) -> io::Result<()> {
        let (mut runs, mut crcs): (Vec<StoredRun>, Vec<u32>) = (Vec::new(), Vec::new());
        let mut ends = Ends::new(layout);
        for StoredFrame { frame, slot, crc } in entries {
            let joined = !ends.passed(frame);
            let last = runs.last().map(|last| last.frames);
            if crcs.len() == RECORD_FRAMES || is_of_another(last, frame) {
                self.flush_frames(&mut runs, &mut crcs)?;
            }
            match runs.last_mut() {
                Some(last)
                    if joined
                        && last.frames.end().0 == frame
                        && last.slots().end() == u64::from(slot) =>
                {
                    last.frames.count += 1;
                }
                _ => {
                    if runs.len() == MAX_RUNS {
                        self.flush_frames(&mut runs, &mut crcs)?;
                    }
                    let frames = FrameRun { start: Gfn(frame), count: 1 };
                    runs.push(StoredRun { frames, slot });
                }
            }
            crcs.push(crc);
        }
        self.flush_frames(&mut runs, &mut crcs)
    }

    fn flush_frames(&mut self, runs: &mut Vec<StoredRun>, crcs: &mut Vec<u32>) -> io::Result<()> {
        if !runs.is_empty() {
            self.frames(runs, crcs)?;
        }
        runs.clear();
        crcs.clear();
        Ok(())
    }

    /// Appends a record of frames, all of one object.
    pub(crate) fn frames(&mut self, runs: &[StoredRun], crcs: &[u32]) -> io::Result<()> {
        let mut table = std::mem::take(&mut self.table);
        encode_frames(runs, crcs, &mut table);
        let object = object_of(runs.first().map(|run| run.frames));
        self.record(TAG_FRAMES, object, true, &table)?;
        self.table = table;
        Ok(())
    }

    fn zeros(&mut self, layout: &Layout, zeros: impl Iterator<Item = FrameRun>) -> io::Result<()> {
        let mut runs: Vec<FrameRun> = Vec::new();
        let mut ends = Ends::new(layout);
        for mut rest in zeros {
            while rest.count > 0 {
                let joined = !ends.passed(rest.start.0);
                let count = rest.count.min(ends.end - rest.start.0);
                let part = FrameRun { start: rest.start, count };
                rest = FrameRun { start: part.end(), count: rest.count - count };
                let before = runs.last().copied();
                match runs.last_mut() {
                    Some(last) if joined && last.end() == part.start => last.count += count,
                    _ => {
                        if runs.len() == MAX_RUNS || is_of_another(before, part.start.0) {
                            self.zero_runs(&runs)?;
                            runs.clear();
                        }
                        runs.push(part);
                    }
                }
            }
        }
        if runs.is_empty() { Ok(()) } else { self.zero_runs(&runs) }
    }

    /// Appends a record of frames of zeros, all of one object.
    pub(crate) fn zero_runs(&mut self, runs: &[FrameRun]) -> io::Result<()> {
        let mut table = std::mem::take(&mut self.table);
        encode_zeros(runs, &mut table);
        self.record(TAG_ZEROS, object_of(runs.first().copied()), true, &table)?;
        self.table = table;
        Ok(())
    }

    /// Appends a state section.
    pub(crate) fn section(&mut self, section: &Section) -> io::Result<()> {
        self.record(section.tag.0, section.instance, section.must_understand, &section.bytes)
    }

    fn record(
        &mut self,
        tag: u16,
        instance: u16,
        must_understand: bool,
        payload: &[u8],
    ) -> io::Result<()> {
        let head = self.head(tag, instance, must_understand, payload);
        self.framer.push(&head);
        self.framer.push(payload);
        if self.framer.ready() >= FLUSH_BYTES {
            self.framer.write_to(self.file)?;
        }
        Ok(())
    }

    fn head(
        &mut self,
        tag: u16,
        instance: u16,
        must_understand: bool,
        payload: &[u8],
    ) -> [u8; RECORD_HEAD_LEN] {
        let sequence = self.place.sequence;
        self.place.sequence = sequence.wrapping_add(1);
        self.records += 1;
        let payload_crc = crc32c::crc32c(payload);
        // The code that makes a payload keeps it far below 4 GiB.
        let length = payload.len() as u32;
        let head =
            RecordHead { tag, must_understand, instance, length, payload_crc, sequence }.to_bytes();
        if tag != TAG_COMMIT {
            self.add(&head);
        }
        head
    }

    fn add(&mut self, head: &[u8; RECORD_HEAD_LEN]) {
        if let Some(digest) = &mut self.place.digest {
            digest.add(head);
        }
    }

    /// Returns the number of bytes that the epoch would have in the log if it ended now.
    pub(crate) fn bytes_if_ended(&self) -> u64 {
        let data = self.framer.filled() + RECORD_HEAD_LEN + COMMIT_LEN;
        (self.framer.sector() - self.first + data.div_ceil(DATA) as u64) * SECTOR as u64
    }

    /// Ends the epoch and writes the rest of it. Returns where the next epoch begins. Fills in the
    /// number of records and the digest, which `commit` lacks.
    pub(crate) fn commit(&mut self, commit: Commit) -> io::Result<LogPosition> {
        let digest =
            self.place.digest.ok_or_else(|| io::Error::other("the log's digest is not known"))?;
        let (records, digest) = (self.records + 1, digest.0);
        let payload = Commit { records, digest, ..commit }.encode();
        let head = self.head(TAG_COMMIT, 0, true, &payload);
        self.add(&head);
        self.framer.push(&head);
        self.framer.push(&payload);
        self.framer.pad();
        self.framer.write_to(self.file)?;
        self.place.sector = self.framer.sector();
        (self.records, self.first) = (0, self.place.sector);
        Ok(self.place)
    }
}

fn object_of(run: Option<FrameRun>) -> u16 {
    run.map_or(0, |run| place(run.start).0)
}

/// Returns whether `frame` is of another object than the frames before it, if there are any.
fn is_of_another(last: Option<FrameRun>, frame: u64) -> bool {
    last.is_some_and(|last| place(last.start).0 != place(Gfn(frame)).0)
}

/// The ends of memory slots, which no run crosses.
struct Ends<'l> {
    layout: &'l Layout,
    end: u64,
}

impl<'l> Ends<'l> {
    fn new(layout: &'l Layout) -> Self {
        Self { layout, end: 0 }
    }

    /// Returns whether `frame` is in another slot than the frame before it, which is not above
    /// `frame`.
    fn passed(&mut self, frame: u64) -> bool {
        if frame < self.end {
            return false;
        }
        let slot = self.layout.slots().find(|slot| frame < slot.run().end().0);
        self.end = slot.map_or(u64::MAX, |slot| slot.run().end().0);
        true
    }
}
