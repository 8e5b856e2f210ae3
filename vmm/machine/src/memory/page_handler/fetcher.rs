//! The thread that touches pages for others, so that their waits have a limit: a thread that waits
//! for a page handler in a fault cannot give up.

use std::io;
use std::sync::mpsc::{Receiver, Sender};

use driftline_dirty_tracker::FrameRun;
use driftline_guest::GuestRam;
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use vm_memory::{GuestAddress, GuestMemoryBackend};

/// Frames that are fetched with one call: 4 MiB.
pub(super) const FETCH_PIECE_FRAMES: u64 = 1024;

/// Frames to be fetched.
pub(super) struct FetchJob {
    /// Pieces of at most [`FETCH_PIECE_FRAMES`].
    pub(super) pieces: Vec<FrameRun>,
    /// Receives the result of each piece, in order, and is dropped by a caller that gives up.
    pub(super) fetched: Sender<io::Result<()>>,
}

/// Fetches the frames of `jobs` into `ram` until no more can come.
pub(super) fn run(ram: &GuestRam, jobs: &Receiver<FetchJob>) {
    for FetchJob { pieces, fetched } in jobs {
        for piece in pieces {
            let result = fetch(ram, piece);
            let is_last = result.is_err();
            if fetched.send(result).is_err() || is_last {
                break;
            }
        }
    }
}

/// Returns `frames` as pieces of at most [`FETCH_PIECE_FRAMES`].
pub(super) fn pieces(frames: &[FrameRun]) -> Vec<FrameRun> {
    frames.iter().flat_map(|run| run.chunks(FETCH_PIECE_FRAMES)).collect()
}

/// Waits until all of `piece` has memory. Frames that already have memory keep their content.
fn fetch(ram: &GuestRam, piece: FrameRun) -> io::Result<()> {
    let bytes = usize::try_from(piece.bytes()).map_err(io::Error::other)?;
    for slice in ram.get_slices(GuestAddress(piece.start.gpa()), bytes) {
        let slice = slice.map_err(io::Error::other)?;
        let address = slice.ptr_guard_mut().as_ptr();
        loop {
            // SAFETY: the range is part of a mapping that `ram` keeps; populating it for reading
            // leaves its bytes as they are.
            match unsafe { madvise(address.cast(), slice.len(), Advice::LinuxPopulateRead) } {
                Err(Errno::INTR) => {}
                populated => break populated?,
            }
        }
    }
    Ok(())
}
