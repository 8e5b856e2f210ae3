//! Writes an archive: several threads read and compress frames, which are written in order.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use driftline_dirty_tracker::{FrameRun, Gfn};
use driftline_format::{Header, MAGIC_ARCHIVE};
use driftline_guest::{PAGE_BYTES, Section};
use parking_lot::{Condvar, Mutex};

use crate::address::place;
use crate::archive::threads::side_by_side;
use crate::error::StoreError;
use crate::export::ExportReport;
use crate::frame_map::{FrameLocation, FrameMap};
use crate::lazy::{read_frames, runs_of_locations};
use crate::object::encode_drives;
use crate::page_file::PageReader;
use crate::pin::Machine;
use crate::record_file::contents::{MAX_CONTENTS, MAX_FRAMES, TAG_CONTENTS, encode_contents};
use crate::record_file::output::RecordOutput;
use crate::records::{Front, TAG_DRIVES, TAG_EPOCH};
use crate::store::Store;

/// Compression level: zstd's default, since an archive is less urgent than a migration.
const LEVEL: i32 = 3;

impl Store {
    /// Writes `epoch`, or the latest, to `file`, which must be empty, as an archive: all of its
    /// state, then its memory, and then its drives. Up to eight threads compress memory and drives,
    /// each with some 10 MiB of buffers. `restore_archive` of `driftline-checkpoint` restores a
    /// guest from it. `path` is for messages. Everything that is read is checked. The file is
    /// durable when this returns; after an error its content is undefined.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoEpoch`] if the epoch is not there; damage; or the system's errors.
    pub fn export_archive(
        &self,
        epoch: Option<u64>,
        file: &File,
        path: &Path,
    ) -> Result<ExportReport, StoreError> {
        let mut pinned = self.pin(epoch)?;
        let machine = pinned.read_machine()?;
        let mut map = FrameMap::default();
        let sections = pinned.read_map(&mut map)?.sections;
        let logged = &pinned.log.epochs[pinned.index];
        let (info, front) = (logged.info, logged.front);
        // In the archive, the epoch builds on nothing, even if it did in the store.
        let front = Front { rebased: front.parent.is_some(), ..front };
        let frames: Vec<(Gfn, FrameLocation)> = map.all().collect();
        drop(map);
        let header = Header::new(MAGIC_ARCHIVE, info.vm_id, info.epoch, front.layout);
        let io = |cause| StoreError::Io { what: "writing", path: path.to_owned(), cause };
        let mut out = RecordOutput::new(file, &header).map_err(io)?;
        begin(&mut out, &front, &machine, &sections).map_err(io)?;
        let out = pack(&pinned.pages, info.epoch, &frames, out, path)?;
        let frames = frames.len() as u64;
        let bytes = out.end(info.epoch, frames).map_err(io)?;
        file.sync_all().map_err(|cause| StoreError::Io {
            what: "syncing",
            path: path.to_owned(),
            cause,
        })?;
        Ok(ExportReport { epoch: info.epoch, vm_id: info.vm_id, bytes, frames, drives: 0 })
    }
}

/// Writes the records in front of the contents.
fn begin(
    out: &mut RecordOutput<&File>,
    front: &Front,
    machine: &Machine,
    sections: &[Section],
) -> io::Result<()> {
    out.record(TAG_EPOCH, 0, &front.encode())?;
    out.machine(&machine.layout, &machine.config)?;
    if front.drives {
        let list = encode_drives(&machine.drives);
        let list = list.ok_or_else(|| io::Error::other("a drive's name or size is invalid"))?;
        out.record(TAG_DRIVES, 0, &list)?;
    }
    out.sections(sections)
}

/// The output, and the number of the piece that is written next.
struct OutputTurn<'f> {
    out: RecordOutput<&'f File>,
    next: usize,
    failed: Option<StoreError>,
    /// Whether a thread has panicked, which then does not end its turn.
    panicked: bool,
}

