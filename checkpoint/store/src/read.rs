//! Reads the contents of frames from the page file in long pieces, on a few threads. Each frame is
//! checked before it is passed on.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use driftline_guest::PAGE_BYTES;
use parking_lot::Mutex;

use crate::damage::Damage;
use crate::error::StoreError;
use crate::frame_map::FrameLocation;
use crate::page_file::PageReader;

/// Number of frames that one thread reads at a time: 1 MiB, which stays in a CPU cache until it has
/// been checked and copied.
const BATCH_FRAMES: usize = 256;
/// Maximum number of threads that read. One copies 1.7 GB/s into untouched memory (the bench
/// `restore`), so four take what a disk at PCIe 4.0 gives, 7 GB/s.
const THREADS: usize = 4;
/// Number of frames that the system is asked to read ahead in one call: 128 KiB, its own default
/// for reading ahead. It may ignore longer requests.
const AHEAD: u32 = 32;
/// Largest gap of unneeded slots that is read ahead as well, to save a request. 16, chosen: half of
/// [`AHEAD`], so at most a third of what is read ahead is not needed.
const GAP: u32 = 16;

/// Receiver of frames.
pub trait Sink: Sync {
    /// Error that stops the reading.
    type Error: From<StoreError> + Send;

    /// Receives adjacent frames and their contents, from any thread, in any order.
    ///
    /// # Errors
    ///
    /// Ends the reading.
    fn frames(&self, run: FrameRun, contents: &[u8]) -> Result<(), Self::Error>;

    /// Returns whether this number of frames is better read in their own order, which is not that
    /// of slots.
    fn in_order(&self, frames: u64) -> bool {
        let _ = frames;
        false
    }

    /// Receives a frame whose content is not what was stored.
    ///
    /// # Errors
    ///
    /// Ends the reading. The default returns the damage.
    fn damaged(&self, _gfn: Gfn, damage: StoreError) -> Result<(), Self::Error> {
        Err(damage.into())
    }
}

