//! How work over a tree is split, and the threads that do it.
//!
//! A *grain* is what is worth a thread. Work is cut finer, in a row of *pieces*, and a thread takes
//! the next piece when it is done with one: who meets much that is dirty takes fewer. Threads are
//! those of the rayon pool that the caller is in, else of the global one; without the feature
//! `parallel` there is one thread, and the same results.

use super::words::SHIFT;
use crate::sync::{self, Mutex};
use pool::{on_threads, threads};

/// Leaf words that are worth a thread: the bitmap of 16 GiB of guest memory, 512 KiB. The cheapest
/// pass over them takes 50 us, which is what it costs to wake a second thread, so less than two
/// times that stays on one thread.
pub(super) const GRAIN: usize = 16 << (2 * SHIFT);

/// Pieces that a thread takes of large work: none waits for the last one longer than a 64th of its
/// time, but where much more is dirty in one piece than in another.
const PIECES: usize = 64;

/// The smallest piece is this part of a grain: a whole subtree of level 2, 32 KiB of leaves. Large
/// work has pieces of up to a grain, since passes over memory are a tenth slower in rows so short.
const FINEST: usize = 16;

/// How some work is split.
pub(super) struct Split {
    /// Threads, at least one.
    pub(super) workers: usize,
    /// How much a thread takes at a time, at least 1.
    pub(super) piece: usize,
}

impl Split {
    /// Of work so large, with so much worth a thread. Asks the pool, which makes the threads of the
    /// global one, only if there are two grains.
    pub(super) fn of(work: usize, grain: usize) -> Self {
        let grains = work / grain.max(1);
        let workers = if grains < 2 { 1 } else { grains.min(threads()) };
        let piece = (work / (workers * PIECES)).clamp(grain / FINEST, grain).max(1);
        Self { workers, piece }
    }

    /// The same with pieces of whole summaries, and of whole subtrees of level 2 if they are
    /// larger: no two threads meet at a summary of those levels.
    pub(super) fn of_leaves(work: usize, grain: usize) -> Self {
        let Self { workers, piece } = Self::of(work, grain);
        let subtree = if piece < 1 << (2 * SHIFT) { SHIFT } else { 2 * SHIFT };
        Self { workers, piece: piece.next_multiple_of(1 << subtree) }
    }
}

/// Gives each of the workers, on a thread of its own, one piece of `work` after the other until
/// there are no more. Helpers lie side by side: `each` does well to change its own once a piece.
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

/// Gives `work` a count for each of the workers, and answers with their sum. One worker allocates
/// nothing.
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
