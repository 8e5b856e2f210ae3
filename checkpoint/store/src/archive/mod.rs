//! Archives: one compressed epoch in one file, to be kept or sent elsewhere, and restored without a
//! store.
//!
//! The state comes before the memory, so a guest is built before the first frame is read. Memory,
//! and then drives, come in records of at most 2 MiB. Several threads pack and unpack these, so
//! neither direction ever has more than a few of them in memory.

mod pack;
mod threads;

use std::path::{Path, PathBuf};

use driftline_dirty_tracker::FrameRun;
use driftline_format::{Header, MAGIC_ARCHIVE};
use driftline_guest::{PAGE_BYTES, Section};
use parking_lot::Mutex;

use crate::archive::threads::side_by_side;
use crate::backend::StoreFile;
use crate::damage::Damage;
use crate::epoch_info::EpochInfo;
use crate::error::StoreError;
use crate::object::{Objects, decode_drives};
use crate::pin::Machine;
use crate::read::Sink;
use crate::record_file::contents::{Contents, MAX_CONTENTS, TAG_CONTENTS, decode_contents};
use crate::record_file::walk::{RecordPosition, RecordWalk, reading};
use crate::records::{Front, TAG_DRIVES, TAG_EPOCH};
use crate::regular_file::open_regular;
use crate::verify::VerifyReport;

/// An archive, open for reading: `store export --format driftline-zstd` writes them.
///
/// ```
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("archive");
/// std::fs::write(&path, "something else")?;
/// let e = driftline_store::Archive::open(&path).unwrap_err().to_string();
/// assert!(e.contains("is truncated: it ends at byte 14"), "{e}");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Archive {
    file: Box<dyn StoreFile>,
    path: PathBuf,
    info: EpochInfo,
    machine: Machine,
    /// State of that machine.
    sections: Vec<Section>,
    /// Position at which its memory begins.
    contents: RecordPosition,
}

impl Archive {
    /// Opens the file at `path` and reads through it from end to end, so a truncated file is
    /// refused here. Reads and checks the guest's state, but not its memory. Costs a read for each
    /// 2 MiB of memory, and as much memory as the state takes, at most 64 MiB.
    ///
    /// # Errors
    ///
    /// [`StoreError::Damaged`] if the file is truncated, its state is damaged, or it is not an
    /// archive; [`StoreError::Io`] if it is not a regular file, or cannot be read.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let io = |cause| StoreError::Io { what: "opening", path: path.to_owned(), cause };
        let file = open_regular(path).map_err(io)?;
        Self::with_file(Box::new(file), path)
    }

    /// Opens an archive like [`open`](Self::open), from something other than a file system's file.
    /// `path` is for messages.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn with_file(file: Box<dyn StoreFile>, path: &Path) -> Result<Self, StoreError> {
        let (header, mut walk) = RecordWalk::new(&*file, path)?.header(MAGIC_ARCHIVE)?;
        let (front, machine) = read_front(&mut walk, &header)?;
        let (sections, next) = walk.sections(&machine.config)?;
        let contents = next.at;
        let (mut head, mut end, mut payload) = (next.head, next.end, Vec::new());
        let end = loop {
            match end {
                Some(end) => break end,
                None if head.tag == TAG_CONTENTS => (head, end) = walk.head(&mut payload)?,
                None => return Err(walk.damaged(Damage::Misplaced { tag: head.tag })),
            }
        };
        if end.epoch != front.epoch {
            let (what, found) = ("the checkpoint's number at its end", end.epoch);
            return Err(walk.damaged(Damage::Mismatch { what, found, expected: front.epoch }));
        }
        let info = EpochInfo {
            epoch: front.epoch,
            vm_id: header.vm_id(),
            parent: front.parent,
            full: front.parent.is_none(),
            frames: end.frames,
            zero_frames: 0,
            drives: machine.drives.len() as u32,
            bytes: walk.next().at,
            created_unix_ms: front.created_unix_ms,
            line: front.line,
        };
        Ok(Self { path: path.to_owned(), info, machine, sections, contents, file })
    }

    /// Returns the description of the epoch: `frames` is the number of frames of its memory and
    /// drives that are not zeros, `bytes` is the file's length.
    pub fn info(&self) -> &EpochInfo {
        &self.info
    }

    /// Returns the configuration of the guest.
    pub fn config(&self) -> &[u8] {
        &self.machine.config
    }

    /// Returns the path of the archive.
    pub fn location(&self) -> &Path {
        &self.path
    }

    /// Reads and unpacks all of the archive, and checks everything that can be checked. An archive
    /// that this finds sound can be restored.
    ///
    /// # Errors
    ///
    /// The first damage found.
    pub fn verify(&self) -> Result<VerifyReport, StoreError> {
        self.read(&CheckSink, 0)?;
        let EpochInfo { frames, bytes, .. } = self.info;
        let latest = Some(self.info.epoch);
        Ok(VerifyReport { epochs: 1, latest, frames, read_bytes: bytes, ..VerifyReport::default() })
    }

    /// Returns what the epoch's machine is built from.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the state of the epoch's machine.
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// Unpacks all frames of object `from` and of those after it, on several threads, and passes
    /// them to `sink` after checking them. For earlier objects, only the records are checked. An
    /// error stops all threads; if several have one, the one that comes first in the file is
    /// returned.
    ///
    /// # Errors
    ///
    /// Damage of the archive, or the error of `sink`.
    pub fn read<S: Sink>(&self, sink: &S, from: u16) -> Result<(), S::Error> {
        let walk = RecordWalk::new(&*self.file, &self.path)?.from(self.contents);
        let state = Mutex::new(UnpackState {
            walk,
            archive: self,
            before: None,
            frames: 0,
            pieces: 0,
            over: false,
            failed: None,
        });
        side_by_side("restore", self.info.frames, || {
            let mut piece = ContentsPiece::default();
            while let Some(number) = next_piece(&state, &mut piece) {
                if piece.object < from {
                    continue;
                }
                if let Err(e) = piece.unpack(self, sink) {
                    state.lock().fail(number, e);
                }
            }
        });
        let state = state.into_inner();
        state.failed.map_or(Ok(()), |(_, e)| Err(e))
    }

    fn objects(&self) -> Objects<'_> {
        Objects { layout: &self.machine.layout, drives: &self.machine.drives }
    }

    fn damaged(&self, offset: u64, damage: Damage) -> StoreError {
        StoreError::Damaged { file: self.path.clone(), offset, damage }
    }
}

