//! Runs threads that pack or unpack.

use std::thread;

use crate::record_file::contents::MAX_FRAMES;

/// Maximum number of threads that pack or unpack. 8, chosen: a thread that packs has some 10 MiB of
/// buffers, and one that unpacks 5 MiB, so all have at most some 80 MiB.
const THREADS: usize = 8;

/// Runs `work` on one thread for each processor, but on at most [`THREADS`], and on no more than
/// this number of frames needs.
pub(crate) fn side_by_side(name: &str, frames: u64, work: impl Fn() + Sync) {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let pieces = usize::try_from(frames.div_ceil(MAX_FRAMES as u64)).unwrap_or(usize::MAX);
    thread::scope(|scope| {
        for _ in 1..cores.min(THREADS).min(pieces) {
            // If no thread can be started, the existing ones do all of the work.
            if thread::Builder::new().name(name.into()).spawn_scoped(scope, &work).is_err() {
                break;
            }
        }
        work();
    });
}
