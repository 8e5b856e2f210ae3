//! One run of hints: which frames the guest has no use for while a copy of all memory is begun.
//!
//! ```text
//! device   command = id ------------------------------------------------- command = DONE
//! driver        takes free frames;  id, frames, frames, .., STOP          gives them back
//! ```
//!
//! A hint says that the frame's content was of no use at some moment after the command was given.
//! The guest may take the frame back at any time and write to it, even before the hint is read
//! here: so nothing is discarded. The copy leaves the frame out, and as whoever copies has followed
//! writes since before the command, a frame that was written since is in the next epoch. What the
//! copy then lacks is the content of frames that were free and not written since, which is
//! nobody's.

use std::sync::mpsc::Sender;

use driftline_dirty_tracker::{FrameRun, FrameSet};

/// Ends the driver's hints, and as a command says that they would be of no use.
pub(super) const STOP: u32 = 0;
/// The command that there is none: the driver has its frames back.
pub(super) const DONE: u32 = 1;
/// Most runs kept; what a driver hints beyond is copied like other frames.
const MOST_RUNS: usize = 65_536;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Hints {
    /// The number given last.
    last: u32,
    run: Option<Run>,
}

#[derive(Debug)]
pub(super) struct Run {
    /// The driver has said that what follows is for this run.
    begun: bool,
    free: FrameSet,
    reply: Sender<FrameSet>,
}

impl Run {
    /// Gives whoever wanted it what there is.
    pub(super) fn answer(self) {
        // They may have gone meanwhile.
        let _ = self.reply.send(self.free);
    }
}

impl Hints {
    /// Begins a run, for `reply`; the command that has a number of its own.
    pub(super) fn begin(&mut self, reply: Sender<FrameSet>) -> u32 {
        // STOP and DONE are no numbers.
        self.last = self.last.wrapping_add(1).max(DONE + 1);
        self.run = Some(Run { begun: false, free: FrameSet::new(), reply });
        self.last
    }

    /// The driver begins to hint for command `id`: perhaps an old one.
    pub(super) fn driver_begins(&mut self, id: u32) {
        if let Some(run) = &mut self.run {
            run.begun = id == self.last;
        }
    }

    /// The driver hints.
    pub(super) fn add(&mut self, frames: FrameRun) {
        if let Some(run) = self.run.as_mut().filter(|r| r.begun && r.free.len() < MOST_RUNS) {
            run.free.insert(frames);
        }
    }

    /// Ends the run, if there is one. The driver's end may be that of an earlier run.
    #[must_use = "somebody waits for its answer"]
    pub(super) fn end(&mut self, by_driver: bool) -> Option<Run> {
        self.run.take_if(|run| run.begun || !by_driver)
    }

    pub(super) fn last_command(&self) -> u32 {
        self.last
    }

    /// Goes on with numbers after `last`.
    pub(super) fn restore(&mut self, last: u32) {
        (self.last, self.run) = (last, None);
    }
}
