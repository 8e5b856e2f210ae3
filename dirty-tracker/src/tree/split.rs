//! Splits work over a tree between threads.
//!
//! A *grain* is the smallest amount of work for which a thread is worthwhile. Work is cut finer,
//! into a row of *pieces*. A thread takes the next piece when it has finished one, so a thread
//! whose pieces are dense takes fewer. The threads belong to the rayon pool that the caller is in,
//! or else to the global pool. Without the feature `parallel` one thread does all the work, with
//! the same results.

use super::words::SHIFT;
use crate::sync::{self, Mutex};
use pool::{on_threads, threads};

/// The grain of a tree in leaf words: the bitmap of 16 GiB of guest memory, 512 KiB. The cheapest
/// pass over a grain takes 50 us, as long as it takes to wake a second thread. Work of less than
/// two grains therefore stays on one thread. Smaller under a model checker, whose trees are small.
pub(super) const GRAIN: usize = if cfg!(driftline_shuttle) { 64 } else { 16 << (2 * SHIFT) };

/// Whether there can be several threads.
pub(super) const CAN_SHARE: bool =
    cfg!(any(all(feature = "parallel", not(driftline_loom)), driftline_shuttle));

/// Number of pieces that a thread takes of large work. No thread waits for the last piece longer
/// than a 64th of its time, unless one piece is much denser than the others.
const PIECES: usize = 64;

/// Number of smallest pieces in a grain. Such a piece is an entire subtree of level 2, 32 KiB of
/// leaves. Large work has pieces of up to a grain, since passes over memory are a tenth slower in
/// pieces that short.
const FINEST: usize = 16;

/// The way in which some work is split.
pub(super) struct WorkSplit {
    /// Number of threads, at least one.
    pub(super) workers: usize,
    /// Amount of work that a thread takes at a time, at least 1.
    pub(super) piece: usize,
}

impl WorkSplit {
    /// Splits `work` for a grain of `grain`. Asks the pool for its size only if there are two
    /// grains, because the question starts the threads of the global pool.
    pub(super) fn of(work: usize, grain: usize) -> Self {
        let grains = work / grain.max(1);
        let workers = if grains < 2 { 1 } else { grains.min(threads()) };
        let piece = (work / (workers * PIECES)).clamp(grain / FINEST, grain).max(1);
        Self { workers, piece }
    }

    /// As [`of`](Self::of), with pieces of whole summaries, and of whole subtrees of level 2 if
    /// they are larger: no two threads access the same summary of these levels.
    pub(super) fn of_leaves(work: usize, grain: usize) -> Self {
        let Self { workers, piece } = Self::of(work, grain);
        let subtree = if piece < 1 << (2 * SHIFT) { SHIFT } else { 2 * SHIFT };
        Self { workers, piece: piece.next_multiple_of(1 << subtree) }
    }
}

/// Runs the workers, each on a thread of its own; each takes one piece of `work` after the other
/// until none is left. The workers are adjacent in memory, so `each` should write to its worker
/// once per piece.
pub(super) fn distribute<T: Send, S: Send>(
    workers: &mut [S],
    work: impl Iterator<Item = T> + Send,
    each: impl Fn(&mut S, T) + Sync,
) {
    if let [one] = workers {
        work.for_each(|piece| each(one, piece));
        return;
    }
    let work = Mutex::new(work);
    let next = || sync::lock(&work).next();
    on_threads(workers, |worker| {
        while let Some(piece) = next() {
            each(worker, piece);
        }
    });
}

/// Calls `work` with a counter for each worker and returns the sum of the counters. Allocates
/// nothing for one worker.
pub(super) fn sum(workers: usize, work: impl FnOnce(&mut [u64])) -> u64 {
    let (mut one, mut many) = ([0], Vec::new());
    let counts = match workers {
        1 => &mut one[..],
        _ => {
            many.resize(workers, 0);
            &mut many[..]
        }
    };
    work(counts);
    counts.iter().sum()
}

#[cfg(all(feature = "parallel", not(any(driftline_loom, driftline_shuttle))))]
mod pool {
    pub(super) fn threads() -> usize {
        rayon::current_num_threads()
    }

    pub(super) fn on_threads<S: Send>(workers: &mut [S], each: impl Fn(&mut S) + Sync) {
        rayon::scope(|scope| {
            let each = &each;
            workers.iter_mut().for_each(|worker| scope.spawn(move |_| each(worker)));
        });
    }
}

#[cfg(driftline_shuttle)]
mod pool {
    pub(super) fn threads() -> usize {
        2
    }

    pub(super) fn on_threads<S: Send>(workers: &mut [S], each: impl Fn(&mut S) + Sync) {
        shuttle::thread::scope(|scope| {
            let each = &each;
            for worker in workers {
                scope.spawn(move || each(worker));
            }
        });
    }
}

#[cfg(not(any(all(feature = "parallel", not(driftline_loom)), driftline_shuttle)))]
mod pool {
    pub(super) fn threads() -> usize {
        1
    }

    pub(super) fn on_threads<S: Send>(workers: &mut [S], each: impl Fn(&mut S) + Sync) {
        workers.iter_mut().for_each(each);
    }
}