/// Ends the wait of the other threads for their turns when a thread that panics drops it.
struct PackerPanicGuard<'t, 'f> {
    turn: &'t Mutex<OutputTurn<'f>>,
    is_next: &'t Condvar,
}

impl Drop for PackerPanicGuard<'_, '_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.turn.lock().panicked = true;
            self.is_next.notify_all();
        }
    }
}

/// Writes all `frames`, which ascend by number.
fn pack<'f>(
    pages: &PageReader,
    epoch: u64,
    frames: &[(Gfn, FrameLocation)],
    out: RecordOutput<&'f File>,
    path: &Path,
) -> Result<RecordOutput<&'f File>, StoreError> {
    let objects = frames.chunk_by(|(a, _), (b, _)| place(*a).0 == place(*b).0);
    let pieces: Vec<&[(Gfn, FrameLocation)]> =
        objects.flat_map(|of| of.chunks(MAX_FRAMES)).collect();
    let taken = AtomicUsize::new(0);
    let turn = Mutex::new(OutputTurn { out, next: 0, failed: None, panicked: false });
    let is_next = Condvar::new();
    // A thread's panic is passed on.
    side_by_side("pack", frames.len() as u64, || {
        let _end = PackerPanicGuard { turn: &turn, is_next: &is_next };
        let mut packer = PiecePacker::default();
        loop {
            let at = taken.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(at) else { return };
            let packed = packer.pack(pages, epoch, piece, path);
            // The thread that took the previous piece is working on it, so this turn comes unless
            // that thread panics.
            let others = |turn: &mut OutputTurn| turn.next != at && !turn.panicked;
            let mut turn = turn.lock();
            is_next.wait_while(&mut turn, others);
            if turn.panicked {
                return;
            }
            let written = packed.and_then(|()| {
                let object = piece.first().map_or(0, |(gfn, _)| place(*gfn).0);
                let written = turn.out.record(TAG_CONTENTS, object, &packer.payload);
                let what = "writing";
                written.map_err(|cause| StoreError::Io { what, path: path.to_owned(), cause })
            });
            if let Err(e) = written {
                turn.failed.get_or_insert(e);
                taken.store(pieces.len(), Ordering::Relaxed);
            }
            turn.next += 1;
            is_next.notify_all();
        }
    });
    let turn = turn.into_inner();
    turn.failed.map_or(Ok(turn.out), Err)
}

/// Buffers with which a thread compresses.
#[derive(Default)]
struct PiecePacker {
    contents: Vec<u8>,
    packed: Vec<u8>,
    payload: Vec<u8>,
    zstd: Option<zstd::bulk::Compressor<'static>>,
}

impl PiecePacker {
    /// Sets `payload` to the payload for `piece`.
    fn pack(
        &mut self,
        pages: &PageReader,
        epoch: u64,
        piece: &[(Gfn, FrameLocation)],
        path: &Path,
    ) -> Result<(), StoreError> {
        let Self { contents, packed, payload, zstd } = self;
        let io = |cause| StoreError::Io { what: "packing for", path: path.to_owned(), cause };
        contents.resize(MAX_CONTENTS, 0);
        let contents = &mut contents[..piece.len() * PAGE_BYTES];
        read_frames(pages, epoch, piece, contents)?;
        let zstd = match zstd {
            Some(zstd) => zstd,
            none => none.insert(zstd::bulk::Compressor::new(LEVEL).map_err(io)?),
        };
        packed.resize(zstd::zstd_safe::compress_bound(MAX_CONTENTS), 0);
        let length = zstd.compress_to_buffer(contents, &mut packed[..]).map_err(io)?;
        let runs: Vec<FrameRun> = runs_of_locations(piece).collect();
        encode_contents(
            &runs,
            piece.iter().map(|(_, location)| location.crc),
            &packed[..length],
            payload,
        );
        Ok(())
    }
}
