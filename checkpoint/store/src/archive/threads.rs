//! Runs threads that pack or unpack.

use std::thread;

use crate::archive::contents::MAX_FRAMES;

/// Maximum number of threads that pack or unpack. 8, chosen: each has a record of 2 MiB and its
/// packed form in work, so all have at most 32 MiB.
const THREADS: usize = 8;

/// Runs `work` on as many threads as there are processors, but no more than this number of frames
/// needs.
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
