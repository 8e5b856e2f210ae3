//! Runs of frames in one list for each thread, presented as one ascending list.

use crate::{FrameRun, Layout};

/// The result of [`Tree::drain_parallel`](crate::Tree::drain_parallel): one list for each thread,
/// and the order of their pieces. Reuse it, since its buffers stay allocated: 16 bytes for each
/// run.
///
/// ```
/// # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, RunLists, Slot, SlotId, Tree};
/// # let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 }])?;
/// # let tree = Tree::new(&layout)?;
/// let mut lists = RunLists::default();
/// for _ in 0..2 {
///     tree.mark(&layout, FrameRun { start: Gfn(9), count: 500 })?;
///     assert_eq!(tree.drain_parallel(&layout, &mut lists), 500);
///     assert_eq!(lists.iter().collect::<Vec<_>>(), [FrameRun { start: Gfn(9), count: 500 }]);
///     assert_eq!(lists.pieces().map(|runs| runs.len()).sum::<usize>(), 1);
///     assert_eq!(lists.frames(), 500);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct RunLists {
    lists: Vec<Worker>,
    /// All pieces, ascending by frame.
    pieces: Vec<(usize, Piece)>,
    frames: u64,
}

/// The list of one thread.
#[derive(Debug, Default)]
pub(super) struct Worker {
    runs: Vec<FrameRun>,
    pieces: Vec<Piece>,
    frames: u64,
}

/// Consecutive runs in one thread's list: those of one piece of work.
#[derive(Debug, Clone, Copy)]
struct Piece {
    number: usize,
    from: usize,
    to: usize,
}

impl Worker {
    fn clear(&mut self) {
        self.runs.clear();
        self.pieces.clear();
        self.frames = 0;
    }

    /// Appends the runs of one piece of work. `fill` finds the runs and returns the number of
    /// frames.
    pub(super) fn piece(&mut self, number: usize, fill: impl FnOnce(&mut Vec<FrameRun>) -> u64) {
        // The list is moved to the stack meanwhile: the lists are adjacent, with their lengths in
        // one cache line.
        let mut runs = std::mem::take(&mut self.runs);
        let from = runs.len();
        self.frames += fill(&mut runs);
        let to = runs.len();
        self.runs = runs;
        if to > from {
            self.pieces.push(Piece { number, from, to });
        }
    }
}

impl RunLists {
    /// Returns `workers` empty lists.
    pub(super) fn begin(&mut self, workers: usize) -> &mut [Worker] {
        self.lists.resize_with(workers.max(self.lists.len()), Worker::default);
        self.lists.iter_mut().for_each(Worker::clear);
        &mut self.lists[..workers]
    }

    /// Sorts the pieces and joins runs that touch where two pieces meet. Returns the number of
    /// frames.
    pub(super) fn finish(&mut self, layout: &Layout) -> u64 {
        self.pieces.clear();
        for (list, worker) in self.lists.iter().enumerate() {
            self.pieces.extend(worker.pieces.iter().map(|piece| (list, *piece)));
        }
        self.pieces.sort_unstable_by_key(|(_, piece)| piece.number);
        for i in 1..self.pieces.len() {
            let ((left, before), (right, after)) = (self.pieces[i - 1], self.pieces[i]);
            // No piece is empty here: a piece loses its last run only after it was the right one.
            let last = self.lists[left].runs[before.to - 1];
            let first = &mut self.lists[right].runs[after.from];
            let joined = FrameRun { start: last.start, count: last.count + first.count };
            if last.end() == first.start && layout.contains(joined) {
                *first = joined;
                self.pieces[i - 1].1.to -= 1;
            }
        }
        self.frames = self.lists.iter().map(|worker| worker.frames).sum();
        self.frames
    }

    /// Returns the number of frames. O(1).
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Returns the runs, ascending. No two runs touch within a slot.
    pub fn iter(&self) -> impl Iterator<Item = FrameRun> + '_ {
        self.pieces().flatten().copied()
    }

    /// Returns the same runs in pieces of some length, ascending, for distribution to several
    /// threads.
    pub fn pieces(&self) -> impl Iterator<Item = &[FrameRun]> {
        let runs = |(list, piece): &(usize, Piece)| &self.lists[*list].runs[piece.from..piece.to];
        self.pieces.iter().map(runs).filter(|runs| !runs.is_empty())
    }
}