/// Reads `frames` of `epoch`, ascending by frame, and passes them to `sink`, as many adjacent ones
/// in one call as there are. Sorts and reads them by slot, which suits disks, unless `sink` wants
/// them in their own order. In that case, what is not in the page cache is read ahead by slot. An
/// error stops all threads; if several have one, the first in the order of reading is returned.
pub(crate) fn fetch<S: Sink>(
    pages: &PageReader,
    epoch: u64,
    frames: &mut [(Gfn, FrameLocation)],
    sink: &S,
) -> Result<(), S::Error> {
    let in_order = sink.in_order(frames.len() as u64);
    if !in_order {
        frames.sort_unstable_by_key(|(_, location)| location.slot);
    }
    let frames: &[(Gfn, FrameLocation)] = frames;
    let pieces: Vec<&[(Gfn, FrameLocation)]> = frames.chunks(BATCH_FRAMES).collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let work = || {
        let mut buffer = vec![0; BATCH_FRAMES * PAGE_BYTES];
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(at) else { return };
            if let Err(e) = read_piece(pages, epoch, piece, &mut buffer, sink) {
                // Stops the other threads, too.
                next.store(pieces.len(), Ordering::Relaxed);
                let mut failed = failed.lock();
                if failed.as_ref().is_none_or(|(before, _)| at < *before) {
                    *failed = Some((at, e));
                }
            }
        }
    };
    let ahead = || read_ahead(pages, frames, || next.load(Ordering::Relaxed) >= pieces.len());
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(THREADS).min(pieces.len());
    thread::scope(|scope| {
        // If no thread can be started, the existing ones do all of the work.
        let named = |name: &str| thread::Builder::new().name(name.into());
        if in_order && pieces.len() > 1 {
            _ = named("restore-ahead").spawn_scoped(scope, ahead);
        }
        for _ in 1..threads {
            if named("restore").spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let failed = failed.into_inner();
    failed.map_or(Ok(()), |(_, e)| Err(e))
}

/// Asks the system to read what is not in its cache, in the order of the disk, not of memory. Ends
/// when all is read, or when `over` returns true.
fn read_ahead(pages: &PageReader, frames: &[(Gfn, FrameLocation)], over: impl Fn() -> bool) {
    let mut slots: Vec<u32> = frames.iter().map(|(_, location)| location.slot).collect();
    slots.sort_unstable();
    for near in slots.chunk_by(|a, b| b - a <= GAP) {
        let (Some(first), Some(last)) = (near.first(), near.last()) else { continue };
        for slot in (*first..=*last).step_by(AHEAD as usize) {
            if over() {
                return;
            }
            pages.will_read(slot, AHEAD.min(last - slot + 1));
        }
    }
}

fn read_piece<S: Sink>(
    pages: &PageReader,
    epoch: u64,
    piece: &[(Gfn, FrameLocation)],
    buffer: &mut [u8],
    sink: &S,
) -> Result<(), S::Error> {
    // Frames before `at` are read, and frames before `done` are passed on.
    let (mut at, mut done) = (0, 0);
    for run in piece.chunk_by(|(_, a), (_, b)| a.slot.checked_add(1) == Some(b.slot)) {
        let end = at + run.len();
        match pages.read(run[0].1.slot, &mut buffer[at * PAGE_BYTES..end * PAGE_BYTES]) {
            Ok(()) => {}
            Err(e @ StoreError::Damaged { .. }) => {
                check_and_deliver(
                    pages,
                    epoch,
                    &piece[done..at],
                    &buffer[done * PAGE_BYTES..at * PAGE_BYTES],
                    sink,
                )?;
                match run {
                    [(gfn, _)] => sink.damaged(*gfn, e)?,
                    // The file ends within these frames, or the disk cannot read one of them: each
                    // is read alone.
                    _ => run.chunks(1).try_for_each(|one| {
                        read_piece(pages, epoch, one, &mut buffer[at * PAGE_BYTES..], sink)
                    })?,
                }
                done = end;
            }
            Err(e) => return Err(e.into()),
        }
        at = end;
    }
    check_and_deliver(
        pages,
        epoch,
        &piece[done..at],
        &buffer[done * PAGE_BYTES..at * PAGE_BYTES],
        sink,
    )
}

/// Checks frames that were read in one call, and passes them on.
fn check_and_deliver<S: Sink>(
    pages: &PageReader,
    epoch: u64,
    run: &[(Gfn, FrameLocation)],
    bytes: &[u8],
    sink: &S,
) -> Result<(), S::Error> {
    let mut at = 0;
    for together in run.chunk_by(|(a, _), (b, _)| a.0.checked_add(1) == Some(b.0)) {
        let contents = &bytes[at..at + together.len() * PAGE_BYTES];
        at += contents.len();
        let mut sound = 0;
        for ((gfn, location), page) in together.iter().zip(contents.chunks_exact(PAGE_BYTES)) {
            let found = crc32c::crc32c(page);
            if found != location.crc {
                let damage = Damage::Frame { gfn: *gfn, epoch, found, expected: location.crc };
                let offset = u64::from(location.slot) * PAGE_SIZE;
                sink.damaged(
                    *gfn,
                    StoreError::Damaged { file: pages.path.clone(), offset, damage },
                )?;
                continue;
            }
            sound += 1;
        }
        // Only a sink that looks for damage continues after some were damaged, and it needs no
        // contents.
        if sound == together.len() {
            sink.frames(FrameRun { start: together[0].0, count: sound as u64 }, contents)?;
        }
    }
    Ok(())
}

#[allow(clippy::unwrap_used, clippy::panic)]
#[cfg(all(test, feature = "testing"))]
mod tests {
    use std::collections::BTreeMap;

    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::backend::Backend;
    use crate::epoch_taker::EpochTaker;
    use crate::store::Store;
    use crate::testing::MemoryDisk;
    use driftline_guest::testing::{MemoryConfig, MemoryGuest};
    use driftline_guest::{GuestContents, VmId};

    /// Result for each frame: its first byte, or where it is damaged.
    #[derive(Default)]
    struct RecordingSink {
        in_order: bool,
        frames: Mutex<BTreeMap<u64, Result<u8, u64>>>,
        /// Number of frames in each call.
        runs: Mutex<Vec<u64>>,
    }

    impl Sink for RecordingSink {
        type Error = StoreError;

        fn frames(&self, run: FrameRun, contents: &[u8]) -> Result<(), StoreError> {
            self.runs.lock().push(run.count);
            let mut seen = self.frames.lock();
            for (gfn, page) in run.frames().zip(contents.chunks_exact(PAGE_BYTES)) {
                assert!(seen.insert(gfn.0, Ok(page[0])).is_none());
            }
            Ok(())
        }

        fn in_order(&self, _: u64) -> bool {
            self.in_order
        }

        fn damaged(&self, gfn: Gfn, damage: StoreError) -> Result<(), StoreError> {
            let StoreError::Damaged { offset, .. } = damage else { panic!("{damage}") };
            assert!(self.frames.lock().insert(gfn.0, Err(offset / PAGE_SIZE)).is_none());
            Ok(())
        }
    }

    #[test]
    fn each_frame_is_delivered_or_reported_once() {
        const FRAMES: u64 = 40;
        let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
        let disk = MemoryDisk::default();
        let store = Store::with_backend(Box::new(disk.clone()), true).unwrap();
        for gfn in 0..FRAMES {
            let page = [gfn as u8 + 1; PAGE_BYTES];
            guest.ram().write_slice(&page, GuestAddress(gfn * PAGE_SIZE)).unwrap();
        }
        EpochTaker::new(guest, store).take();
        let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
        let mut pinned = store.pin(None).unwrap();
        let stored = pinned.read_locations().unwrap().0;
        assert_eq!(stored.len() as u64, FRAMES);
        // Frames that are adjacent, in slots that are not: the locations of each ten frames are
        // reversed.
        let mut locations: Vec<FrameLocation> =
            stored.iter().map(|(_, location)| *location).collect();
        locations.chunks_mut(10).for_each(<[FrameLocation]>::reverse);
        let frames: Vec<(Gfn, FrameLocation)> = (100..).map(Gfn).zip(locations).collect();
        // The checksum of one frame is wrong, and the file ends within the last of the slots.
        let mut wrong = frames.clone();
        wrong[13].1.crc ^= 1;
        let ends = frames.iter().map(|(_, location)| location.slot).max().unwrap() - 4;
        for cut in [false, true] {
            if cut {
                let file = disk.open_for_writing("pages-1").unwrap();
                file.truncate(u64::from(ends) * PAGE_SIZE + 7).unwrap();
            }
            for in_order in [false, true] {
                for frames in [&frames, &wrong] {
                    let seen = RecordingSink { in_order, ..RecordingSink::default() };
                    fetch(&pinned.pages, 1, &mut frames.clone(), &seen).unwrap();
                    let expected = frames.iter().map(|(gfn, location)| {
                        let sound = stored.iter().find(|(_, c)| c == location);
                        let came = sound.filter(|_| !cut || location.slot < ends);
                        (
                            gfn.0,
                            came.map(|(gfn, _)| gfn.0 as u8 + 1).ok_or(u64::from(location.slot)),
                        )
                    });
                    let mut expected: BTreeMap<_, _> = expected.collect();
                    let mut found = seen.frames.into_inner();
                    // Frames that were read with a damaged one are not passed on.
                    let is_sound = frames[13].1 != wrong[13].1;
                    if !is_sound {
                        expected.retain(|gfn, _| found.contains_key(gfn));
                        assert_eq!(found.remove(&113), Some(Err(frames[13].1.slot.into())));
                        expected.remove(&113);
                    }
                    assert_eq!(found, expected);
                    let longest = seen.runs.into_inner().into_iter().max();
                    if is_sound && !cut {
                        assert_eq!(longest, Some(if in_order { FRAMES } else { 1 }));
                    }
                }
            }
        }
    }
}
