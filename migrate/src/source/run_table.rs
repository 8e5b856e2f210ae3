//! Tables of runs for messages, built frame by frame.

use driftline_dirty_tracker::{FrameRun, Gfn};
use zerocopy::IntoBytes;

use crate::protocol::message::RawRun;

/// Frames in one PAGES, and blocks in one BLOCKS: 512 KiB of content, which stays in a core's cache
/// from copy to send.
pub(super) const FRAMES_PER_MESSAGE: u64 = 128;

/// Runs of frames or blocks that are added in ascending order.
#[derive(Default)]
pub(super) struct RunTableBuilder {
    runs: Vec<RawRun>,
    /// The last run, unless it has ended.
    open: Option<FrameRun>,
}

impl RunTableBuilder {
    /// Adds a frame to the last run, or begins a new run if the frame does not follow it.
    pub(super) fn add(&mut self, gfn: Gfn) {
        match &mut self.open {
            Some(run) if run.end() == gfn => {
                run.count += 1;
                self.runs.pop();
            }
            open => *open = Some(FrameRun { start: gfn, count: 1 }),
        }
        self.runs.extend(self.open.map(RawRun::from));
    }

    /// Ends the last run, so that the next frame begins a new one.
    pub(super) fn end_run(&mut self) {
        self.open = None;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns the number of runs.
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Returns the table as it is sent.
    pub(super) fn as_bytes(&self) -> &[u8] {
        self.runs.as_bytes()
    }

    /// Removes all runs. The table keeps its memory.
    pub(super) fn clear(&mut self) {
        self.runs.clear();
        self.open = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_frames_form_one_run() {
        let mut list = RunTableBuilder::default();
        [1, 2, 3, 7, 9, 10].into_iter().for_each(|gfn| list.add(Gfn(gfn)));
        list.end_run();
        list.add(Gfn(11));
        let runs: Vec<(u64, u64)> =
            list.runs.iter().map(FrameRun::from).map(|run| (run.start.0, run.count)).collect();
        assert_eq!(runs, [(1, 3), (7, 1), (9, 2), (11, 1)]);
        list.clear();
        assert!(list.is_empty());
    }
}
