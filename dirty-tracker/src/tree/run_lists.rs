//! Runs of frames in one list for each thread, presented as one ascending list.

use crate::{FrameRun, FrameSet, Layout};

/// The result of a drain: one list for each thread, and the order of their pieces. It is reused,
/// since its buffers stay allocated: 16 bytes for each run.
#[derive(Debug, Default)]
pub(crate) struct RunLists {
    lists: Vec<WorkerRuns>,
    /// All pieces, ascending by frame.
    pieces: Vec<(usize, PieceRuns)>,
    frames: u64,
}

/// The list of one thread.
#[derive(Debug, Default)]
pub(super) struct WorkerRuns {
    runs: Vec<FrameRun>,
    pieces: Vec<PieceRuns>,
    frames: u64,
}

/// Consecutive runs in one thread's list: those of one piece of work.
#[derive(Debug, Clone, Copy)]
struct PieceRuns {
    number: usize,
    from: usize,
    to: usize,
}

impl WorkerRuns {
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
            self.pieces.push(PieceRuns { number, from, to });
        }
    }
}

impl RunLists {
    /// Returns `workers` empty lists.
    pub(super) fn begin(&mut self, workers: usize) -> &mut [WorkerRuns] {
        self.lists.resize_with(workers.max(self.lists.len()), WorkerRuns::default);
        self.lists.iter_mut().for_each(WorkerRuns::clear);
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

    /// Adds the runs of another drain. Frames that `layout` does not have are dropped.
    pub(crate) fn merge(&mut self, more: impl ExactSizeIterator<Item = FrameRun>, layout: &Layout) {
        let mut all: FrameSet = self.iter().collect();
        all.extend(more);
        self.begin(1)[0].piece(0, |runs| {
            runs.extend(all.iter().flat_map(|run| layout.parts(run)));
            runs.iter().map(|run| run.count).sum()
        });
        self.finish(layout);
    }

    /// Discards the runs and keeps the buffers.
    pub(crate) fn clear(&mut self) {
        self.begin(0);
        self.pieces.clear();
        self.frames = 0;
    }

    /// Returns the number of frames. O(1).
    pub(crate) fn frames(&self) -> u64 {
        self.frames
    }

    /// Returns the runs, ascending. No two runs touch within a slot.
    pub(crate) fn iter(&self) -> ListedRuns<'_> {
        let left = self.pieces.iter().map(|(_, piece)| piece.to - piece.from).sum();
        ListedRuns { lists: self, piece: 0, next: 0, left }
    }
}

/// The runs of some lists, ascending.
#[derive(Debug, Clone)]
pub(crate) struct ListedRuns<'l> {
    lists: &'l RunLists,
    piece: usize,
    /// Position in the piece.
    next: usize,
    left: usize,
}

impl Iterator for ListedRuns<'_> {
    type Item = FrameRun;

    fn next(&mut self) -> Option<FrameRun> {
        loop {
            let (list, piece) = self.lists.pieces.get(self.piece)?;
            let runs = &self.lists.lists[*list].runs[piece.from..piece.to];
            if let Some(run) = runs.get(self.next) {
                self.next += 1;
                self.left -= 1;
                return Some(*run);
            }
            (self.piece, self.next) = (self.piece + 1, 0);
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for ListedRuns<'_> {}