/// Reads the records before the state sections.
fn read_front(walk: &mut RecordWalk<'_>, header: &Header) -> Result<(Front, Machine), StoreError> {
    let front = Front::decode(&walk.expect(TAG_EPOCH)?).map_err(|e| walk.damaged(e))?;
    let fields = [
        ("the checkpoint's number in the header", header.epoch(), front.epoch),
        ("the layout in the header", header.layout_hash().into(), front.layout.into()),
        ("the flag that the checkpoint has all of memory", front.is_whole().into(), 1),
    ];
    if let Some((what, found, expected)) = fields.into_iter().find(|(_, a, b)| a != b) {
        return Err(walk.damaged(Damage::Mismatch { what, found, expected }));
    }
    let (layout, config) = walk.machine(front.layout)?;
    let drives = match front.drives {
        true => decode_drives(&walk.expect(TAG_DRIVES)?).map_err(|e| walk.damaged(e))?,
        false => Vec::new(),
    };
    Ok((front, Machine { layout, config, drives }))
}

/// State that the unpacking threads share: the thread that locks it reads the next record.
struct UnpackState<'a, E> {
    walk: RecordWalk<'a>,
    archive: &'a Archive,
    /// Last run of the last record.
    before: Option<FrameRun>,
    frames: u64,
    pieces: u64,
    over: bool,
    /// First error, and the number of its piece.
    failed: Option<(u64, E)>,
}

/// Reads the next record, and returns its number; `None` at the end, or after an error.
fn next_piece<E: From<StoreError>>(
    shared: &Mutex<UnpackState<'_, E>>,
    piece: &mut ContentsPiece,
) -> Option<u64> {
    let mut reading = shared.lock();
    if reading.over {
        return None;
    }
    let number = reading.pieces;
    match reading.next(piece) {
        Ok(true) => Some(number),
        Ok(false) => {
            reading.over = true;
            None
        }
        Err(e) => {
            reading.fail(number, e.into());
            None
        }
    }
}

