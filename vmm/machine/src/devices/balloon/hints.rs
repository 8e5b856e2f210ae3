//! One run of hints: frames that the guest does not use while a copy of all memory begins.
//!
//! ```text
//! device   command = id ------------------------------------------------- command = DONE
//! driver        takes free frames;  id, frames, frames, .., STOP          gives them back
//! ```
//!
//! A hint says that the content of a frame was unused at some moment after the command was given.
//! The guest may take the frame back and write to it at any time, even before the device reads the
//! hint, so nothing is discarded. The copy skips the frame. The thread that copies has tracked
//! writes since before the command, so a frame that was written since then is in the next epoch.
//! The copy therefore lacks only the content of frames that were free and not written since, which
//! nothing needs.

use std::sync::mpsc::Sender;

use driftline_dirty_tracker::{FrameRun, FrameSet};

/// Ends the hints when sent by the driver. As a command it means that hints are not wanted.
pub(super) const STOP: u32 = 0;
/// Command that says that no hinting is in progress: the driver may take its frames back.
pub(super) const DONE: u32 = 1;
/// Most runs that are kept. Frames of further hints are copied like any others.
const MAX_RUNS: usize = 65_536;

/// Hints of a guest. See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Hints {
    /// Number of the last command.
    last: u32,
    run: Option<HintRun>,
}

#[derive(Debug)]
pub(super) struct HintRun {
    /// Whether the driver has said that the following hints belong to this run.
    begun: bool,
    free: FrameSet,
    reply: Sender<FrameSet>,
}

impl HintRun {
    /// Sends the frames so far to the requester.
    pub(super) fn answer(self) {
        // The requester may have ended meanwhile.
        let _ = self.reply.send(self.free);
    }
}

impl Hints {
    /// Starts a run whose result goes to `reply`. Returns the command, which has a new number.
    pub(super) fn begin(&mut self, reply: Sender<FrameSet>) -> u32 {
        // Skip the numbers of STOP and DONE.
        self.last = self.last.wrapping_add(1).max(DONE + 1);
        self.run = Some(HintRun { begun: false, free: FrameSet::new(), reply });
        self.last
    }

    /// Handles the start of the driver's hints for command `id`, which may be an old command.
    pub(super) fn driver_begins(&mut self, id: u32) {
        if let Some(run) = &mut self.run {
            run.begun = id == self.last;
        }
    }

    /// Adds hinted frames.
    pub(super) fn add(&mut self, frames: FrameRun) {
        if let Some(run) = self.run.as_mut().filter(|r| r.begun && r.free.len() < MAX_RUNS) {
            run.free.insert(frames);
        }
    }

    /// Ends the run and returns it, if there is one. A driver's STOP is ignored if it may belong to
    /// an earlier run.
    #[must_use = "the requester waits for its answer"]
    pub(super) fn end(&mut self, by_driver: bool) -> Option<HintRun> {
        self.run.take_if(|run| run.begun || !by_driver)
    }

    pub(super) fn last_command(&self) -> u32 {
        self.last
    }

    /// Drops the current run. Later commands use numbers after `last`.
    pub(super) fn restore(&mut self, last: u32) {
        (self.last, self.run) = (last, None);
    }
}
