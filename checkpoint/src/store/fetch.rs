//! Frames' contents read from the page file in long pieces, on a few threads, each frame checked before it is handed out.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};

use super::pages::PageReader;
use super::{Cell, Damage, StoreError};

const PAGE: usize = PAGE_SIZE as usize;
/// Frames that one thread reads at a time: 1 MiB, which stays in a cache until it has been checked and copied.
const AT_ONCE: usize = 256;
/// Most threads that read.
const THREADS: usize = 4;

/// Where frames go to.
pub(crate) trait Sink: Sync {
    /// What stops the reading.
    type Error: From<StoreError> + Send;

    /// Frames that follow one another, and their contents. From any thread, in any order.
    fn frames(&self, run: FrameRun, contents: &[u8]) -> Result<(), Self::Error>;

    /// A frame that is not what was stored.
    fn damaged(&self, _gfn: Gfn, damage: StoreError) -> Result<(), Self::Error> {
        Err(damage.into())
    }
}

/// Reads `frames` of `epoch`, which it sorts by slot, and hands them to `sink`. The first error, as far as that can be said of
/// several threads, ends it.
pub(crate) fn fetch<S: Sink>(
    pages: &PageReader,
    epoch: u64,
    frames: &mut [(Gfn, Cell)],
    sink: &S,
) -> Result<(), S::Error> {
    frames.sort_unstable_by_key(|(_, cell)| cell.slot);
    let pieces: Vec<&[(Gfn, Cell)]> = frames.chunks(AT_ONCE).collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let work = || {
        let mut buffer = vec![0; AT_ONCE * PAGE];
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(at) else { return };
            if let Err(e) = read_piece(pages, epoch, piece, &mut buffer, sink) {
                // The others stop, too.
                next.store(pieces.len(), Ordering::Relaxed);
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                if failed.as_ref().is_none_or(|(before, _)| at < *before) {
                    *failed = Some((at, e));
                }
            }
        }
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(THREADS).min(pieces.len());
    thread::scope(|scope| {
        for _ in 1..threads {
            // Where no thread can be had, those that are there do all of it.
            let named = thread::Builder::new().name("restore".into());
            if named.spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.map_or(Ok(()), |(_, e)| Err(e))
}

fn read_piece<S: Sink>(
    pages: &PageReader,
    epoch: u64,
    piece: &[(Gfn, Cell)],
    buffer: &mut [u8],
    sink: &S,
) -> Result<(), S::Error> {
    for run in piece.chunk_by(|(_, a), (_, b)| a.slot.checked_add(1) == Some(b.slot)) {
        let bytes = &mut buffer[..run.len() * PAGE];
        match pages.read(run[0].1.slot, bytes) {
            Ok(()) => hand_out(pages, epoch, run, bytes, sink)?,
            Err(StoreError::Damaged { .. }) if run.len() > 1 => {
                // It ends within these: each by itself.
                for one in run.chunks(1) {
                    read_piece(pages, epoch, one, bytes, sink)?;
                }
            }
            Err(e @ StoreError::Damaged { .. }) => sink.damaged(run[0].0, e)?,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Checks frames that were read at once, and hands them on.
fn hand_out<S: Sink>(
    pages: &PageReader,
    epoch: u64,
    run: &[(Gfn, Cell)],
    bytes: &[u8],
    sink: &S,
) -> Result<(), S::Error> {
    let mut at = 0;
    for together in run.chunk_by(|(a, _), (b, _)| a.0.checked_add(1) == Some(b.0)) {
        let contents = &bytes[at..at + together.len() * PAGE];
        at += contents.len();
        let mut sound = 0;
        for ((gfn, cell), page) in together.iter().zip(contents.chunks_exact(PAGE)) {
            let found = crc32c::crc32c(page);
            if found != cell.crc {
                let damage = Damage::Frame { gfn: *gfn, epoch, found, expected: cell.crc };
                let offset = u64::from(cell.slot) * PAGE_SIZE;
                sink.damaged(
                    *gfn,
                    StoreError::Damaged { file: pages.path.clone(), offset, damage },
                )?;
                continue;
            }
            sound += 1;
        }
        // Of some only who looks for damage goes on, and he wants no contents.
        if sound == together.len() {
            sink.frames(FrameRun { start: together[0].0, count: sound as u64 }, contents)?;
        }
    }
    Ok(())
}