impl<E> UnpackState<'_, E> {
    fn fail(&mut self, piece: u64, e: E) {
        self.over = true;
        if self.failed.as_ref().is_none_or(|(before, _)| piece < *before) {
            self.failed = Some((piece, e));
        }
    }

    /// Replaces `piece` with the next record. Returns `false` at the end, after the totals have
    /// been checked.
    fn next(&mut self, piece: &mut ContentsPiece) -> Result<bool, StoreError> {
        let walk = &mut self.walk;
        let (head, end) = walk.head(&mut piece.payload)?;
        piece.at = walk.record_at();
        if let Some(end) = end {
            let (what, found) = ("the number of pages", end.frames);
            return match found == self.frames {
                true => Ok(false),
                false => Err(walk.damaged(Damage::Mismatch { what, found, expected: self.frames })),
            };
        }
        if head.tag != TAG_CONTENTS {
            return Err(walk.damaged(Damage::Misplaced { tag: head.tag }));
        }
        walk.payload(&head, &mut piece.payload)?;
        piece.object = head.instance;
        let objects = self.archive.objects();
        let frames = piece.frames(objects, &mut self.before).map_err(|e| walk.damaged(e))?;
        // No overflow: the frames ascend.
        self.frames += frames as u64;
        self.pieces += 1;
        Ok(true)
    }
}

/// A record of contents, and buffers for what is in it.
#[derive(Default)]
struct ContentsPiece {
    /// Offset of the record in the file, in bytes.
    at: u64,
    /// Object whose frames the record has.
    object: u16,
    payload: Vec<u8>,
    runs: Vec<FrameRun>,
    /// Unpacked contents of the frames.
    contents: Vec<u8>,
    unpacker: Option<zstd::bulk::Decompressor<'static>>,
}

impl ContentsPiece {
    fn frames(
        &mut self,
        objects: Objects<'_>,
        before: &mut Option<FrameRun>,
    ) -> Result<usize, Damage> {
        let Self { payload, runs, object, .. } = self;
        Ok(decode_contents(payload, *object, objects, before, runs)?.frames)
    }

    /// Unpacks, checks and passes on the frames. Contents that exceed the frames' size are never
    /// unpacked.
    fn unpack<S: Sink>(&mut self, archive: &Archive, sink: &S) -> Result<(), S::Error> {
        let Self { at, object, payload, runs, contents, unpacker } = self;
        let at = *at;
        // The order was checked when the record was read.
        let decoded = decode_contents(payload, *object, archive.objects(), &mut None, runs);
        let Contents { frames, crcs, packed } = decoded.map_err(|e| archive.damaged(at, e))?;
        contents.resize(MAX_CONTENTS, 0);
        let room = &mut contents[..frames * PAGE_BYTES];
        let unpacker = match unpacker {
            Some(unpacker) => unpacker,
            none => {
                let new = zstd::bulk::Decompressor::new();
                none.insert(new.map_err(|e| reading(&archive.path, e))?)
            }
        };
        let frames = frames as u64;
        let damage = match unpacker.decompress_to_buffer(packed, room) {
            Ok(found) if found == room.len() => None,
            Ok(found) => Some(Damage::PackedLength { frames, found: found as u64 }),
            Err(cause) => Some(Damage::Packed { frames, cause }),
        };
        if let Some(damage) = damage {
            return Err(archive.damaged(at, damage).into());
        }
        let frames = runs.iter().flat_map(|run| run.frames());
        for ((gfn, page), crc) in
            frames.zip(room.chunks_exact(PAGE_BYTES)).zip(crcs.chunks_exact(4))
        {
            let expected = u32::from_le_bytes([crc[0], crc[1], crc[2], crc[3]]);
            let found = crc32c::crc32c(page);
            if found != expected {
                let epoch = archive.info.epoch;
                let damage = Damage::Frame { gfn, epoch, found, expected };
                return Err(archive.damaged(at, damage).into());
            }
        }
        let mut rest = &*room;
        for run in runs.iter() {
            let (now, later) = rest.split_at(run.bytes() as usize);
            sink.frames(*run, now)?;
            rest = later;
        }
        Ok(())
    }
}

/// A sink for a reader that only checks.
struct CheckSink;

impl Sink for CheckSink {
    type Error = StoreError;

    fn frames(&self, _: FrameRun, _: &[u8]) -> Result<(), StoreError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_is_no_archive() {
        let e = Archive::open(Path::new("/dev/zero")).unwrap_err().to_string();
        assert_eq!(e, "opening /dev/zero failed: it is not a regular file");
    }
}
